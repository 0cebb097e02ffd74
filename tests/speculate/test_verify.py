"""Windows of drafts: what each place is drawn after, and what is gained."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.sampling.draw import NO_TOKEN
from headrace.sampling.history import History
from headrace.sampling.rows import SamplingRow
from headrace.speculate.verify import gained_tokens, window_rows
from headrace.types.request import SamplingParams

PARAMS = SamplingParams(temperature=1, top_p=1, top_k=0, min_p=0, seed=0, presence_penalty=1)


@pytest.mark.parametrize(
    ("drafts", "drawn", "gained"),
    [
        ((), [4], (4,)),
        ((4,), [4, 5], (4, 5)),
        ((4,), [6, 5], (6,)),
        ((4, 5, 6), [4, 5, 6, 7], (4, 5, 6, 7)),
        ((4, 5, 6), [4, 9, 6, 7], (4, 9)),
        ((4, 5, 6), [9, 5, 6, 7], (9,)),
        ((4, 5, 6), [4, NO_TOKEN, 6, 7], (4, NO_TOKEN)),
    ],
)
def test_right_drafts_and_the_token_behind_them_are_gained(
    drafts: tuple[int, ...], drawn: list[int], gained: tuple[int, ...]
) -> None:
    assert gained_tokens(drafts, drawn) == gained


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), max_size=5), st.integers(0, 1))
def test_what_is_gained_is_what_was_drawn_up_to_the_first_difference(pairs: list[tuple[int, int]], last: int) -> None:
    drafts, drawn = [draft for draft, _ in pairs], [*(token for _, token in pairs), last]
    gained = gained_tokens(drafts, drawn)
    assert list(gained) == drawn[: len(gained)]
    assert list(gained[:-1]) == drafts[: len(gained) - 1]
    assert len(gained) == len(drafts) + 1 or gained[-1] != drafts[len(gained) - 1]


def test_drafts_without_a_token_for_each_are_refused() -> None:
    with pytest.raises(ValueError, match="2 drawn tokens do not fit 2 drafts"):
        gained_tokens((4, 5), [4, 5])


def test_each_place_of_a_window_is_drawn_after_the_drafts_before_it() -> None:
    history = History([1, 2], 10)
    history.append([3])
    row = SamplingRow(PARAMS, 1, history, frozenset({9}))
    rows = window_rows(row, (4, 3))
    assert [each.output_index for each in rows] == [1, 2, 3]
    assert all(each.params is PARAMS and each.stop_token_ids == {9} for each in rows)
    assert all(each.history is history for each in rows)
    counts = [history.output_counts(each.drafts) for each in rows]
    assert [dict(zip(ids.tolist(), numbers.tolist(), strict=True)) for ids, numbers in counts] == [
        {3: 1},
        {3: 1, 4: 1},
        {3: 2, 4: 1},
    ]
    assert [history.ends_with([2, 3, 4, 3], each.drafts) for each in rows] == [False, False, True]


def test_a_window_without_drafts_is_the_row_itself() -> None:
    row = SamplingRow(PARAMS, 7, History([1], 10))
    assert window_rows(row, ()) == [row]


def test_rows_that_need_no_history_get_none() -> None:
    row = SamplingRow(PARAMS, 0)
    assert [each.history for each in window_rows(row, (1, 2))] == [None, None, None]
