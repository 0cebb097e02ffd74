"""What a sequence's text is known by, against plain lists and counters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.sampling.history import History, needs_history
from headrace.types.request import SamplingParams

PLAIN = SamplingParams(temperature=1, top_p=1, top_k=0, min_p=0, seed=0)


def counts(history: History, drafts: Sequence[int] = ()) -> dict[int, int]:
    """How often each id comes in the output and the drafts after it."""
    ids, numbers = history.output_counts(drafts)
    return dict(zip(ids.tolist(), numbers.tolist(), strict=True))


def test_output_is_counted_and_the_prompt_is_only_known() -> None:
    history = History([3, 1, 3, 7], 10)
    assert (sorted(history.prompt_ids.tolist()), counts(history)) == ([1, 3, 7], {})
    history.append([5, 3])
    history.append([])
    history.append([5])
    assert sorted(history.prompt_ids.tolist()) == [1, 3, 7]
    assert counts(history) == {5: 2, 3: 1}


def test_ids_outside_the_vocabulary_are_text_but_not_counted() -> None:
    history = History([-1, 4, 10], 10)
    history.append([10, 2**40, 9, -2])
    assert (history.prompt_ids.tolist(), counts(history)) == ([4], {9: 1})
    assert history.ends_with([4, 10, 10, 2**40, 9, -2])


@pytest.mark.parametrize("tail", [[], [6], [5, 6], [2, 5, 6], [1, 2, 5, 6]])
def test_the_text_ends_with_its_tails_over_the_border_of_prompt_and_output(tail: list[int]) -> None:
    history = History((1, 2), 10)
    history.append([5, 6])
    assert history.ends_with(tail)


@pytest.mark.parametrize("other", [[5], [2, 6], [1, 5, 6], [6, 5], [0, 1, 2, 5, 6], [6, 1, 2, 5, 6], [5, 6, 6]])
def test_the_text_ends_with_nothing_else(other: list[int]) -> None:
    history = History((1, 2), 10)
    history.append([5, 6])
    assert not history.ends_with(other)


def test_without_output_the_prompt_is_the_tail() -> None:
    history = History([1, 2], 10)
    assert history.ends_with([2]) and history.ends_with([1, 2]) and not history.ends_with([1])


def test_a_long_output_keeps_all_its_counts() -> None:
    history = History([], 5000)
    expected = Counter(token * token % 5000 for token in range(3000))
    assert len(expected) > 300
    for token in range(3000):
        history.append([token * token % 5000])
    assert counts(history) == expected


TOKENS = st.lists(st.integers(-2, 260), max_size=150)


@given(prompt=TOKENS, parts=st.lists(TOKENS, max_size=8))
def test_whatever_is_appended_is_counted(prompt: list[int], parts: list[list[int]]) -> None:
    vocab_size = 256
    history, text = History(prompt, vocab_size), list[int]()
    for part in parts:
        history.append(part)
        text += part
    assert counts(history) == Counter(token for token in text if 0 <= token < vocab_size)
    assert history.ends_with((prompt + text)[-20:])


@pytest.mark.parametrize(
    ("changes", "needs"),
    [
        ({}, False),
        ({"repetition_penalty": 1.1}, True),
        ({"repetition_penalty": 0.9}, True),
        ({"frequency_penalty": -0.1}, True),
        ({"presence_penalty": 0.1}, True),
        ({"banned_sequences": ((1, 2),)}, True),
        ({"banned_token_ids": frozenset({1}), "logit_bias": ((1, 2.0),), "min_tokens": 3}, False),
        ({"allowed_token_ids": frozenset({1}), "temperature": 0.0, "top_k": 3}, False),
    ],
)
def test_only_settings_that_look_back_need_a_history(changes: dict[str, Any], needs: bool) -> None:
    assert needs_history(replace(PLAIN, **changes)) is needs


@given(before=st.lists(st.integers(-1, 6), max_size=8), drafts=st.lists(st.integers(-1, 6), max_size=5))
def test_with_drafts_a_history_is_what_it_would_be_with_these_tokens(before: list[int], drafts: list[int]) -> None:
    history, longer = History([1, 2, 9], 6), History([1, 2, 9], 6)
    history.append(before)
    longer.append(before + drafts)
    assert counts(history, drafts) == counts(longer)
    assert sorted(history.prompt_ids.tolist()) == [1, 2]
    whole = [1, 2, 9, *before, *drafts]
    for length in range(len(whole) + 1):
        tail = whole[len(whole) - length :]
        assert history.ends_with(tail, drafts)
        assert not history.ends_with([*tail[:-1], 7] if tail else [7], drafts)
    assert not history.ends_with([0, *whole], drafts)


def test_drafts_leave_the_history_as_it_is() -> None:
    history = History([1], 10)
    history.append([5])
    history.output_counts([5, 6])
    assert counts(history) == {5: 1}
    assert history.ends_with([1, 5])
