"""Hidden rows survive drafts, checkpoints and restores bit for bit, as far as a prediction head still needs them."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.state.hidden import NUM_AGAIN, HiddenState
from headrace.state.layer import LayerKey
from headrace.state.records import SequenceRecord
from headrace.state.sequence import SequenceState
from headrace.state.slabs import StatePool

KEY: LayerKey = (0,)
LENGTH, WIDTH = 60, 4
ROWS = np.random.default_rng(0).standard_normal((LENGTH, WIDTH)).astype(np.float32)
"""Of the tokens that the sequence is meant to have."""


def window(state: SequenceState, num_kept: int, num_junk: int, marks: tuple[int, ...] = ()) -> None:
    """Compute tokens in a step that holds others' as well, now few and now many, and roll back what is junk."""
    start = state.length
    state.begin(num_kept + num_junk, num_kept, marks)
    before, behind = np.full((start % 3, WIDTH), 77, np.float32), np.full((start % 7 // 6 * 500, WIDTH), 88, np.float32)
    junk = np.full((num_junk, WIDTH), 99, np.float32)
    rows = np.concatenate([before, ROWS[start : start + num_kept], junk, behind])
    lo = len(before)
    state.layer(KEY, HiddenState).write(start, mx.array(rows)[None], marks, lo, lo + num_kept + num_junk)
    state.rollback(num_junk)


def unread(state: SequenceState) -> np.ndarray:
    """The rows that the entries need which the head does not have, up to the newest token's."""
    hidden = state.layer(KEY, HiddenState)
    return np.array(hidden.part(hidden.num_processed - 1, state.length)[0])


windows = st.tuples(st.just("window"), st.integers(1, 6), st.integers(0, 5))
programs = st.lists(
    st.one_of(
        *(windows, windows),
        st.tuples(st.just("read"), st.integers(0, 7)),
        st.tuples(st.just("checkpoint")),
        st.tuples(st.just("restore"), st.integers(0, 9)),
    ),
    min_size=3,
    max_size=20,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(program=programs)
def test_random_programs_leave_the_rows_that_are_needed(program: list[tuple]) -> None:
    pool = StatePool()
    state = SequenceState(pool)
    records: list[tuple[SequenceRecord, int]] = []
    num_read = 1
    window(state, 1, 0)
    restored: int | None = None
    for action, *numbers in program:
        if action == "window" and state.length + numbers[0] <= LENGTH:
            window(state, *numbers)
            restored = None
        elif action == "read":
            num_read = min(num_read + numbers[0], state.length + 1)
            state.layer(KEY, HiddenState).mark_processed(num_read)
        elif action == "checkpoint":
            # before the next window a checkpoint is what was restored, whatever the head has read since
            records.append((state.checkpoint(), num_read if restored is None else restored))
        elif action == "restore" and records:
            record, num_read = records[numbers[0] % len(records)]
            if numbers[0] % 2:
                state = SequenceState(pool)
            state.restore(record)
            # the last row stays even if its entry was read: that entry is no part of the record
            num_read = restored = min(num_read, state.length)
        hidden = state.layer(KEY, HiddenState)
        assert hidden.num_processed == num_read
        assert np.array_equal(unread(state), ROWS[num_read - 1 : state.length])
        assert hidden.end == state.length


@settings(max_examples=60, deadline=None, derandomize=True)
@given(num_tokens=st.integers(2, 30), mark=st.integers(1, 29), num_junk=st.integers(0, 4))
def test_a_snapshot_in_the_middle_of_a_window_carries_the_row_before_it(
    num_tokens: int, mark: int, num_junk: int
) -> None:
    mark = min(mark, num_tokens - 1)
    state = SequenceState(StatePool())
    window(state, num_tokens, num_junk, (mark,))
    record = state.take_snapshots()[mark]
    state.restore_parts(mark, (), record)
    assert np.array_equal(unread(state), ROWS[mark - 1 : mark])


def test_no_more_rows_are_held_than_are_needed() -> None:
    state = SequenceState(StatePool())
    window(state, 40, 0)
    hidden = state.layer(KEY, HiddenState)
    hidden.mark_processed(41)
    assert [array.shape for array in hidden.arrays()] == [(1, 1 + NUM_AGAIN, WIDTH)]
    assert state.checkpoint().num_bytes == WIDTH * 4


def test_a_step_keeps_no_more_alive_than_a_few_rows_for_each_of_the_sequences_own() -> None:
    """Long prompts of others, and an own one that was read, are not held for the sake of a single row."""
    state = SequenceState(StatePool())
    hidden = state.layer(KEY, HiddenState)
    for start in range(20):
        state.begin(1)
        hidden.write(start, mx.zeros((1, 2048, WIDTH)), (), 5, 6)
        state.commit(1)
        assert sum(array.shape[1] for array in hidden.arrays()) == start + 1


def test_a_record_stays_while_its_sequence_goes_on() -> None:
    state = SequenceState(StatePool())
    window(state, 5, 2)
    record = state.checkpoint()
    (kept,) = record.layers[KEY].arrays
    before = np.array(kept)
    for _ in range(5):
        window(state, 3, 1)
        state.layer(KEY, HiddenState).mark_processed(state.length)
    assert np.array_equal(np.array(kept), before)
