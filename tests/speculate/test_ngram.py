"""Copies from a sequence's own text, against a plain search over the whole text."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.speculate.ngram import MAX_MATCH, MIN_MATCH, NgramDrafter


def proposed(drafter: NgramDrafter, max_tokens: int = 4) -> tuple[int, ...]:
    proposal = drafter.propose(max_tokens)
    return proposal.token_ids if proposal else ()


def best_agreement(text: list[int]) -> int:
    """Length of the longest tail that stands somewhere earlier in the text, by trying all places."""
    lengths = [0]
    for place in range(1, len(text)):
        pairs = zip(reversed(text[:place]), reversed(text), strict=False)
        lengths.append(sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
    return max(lengths)


@given(
    prompt=st.lists(st.integers(0, 2), max_size=24),
    output=st.lists(st.integers(0, 2), max_size=24),
)
def test_a_proposal_follows_the_longest_agreement(prompt: list[int], output: list[int]) -> None:
    drafter = NgramDrafter(prompt)
    drafter.append(output)
    text = prompt + output
    agreement = best_agreement(text)
    copied = proposed(drafter, 2)
    assert (len(copied) > 0) == (agreement >= MIN_MATCH)
    if not copied:
        return
    proposal = drafter.propose(1)
    assert proposal is not None
    length = round(2 * proposal.confidences[0] / (1 - proposal.confidences[0]))
    assert MIN_MATCH <= length <= agreement
    tail = text[len(text) - length :]
    followers = {text[at + length] for at in range(len(text) - length) if text[at : at + length] == tail}
    assert copied[0] in followers


@given(st.lists(st.integers(0, 5), min_size=1, max_size=200), st.integers(0, 200))
def test_a_text_in_pieces_is_indexed_like_a_text_in_one(text: list[int], cut: int) -> None:
    in_pieces = NgramDrafter(text[:cut])
    for token_id in text[cut:]:
        in_pieces.append([token_id])
    assert in_pieces.propose(4) == NgramDrafter(text).propose(4)


def test_the_newest_of_equal_agreements_is_copied() -> None:
    assert proposed(NgramDrafter([1, 2, 3, 4, 0, 1, 2, 3, 5, 9, 1, 2, 3]), 1) == (5,)


def test_a_longer_agreement_is_preferred_to_a_newer_one() -> None:
    assert proposed(NgramDrafter([8, 1, 2, 3, 4, 0, 1, 2, 3, 5, 8, 1, 2, 3]), 1) == (4,)


def test_a_text_that_repeats_itself_is_continued_beyond_its_end() -> None:
    assert proposed(NgramDrafter([7, 1, 2, 1, 2, 1, 2]), 4) == (1, 2, 1, 2)


def test_confidence_grows_with_the_agreement_and_is_never_certain() -> None:
    text = [*range(100), *range(100)]
    proposal = NgramDrafter(text).propose(4)
    assert proposal is not None
    assert proposal.confidences == (MAX_MATCH / (MAX_MATCH + 2),) * 4
    short = NgramDrafter([1, 2, 3, 4, 5, 1, 2, 3]).propose(2)
    assert short is not None
    assert short.confidences == pytest.approx((3 / 5, 4 / 6))


def test_copies_are_as_long_as_wanted_and_as_matches_may_be() -> None:
    drafter = NgramDrafter([*range(100), *range(20)])
    assert [len(proposed(drafter, number)) for number in (0, 2, 50)] == [0, 2, MAX_MATCH]


def test_a_passage_is_found_again_in_a_long_text() -> None:
    text = np.random.default_rng(1).integers(0, 250_000, 80_000).tolist()
    drafter = NgramDrafter(text)
    drafter.append(text[40_000:40_010])
    assert proposed(drafter) == tuple(text[40_010:40_014])
