"""Rolling back equals never having drafted, restoring equals never having left: bit for bit, for every kind of state.

Random programs of windows, commits, rollbacks, checkpoints and restores run on the tiny models and are compared with
the same tokens fed one at a time.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import tiny

from headrace.backend import blas
from headrace.backend.kernels import Kernels
from headrace.models.levels import Level, choose_levels
from headrace.models.packed import PackedModel
from headrace.models.step import Row
from headrace.state.records import SequenceRecord
from headrace.state.recurrent import BatchedState, RecurrentRecord
from headrace.state.sequence import SequenceState
from headrace.state.slabs import StatePool

KINDS = {
    "full attention": "llama",
    "sliding attention": "gpt_oss",
    "gated delta net": "qwen3_5",
    "shared keys": "gemma4_text",
    "module, recurrent": "lfm2",
    "module, trimmed": "deepseek_v3",
    "module and attention in one layer": "falcon_h1",
    "whole model": "llama4",
}
VOCAB = 97
LENGTH = 60
SENTENCE = [(7 * i * i + 3 * i + 1) % VOCAB for i in range(400)]
"""The tokens that a sequence is meant to have, whatever is drafted meanwhile."""


@pytest.fixture(autouse=True)
def stock_blas() -> None:
    blas.install("exact")


@cache
def packed(kind: str) -> PackedModel:
    model = tiny.build(KINDS[kind])
    levels = choose_levels(model)
    if kind == "whole model":
        levels = dict.fromkeys(levels, Level.WHOLE)
    return PackedModel(model, levels, Kernels("exact", "cpu"))


@cache
def expected(kind: str) -> list[mx.array]:
    """Logits of the first LENGTH tokens of SENTENCE, fed one at a time."""
    state = SequenceState(StatePool())
    rows = []
    for token in SENTENCE[:LENGTH]:
        state.begin(1)
        rows.append(packed(kind).forward([Row(state, [token])], [0])[0])
        mx.eval(rows[-1], state.arrays())
        state.commit(1)
    return rows


@dataclass
class Sequence:
    """A live sequence and the records that were taken of it."""

    model: PackedModel
    pool: StatePool = field(default_factory=StatePool)
    records: list[SequenceRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.state = SequenceState(self.pool)

    def window(self, num_kept: int, num_junk: int, num_certain: int) -> Iterator[tuple[int, mx.array]]:
        """Run `num_kept` tokens of SENTENCE and `num_junk` others, roll these back. Gives (position, logits)."""
        start = self.state.length
        junk = [(SENTENCE[start + num_kept + i] + 1 + i) % VOCAB for i in range(num_junk)]
        self.state.begin(num_kept + num_junk, min(num_certain, num_kept))
        ids = [*SENTENCE[start : start + num_kept], *junk]
        logits = self.model.forward([Row(self.state, ids)], range(num_kept))
        mx.eval(logits, self.state.arrays())
        self.state.rollback(num_junk)
        for offset in range(num_kept):
            yield start + offset, logits[offset]


windows = st.tuples(st.just("window"), st.integers(1, 6), st.integers(0, 5), st.integers(1, 6))
programs = st.lists(
    st.one_of(
        windows,
        windows,
        st.tuples(st.just("checkpoint")),
        st.tuples(st.just("restore"), st.integers(0, 9)),
        st.tuples(st.just("preempt")),
        st.tuples(st.just("abort")),
    ),
    min_size=3,
    max_size=14,
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(program=programs)
def test_random_programs_equal_token_by_token(kind: str, program: list[tuple]) -> None:
    sequence = Sequence(packed(kind))
    for action, *numbers in program:
        if action == "checkpoint":
            sequence.records.append(sequence.state.checkpoint())
        elif action == "restore" and sequence.records:
            # a fresh sequence may take over a record as well as the one that it was taken from
            record = sequence.records[numbers[0] % len(sequence.records)]
            if numbers[0] % 2:
                sequence.state = SequenceState(sequence.pool)
            sequence.state.restore(record)
            assert sequence.state.length == record.length
        elif action == "preempt":
            record = sequence.state.checkpoint()
            sequence.state.release()
            sequence.state = SequenceState(sequence.pool, record.length + 1)
            sequence.state.restore(record)
        elif action == "abort":
            # what another sequence has computed since is no part of a new one in the same place
            sequence.state.release()
            sequence.state = SequenceState(sequence.pool)
        elif action == "window" and sequence.state.length + numbers[0] <= LENGTH:
            for position, logits in sequence.window(*numbers):
                assert mx.array_equal(logits, expected(kind)[position]), position


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    chunks=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    marks=st.sets(st.integers(1, 59), min_size=1, max_size=4),
    cut=st.integers(1, 59),
)
def test_a_state_put_together_from_parts_goes_on_as_if_never_left(
    kind: str, chunks: list[int], marks: set[int], cut: int
) -> None:
    """Spans of keys, cut anywhere, and a snapshot taken in the middle of a chunk."""
    sequence = Sequence(packed(kind))
    snapshots: dict[int, SequenceRecord] = {}
    for num_tokens in chunks:
        start = sequence.state.length
        end = min(LENGTH - 1, start + num_tokens)
        if start == end:
            break
        inside = tuple(sorted(mark for mark in marks if start < mark < end))
        sequence.state.begin(end - start, snapshot_points=inside)
        logits = sequence.model.forward([Row(sequence.state, SENTENCE[start:end])], [end - start - 1])
        mx.eval(logits, sequence.state.arrays())
        snapshots.update(sequence.state.take_snapshots())
        sequence.state.commit(end - start)
        assert mx.array_equal(logits[0], expected(kind)[end - 1])
    snapshots[sequence.state.length] = sequence.state.snapshot()
    for length, snapshot in snapshots.items():
        whole = sequence.state.copy_span(0, length)
        spans = (whole.part(0, cut), whole.part(cut, length)) if cut < length else (whole,)
        other = Sequence(packed(kind))
        other.state.restore_parts(length, spans, snapshot)
        for position, logits in other.window(1, 0, 1):
            assert mx.array_equal(logits, expected(kind)[position]), (length, position)


@pytest.mark.parametrize("kind", KINDS)
def test_a_record_stays_bit_equal_while_its_sequence_goes_on(kind: str) -> None:
    sequence = Sequence(packed(kind))
    list(sequence.window(6, 2, 1))
    list(sequence.window(3, 3, 1))
    record = sequence.state.checkpoint()
    before = [mx.array(array) for layer in record.layers.values() for array in layer.arrays]
    mx.eval(before)
    for _ in range(8):
        list(sequence.window(2, 2, 1))
    after = [array for layer in record.layers.values() for array in layer.arrays]
    assert record.num_bytes == sum(array.nbytes for array in after) > 0
    assert all(mx.array_equal(one, other) for one, other in zip(before, after, strict=True))


def test_a_draft_stash_is_a_small_part_of_a_state() -> None:
    sequence = Sequence(packed("gated delta net"))
    list(sequence.window(4, 0, 4))
    plain = sum(array.nbytes for array in sequence.state.arrays())
    sequence.state.begin(3, 1)
    logits = sequence.model.forward([Row(sequence.state, [1, 2, 3])], [0])
    mx.eval(logits, sequence.state.arrays())
    assert sum(array.nbytes for array in sequence.state.arrays()) < 1.25 * plain


def test_raw_inputs_of_several_lengths_are_restored_from_their_ends() -> None:
    """As files may hold them, each with as many as a step needs or more."""
    numbers = mx.arange(2 * 7 * 4, dtype=mx.float32).reshape(2, 1, 7, 4)
    state = BatchedState(Kernels("exact", "cpu"))
    state.restore(
        {
            (0,): RecurrentRecord(mx.ones((1, 2, 4, 4)), numbers[0]),
            (1,): RecurrentRecord(mx.zeros((1, 2, 4, 4)), numbers[1, :, :3]),
        }
    )
    first, second = state.checkpoint().values()
    assert mx.array_equal(first.context, numbers[0, :, 4:]) and mx.array_equal(first.state, mx.ones((1, 2, 4, 4)))
    assert mx.array_equal(second.context, numbers[1, :, :3])


def test_nothing_is_copied_of_a_state_whose_layers_are_not_filled() -> None:
    sequence = Sequence(packed("full attention"))
    list(sequence.window(6, 0, 1))
    record = sequence.state.checkpoint()
    sequence.state.restore(record)
    assert sequence.state.checkpoint() is record
    for use in (sequence.state.snapshot, lambda: sequence.state.copy_span(0, 6), sequence.state.is_finite):
        with pytest.raises(RuntimeError, match="since its restore"):
            use()


def test_a_slot_is_freed_once_however_often_its_state_is_released() -> None:
    pool = StatePool()
    state = SequenceState(pool, 1)
    state.release()
    with pytest.raises(AttributeError):
        state.begin(1)
    taken = pool.allocate(1)
    state.release()  # as of a preempted sequence whose checkpoint has failed
    other = pool.allocate(1)
    assert (id(taken.slab), taken.start) != (id(other.slab), other.start)
