"""What is kept of a prompt: whole chunks, the most important first, what is protected besides, never more than that."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.sparse import select as module
from headrace.engine.sparse.select import NEIGHBOURS


def select(*arguments: Any, neighbours: float = 0.0, **options: Any) -> tuple[int, ...]:
    """By each chunk's own importance, unless a test says otherwise."""
    return module.select(*arguments, neighbours=neighbours, **options)


def by_chunk(*means: float, chunk: int = 4) -> np.ndarray:
    """Importance of chunks whose tokens are all alike."""
    return np.repeat(np.array(means, dtype=np.float32), chunk)


def chunks(kept: tuple[int, ...], chunk: int = 4) -> list[int]:
    """The chunks that are kept whole."""
    return [at // chunk for at in kept[::chunk] if set(range(at - at % chunk, at - at % chunk + chunk)) <= set(kept)]


def test_the_most_important_chunks_are_kept_whole() -> None:
    kept = select(by_chunk(1, 5, 2, 9, 3, 8, 0, 4), 0, 0.5, chunk=4)
    # the last token is kept besides: of the 31 others half is 15, three chunks and the three left of the last one
    assert kept == (*range(4, 8), *range(12, 16), *range(20, 24), *range(28, 32))


def test_of_equal_chunks_the_earlier_ones_are_kept() -> None:
    assert select(by_chunk(1, 1, 1, 1, 1, 1), 0, 0.4, chunk=4) == (*range(8), 23)


def test_a_share_of_one_keeps_everything() -> None:
    assert select(np.zeros(77, np.float32), 10, 1.0) == tuple(range(10, 87))


def test_the_grid_stands_at_multiples_of_the_chunk_wherever_the_selection_starts() -> None:
    importance = np.zeros(30, np.float32)
    importance[9] = 1.0  # position 15 is in the chunk 12 to 16
    assert select(importance, 6, 0.2, chunk=4) == (*range(12, 16), 35)


def test_protected_tokens_are_kept_over_and_above_the_share() -> None:
    importance = by_chunk(0, 1, 2, 3, 4, 5)
    kept = select(importance, 0, 0.4, [range(2, 6), range(-7, 1), range(22, 99)], chunk=4)
    # 7 of 24 tokens are protected, and 0.4 of the other 17 are six: two of chunk 5, and then all of chunk 4
    assert kept == (0, 2, 3, 4, 5, *range(16, 24))


def test_a_chunk_counts_by_what_keeping_it_adds() -> None:
    importance = by_chunk(0, 0, 3, 0)
    importance[4:7] = 100.0  # protected: their chunk has one token more, of no importance
    assert select(importance, 0, 0.4, [range(4, 7)], chunk=4) == (4, 5, 6, *range(8, 12), 15)


def test_neighbours_of_an_important_chunk_come_before_what_matters_less_than_half_of_it() -> None:
    importance = by_chunk(0, 3, 0, 9, 1, 5, 0, 4)
    # of 31 free tokens 0.66 are 20: chunk 3, chunk 5, then 2 and 4 (half of 9), then 7, of which three are free
    assert chunks(select(importance, 0, 0.66, chunk=4, neighbours=0.5)) == [2, 3, 4, 5, 7]
    assert chunks(select(importance, 0, 0.66, chunk=4)) == [1, 3, 4, 5, 7]


def test_what_is_said_across_a_border_is_kept_by_default() -> None:
    importance = np.full(32 * 12, 0.1, np.float32)
    importance[32 * 5 : 32 * 5 + 8] = 10.0
    importance[32 * 9 : 32 * 10] = 1.0
    assert 0.0 < NEIGHBOURS < 1.0
    kept = set(module.select(importance, 0, 0.3))
    assert set(range(32 * 4, 32 * 7)) <= kept


def test_a_neighbour_that_is_protected_makes_nothing_important() -> None:
    importance = by_chunk(0, 0, 9, 0, 1, 0)
    kept = select(importance, 0, 0.25, [range(8, 12)], chunk=4, neighbours=0.5)
    assert kept == (*range(8, 12), *range(16, 20), 23)


def test_a_chunk_that_does_not_fit_is_passed_over_for_a_smaller_one() -> None:
    kept = select(by_chunk(9, 0, 0, 1), 0, 0.25, [range(4, 12), range(13, 15)], chunk=4)
    # a quarter of the five free tokens is one: not the four of chunk 0, but the one left in chunk 3
    assert kept == tuple(range(4, 16))


@pytest.mark.parametrize("share", [0.0, -1.0, 1.01, float("nan")])
def test_a_share_has_to_be_one(share: float) -> None:
    with pytest.raises(ValueError, match="share"):
        select(np.zeros(5, np.float32), 0, share)


@pytest.mark.parametrize("importance", [[], [1.0, float("nan")], [float("inf"), 0.0]])
def test_importance_has_to_be_finite_numbers(importance: list[float]) -> None:
    with pytest.raises(ValueError, match="finite importance"):
        select(np.array(importance, np.float32), 0, 0.5)


@given(
    importance=st.lists(st.sampled_from([0.0, 0.25, 1.0, 3.0]), min_size=1, max_size=200),
    start=st.integers(0, 100),
    share=st.floats(0.01, 1.0),
    spans=st.lists(st.tuples(st.integers(0, 320), st.integers(0, 40)), max_size=4),
    chunk=st.sampled_from([1, 4, 32]),
    neighbours=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_never_more_than_the_share_and_what_is_protected(
    importance: list[float],
    start: int,
    share: float,
    spans: list[tuple[int, int]],
    chunk: int,
    neighbours: float,
) -> None:
    end = start + len(importance)
    protected = [range(lo, lo + length) for lo, length in spans]
    values = np.array(importance, np.float32)
    kept = module.select(values, start, share, protected, chunk, neighbours)
    must = {at for span in protected for at in span if start <= at < end} | {end - 1}
    assert list(kept) == sorted(set(kept))
    assert start <= kept[0] and kept[-1] == end - 1
    assert must <= set(kept)
    assert len(kept) <= len(must) + share * len(importance) + 1e-6
    # what is kept beyond that is chunks without gaps
    places = {at // chunk for at in set(kept) - must}
    whole = {at for place in places for at in range(place * chunk, (place + 1) * chunk) if start <= at < end}
    assert whole <= set(kept)
    assert module.select(values.copy(), start, share, list(reversed(protected)), chunk, neighbours) == kept
