"""The entries that a head processes before it drafts."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import pytest

from headrace.models.mtp_head import HeadOutputs
from headrace.models.step import Row
from headrace.sampling.rows import SamplingRow
from headrace.speculate.drafter import DraftRow
from headrace.speculate.head import HeadDrafter
from headrace.state.hidden import HiddenState
from headrace.state.sequence import SequenceState
from headrace.state.slabs import StatePool
from headrace.types.request import SamplingParams

GREEDY = SamplingRow(SamplingParams(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=0), 0)
HIDDEN = (7,)


class NotingHead:
    """Notes from which token on how many each sequence is given. It drafts the row that it last processed, plus one."""

    def __init__(self, is_compiled: bool) -> None:
        self.is_compiled = is_compiled
        self.given: list[list[tuple[int, int]]] = []

    def hidden_of(self, state: SequenceState) -> HiddenState:
        return state.layer(HIDDEN, HiddenState)

    def forward(
        self, entries: Sequence[Row], hidden: mx.array, ids: mx.array | None = None, *, launch: bool = True
    ) -> HeadOutputs:
        self.given.append([(one.start, len(one.token_ids)) for one in entries])
        if ids is None:
            # row n of the trunk is n, and what stands for token n is n + 1000
            assert hidden[0, :, 0].tolist() == [at - 1 for one in entries for at in _places(one)]
            assert [token for one in entries for token in one.token_ids] == [
                at + 1000 for one in entries for at in _places(one)
            ]
        ends = [sum(len(one.token_ids) for one in entries[: number + 1]) - 1 for number in range(len(entries))]
        rows = hidden[0, mx.array(ends)] + 1
        return HeadOutputs(rows, (mx.arange(64) == rows[:, :1]).astype(mx.float32))


def _places(one: Row) -> range:
    return range(one.start, one.start + len(one.token_ids))


def compute(state: SequenceState, windows: Sequence[int]) -> None:
    """Steps of so many tokens."""
    for num_tokens in windows:
        state.begin(num_tokens)
        rows = mx.arange(state.length, state.length + num_tokens)[None, :, None]
        state.layer(HIDDEN, HiddenState).write(state.length, mx.repeat(rows, 4, axis=2), ())
        state.commit(num_tokens)


def row(state: SequenceState, num_drafts: int) -> DraftRow:
    return DraftRow(state, [1000 + at for at in range(state.length + 1)], num_drafts, GREEDY)


@pytest.mark.parametrize(
    ("is_compiled", "second", "third"),
    [(False, [(21, 3), (31, 2)], [(24, 1), (33, 1)]), (True, [(20, 4), (29, 4)], [(24, 1), (33, 1)])],
)
def test_a_compiled_head_reads_equal_numbers_of_tokens_for_all_sequences(
    is_compiled: bool, second: list[tuple[int, int]], third: list[tuple[int, int]]
) -> None:
    """A power of two for each, so that its forms are few: 3 and 2 unread tokens are 4 and 4 of which some were read."""
    head = NotingHead(is_compiled)
    drafter = HeadDrafter(head)
    states = [SequenceState(StatePool()) for _ in range(2)]
    compute(states[0], [18, 2])
    compute(states[1], [30])
    first = drafter.draft([row(state, 1) for state in states])
    assert head.given == [[(1, 20), (1, 30)]]
    assert [first.read(number, 1) for number in range(2)] == [(20,), (30,)]
    compute(states[0], [1, 2])
    compute(states[1], [2])
    del head.given[:]
    drafts = drafter.draft([row(states[0], 3), row(states[1], 2)])
    assert head.given == [second, third, [(25, 1)]]
    assert [drafts.read(0, 3), drafts.read(1, 2)] == [(23, 24, 25), (32, 33)]
