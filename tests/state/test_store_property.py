"""Whatever is done to the states of several sequences, each goes on as a plain list of its tokens says.

Random programs of steps over several sequences of one pool, each with certain and uncertain tokens and marks, of
rollbacks, records of every sort, restores, preemption and releases, run on one layer of each kind of state. The
reference is NumPy over lists, see toy_layers.py; nothing of ours is in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from state import toy_layers
from state.toy_layers import VOCAB, Array

from headrace.backend import blas
from headrace.backend.kernels import Kernels
from headrace.models.levels import choose_levels
from headrace.models.packed import PackedModel
from headrace.models.step import Row
from headrace.state.hidden import HiddenState
from headrace.state.records import SequenceRecord, SpanRecord
from headrace.state.sequence import SequenceState
from headrace.state.slabs import StatePool

KINDS = {kind: (kind,) for kind in toy_layers.MIXERS}
KINDS["all in one"] = tuple(KINDS)
MOST_LIVE = 4
LONGEST = 400
CLOSE = 2e-4
"""Float32 against float64; outputs are about 1, and those of other tokens differ by that much."""


@pytest.fixture(autouse=True)
def stock_blas() -> None:
    blas.install("exact")


@cache
def model_of(kinds: tuple[str, ...], numerics: str) -> tuple[PackedModel, Any]:
    model, outputs = toy_layers.build(kinds)
    packed = PackedModel(model, choose_levels(model), Kernels(numerics, "cpu"))
    packed.keep_hidden(True)
    return packed, outputs


@dataclass
class Live:
    """A sequence and what it should be: its tokens, and how many of them a prediction head has read, and one."""

    state: SequenceState
    tokens: list[int] = field(default_factory=list)
    num_read: int = 1


@dataclass(frozen=True)
class Kept:
    """A record of a sequence at `tokens`. spans: with what snapshot it is, None where the record is whole."""

    record: SequenceRecord
    tokens: tuple[int, ...]
    num_read: int
    spans: tuple[SpanRecord, ...] | None = None


@dataclass(frozen=True)
class Window:
    """What a step does with a sequence: `kept` tokens, of which some are certain, then others that are rolled back."""

    live: Live
    kept: list[int]
    junk: list[int]
    num_certain: int
    marks: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.kept) + len(self.junk)


class Sequences(RuleBasedStateMachine):
    """All sequences of one pool, and the records that were taken of them."""

    def __init__(self, kind: str, numerics: str) -> None:
        super().__init__()
        self.packed, self.outputs = model_of(KINDS[kind], numerics)
        self.pool = StatePool()
        self.lives: list[Live] = []
        self.kept: list[Kept] = []
        self.num_drawn = 0

    def token(self) -> int:
        """Never twice the same for long, so that any two places differ."""
        self.num_drawn += 1
        return (37 * self.num_drawn + self.num_drawn // VOCAB) % VOCAB

    def live(self, number: int) -> Live:
        return self.lives[number % len(self.lives)]

    @precondition(lambda self: len(self.lives) < MOST_LIVE)
    @rule(num_expected=st.sampled_from((0, 1, 300)))
    def start(self, num_expected: int) -> None:
        self.lives.append(Live(SequenceState(self.pool, num_expected)))

    @precondition(lambda self: self.lives)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """Some of the sequences, in some order."""
        order = data.draw(st.permutations(range(len(self.lives))))
        num_rows = data.draw(st.sampled_from((len(order), len(order), 1, 2)))
        self.compute([self.window(self.lives[number], data) for number in order[:num_rows]])

    @precondition(lambda self: self.lives)
    @rule(count=st.integers(1, 3), turn=st.integers(0, MOST_LIVE - 1), num_junk=st.sampled_from((0, 0, 2)))
    def decode_together(self, count: int, turn: int, num_junk: int) -> None:
        """All sequences alike, as they do most of the time, one of them first."""
        for _ in range(count):
            lives = [*self.lives[turn:], *self.lives[:turn]]
            self.compute(
                [Window(live, [self.token()], [self.token() for _ in range(num_junk)], 1, ()) for live in lives]
            )

    def window(self, live: Live, data: st.DataObject) -> Window:
        # a long one leaves a slot of the smallest size
        sizes = (1, 1, 2, 4, 9, 130, 250) if len(live.tokens) < LONGEST else (1,)
        num_kept, num_junk = data.draw(st.sampled_from(sizes)), data.draw(st.sampled_from((0, 0, 1, 2, 5)))
        num_certain = data.draw(st.integers(1, num_kept))
        start = len(live.tokens)
        most = 3 if num_certain > 1 else 0
        marks = data.draw(st.sets(st.integers(start + 1, start + max(1, num_certain - 1)), max_size=most))
        kept = [self.token() for _ in range(num_kept)]
        return Window(live, kept, [self.token() for _ in range(num_junk)], num_certain, tuple(sorted(marks)))

    def compute(self, windows: list[Window]) -> None:
        """One step, as the runner makes it: open, compute, take snapshots, close."""
        for one in windows:
            one.live.state.begin(one.num_tokens, one.num_certain, one.marks)
        rows = [Row(one.live.state, [*one.kept, *one.junk]) for one in windows]
        logits = self.packed.forward(rows, range(sum(one.num_tokens for one in windows)))
        mx.eval(logits, [one.live.state.arrays() for one in windows])
        found, lo = np.array(logits), 0
        for one in windows:
            start = len(one.live.tokens)
            expected = self.outputs([*one.live.tokens, *one.kept, *one.junk])[start:]
            np.testing.assert_allclose(found[lo : lo + one.num_tokens], expected, atol=CLOSE)
            lo += one.num_tokens
            self.close(one)

    def close(self, window: Window) -> None:
        live, state = window.live, window.live.state
        early = state.take_snapshots() if self.num_drawn % 2 else {}
        if window.junk and self.num_drawn % 3:
            state.rollback(len(window.junk))
        else:
            state.commit(len(window.kept))
        snapshots = early or state.take_snapshots()
        live.tokens += window.kept
        assert tuple(snapshots) == window.marks
        for length, snapshot in snapshots.items():
            # the head has its entries before a snapshot is used
            self.read(live, length)
            self.keep(live, length, snapshot)

    def keep(self, live: Live, length: int, snapshot: SequenceRecord) -> None:
        assert snapshot.length == length
        spans = (live.state.copy_span(0, length),)
        if length > 1:
            middle = 1 + self.num_drawn % (length - 1)
            if self.num_drawn % 2:
                spans = (spans[0].part(0, middle), spans[0].part(middle, length))
            else:
                spans = (live.state.copy_span(0, middle), live.state.copy_span(middle, length))
        self.kept.append(Kept(snapshot, tuple(live.tokens[:length]), length, spans))

    @precondition(lambda self: self.lives)
    @rule(number=st.integers(0, 9), num_entries=st.sampled_from((1, 4, LONGEST)))
    def head_reads(self, number: int, num_entries: int) -> None:
        live = self.live(number)
        if live.tokens and not live.state.is_untouched:
            self.read(live, min(live.num_read + num_entries, len(live.tokens) + 1))

    def read(self, live: Live, num_read: int) -> None:
        """Make the entries before `num_read`, each of them the hidden row before it."""
        if num_read <= live.num_read:
            return
        state, hidden = live.state, live.state.layer(self.packed.hidden_key, HiddenState)
        state.reserve(num_read - state.length)
        entries = hidden.part(live.num_read - 1, num_read - 1)[:, None]
        head = state.full_attention(self.packed.head_key, first=1)
        head.write(live.num_read, entries, -entries)
        hidden.mark_processed(num_read)
        mx.eval(head.arrays(), hidden.arrays())
        live.num_read = num_read

    @precondition(lambda self: self.lives)
    @rule(number=st.integers(0, 9))
    def checkpoint(self, number: int) -> None:
        live = self.live(number)
        self.kept.append(self.whole(live))

    def whole(self, live: Live) -> Kept:
        # an entry for the token behind the last is no part of a record
        num_read = max(1, min(live.num_read, len(live.tokens)))
        return Kept(live.state.checkpoint(), tuple(live.tokens), num_read)

    @precondition(lambda self: self.lives)
    @rule(number=st.integers(0, 9))
    def snapshot(self, number: int) -> None:
        live = self.live(number)
        if live.tokens and not live.state.is_untouched:
            self.read(live, len(live.tokens))
            self.keep(live, len(live.tokens), live.state.snapshot())

    @precondition(lambda self: self.lives and self.kept)
    @rule(number=st.integers(0, 9), record=st.integers(0, 99), in_place=st.booleans())
    def restore(self, number: int, record: int, in_place: bool) -> None:
        """In the state that is there, or in a fresh one in its stead."""
        live = self.live(number)
        if not in_place:
            live.state.release()
            live.state = SequenceState(self.pool)
        self.become(live, self.kept[record % len(self.kept)])

    def become(self, live: Live, kept: Kept) -> None:
        if kept.spans is None:
            live.state.restore(kept.record)
        else:
            live.state.restore_parts(len(kept.tokens), kept.spans, kept.record)
        live.tokens, live.num_read = list(kept.tokens), kept.num_read

    @precondition(lambda self: self.lives)
    @rule(number=st.integers(0, 9))
    def preempt(self, number: int) -> None:
        live = self.live(number)
        kept = self.whole(live)
        live.state.release()
        live.state = SequenceState(self.pool, len(kept.tokens) + 1)
        self.become(live, kept)

    @precondition(lambda self: self.lives)
    @rule(number=st.integers(0, 9), num_open=st.integers(0, 3))
    def release(self, number: int, num_open: int) -> None:
        """Also in the middle of a window, as after a failure."""
        live = self.live(number)
        if num_open:
            live.state.begin(num_open)
        live.state.release()
        self.lives.remove(live)

    @invariant()
    def lengths_are_those_of_the_lists(self) -> None:
        for live in self.lives:
            assert (live.state.length, live.state.num_open) == (len(live.tokens), 0)

    @invariant()
    def unread_rows_are_there(self) -> None:
        for live in self.lives:
            if live.tokens and not live.state.is_untouched:
                hidden = live.state.layer(self.packed.hidden_key, HiddenState)
                assert hidden.num_processed == live.num_read
                found = np.array(hidden.part(live.num_read - 1, len(live.tokens))[0])
                assert_close(found, self.outputs(live.tokens)[live.num_read - 1 :])

    @invariant()
    def read_rows_are_in_the_heads_entries(self) -> None:
        for live in self.lives:
            if live.num_read > 1 and not live.state.is_untouched:
                keys, values = live.state.full_attention(self.packed.head_key, first=1).read(0, live.num_read)
                expected = self.outputs(live.tokens)[: live.num_read - 1]
                assert_close(np.array(keys[0, 0]), expected)
                assert_close(np.array(values[0, 0]), -expected)

    def teardown(self) -> None:
        for live in self.lives:
            live.state.release()
        assert self.pool.num_bytes == 0
        # whatever became of the sequences since, records are what they were
        self.lives = [Live(SequenceState(self.pool))]
        for kept in self.kept[-8:]:
            self.become(self.lives[0], kept)
            self.decode_together(1, 0, 0)
            self.unread_rows_are_there()
            self.read_rows_are_in_the_heads_entries()
        self.lives[0].state.release()


def assert_close(found: Array, expected: Array) -> None:
    np.testing.assert_allclose(found, expected, atol=CLOSE)


@pytest.mark.parametrize("numerics", ["fast", "exact"])
@pytest.mark.parametrize("kind", KINDS)
def test_sequences_of_one_pool_go_on_as_lists_of_their_tokens_say(kind: str, numerics: str) -> None:
    run_state_machine_as_test(
        lambda: Sequences(kind, numerics),
        settings=settings(max_examples=12, stateful_step_count=30, deadline=None, derandomize=True),
    )


def test_an_entry_for_the_next_token_moves_along_to_a_larger_slot() -> None:
    sequences = Sequences("full attention", "fast")
    live = Live(SequenceState(sequences.pool))
    sequences.lives = [live]
    for num_tokens in (250, 20):
        sequences.compute([Window(live, [sequences.token() for _ in range(num_tokens)], [], num_tokens, ())])
        sequences.read(live, len(live.tokens) + 1 if num_tokens == 250 else 0)
    sequences.read_rows_are_in_the_heads_entries()
    sequences.unread_rows_are_there()
    sequences.teardown()


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_is_the_untouched_model(kind: str) -> None:
    model, outputs = toy_layers.build(KINDS[kind])
    tokens = [(11 * i * i + 5) % VOCAB for i in range(20)]
    cache = model.make_cache()
    alone = np.stack([np.array(model(mx.array([[token]]), cache=cache)[0, 0]) for token in tokens])
    assert_close(alone, outputs(tokens))
