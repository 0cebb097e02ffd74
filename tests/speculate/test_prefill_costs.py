"""On a simulated machine, a draft model that must process each text first costs little, and pays where it can."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import pytest

from headrace.sampling.rows import GREEDY_ROW
from headrace.speculate.depth import DepthPlanner
from headrace.speculate.drafter import DraftRow
from headrace.speculate.drafts import DraftBatch
from headrace.speculate.ranking import Ranking
from headrace.speculate.speculator import DraftState, Speculator, VerifiedWindow
from headrace.state.sequence import SequenceState
from headrace.state.slabs import StatePool

LATEST, CHUNK, FREE = 512, 256, 8
"""Tokens that a draft model begins with, that a step waits for at once, and that a pass includes."""


@dataclass(frozen=True)
class Costs:
    """Seconds of a step, of each of its rows and drafts; of a pass of the draft model and of a token that it processes;
    of an attempt for a row, and of a prompt in a step."""

    step: float = 6.5e-3
    row: float = 0.1e-3
    draft: float = 0.1e-3
    a_pass: float = 0.7e-3
    token: float = 0.02e-3
    attempt: float = 0.2e-3
    prompt: float = 15e-3


LARGE, SMALL = Costs(), Costs(row=0.5e-3, draft=0.9e-3, a_pass=2.3e-3, token=0.17e-3, attempt=0.4e-3)
"""A served model far larger than its draft model, and one about as fast, as the bundled ones on a CPU."""


class Machine:
    """Counts the time that its work takes, and drafts like a model. wrong: times as long as it expects of a prefill."""

    num_new_variants = 0

    def __init__(self, costs: Costs, wrong: float) -> None:
        self.costs, self.now, self.dice = costs, 0.0, random.Random(1)
        self._expected_s = costs.token / wrong
        self._ends: dict[SequenceState, int] = {}

    def _start(self, state: SequenceState, num_known: int) -> int:
        return max(self._ends.get(state, 0), num_known - LATEST, 0)

    def num_pending(self, state: SequenceState) -> int:
        return 0

    def prefill_s(self, state: SequenceState, num_known: int) -> float:
        num_missing = num_known - self._start(state, num_known)
        return 0.0 if num_missing <= FREE else num_missing * self._expected_s

    def prefill(self, rows: Sequence[tuple[SequenceState, Sequence[int]]]) -> float:
        before, left = self.now, CHUNK
        for state, token_ids in rows:
            start = self._start(state, len(token_ids))
            number = min(left, len(token_ids) - 1 - start)
            self.now += (self.costs.a_pass + number * self.costs.token) if number else 0.0
            self._ends[state], left = start + number, left - number
        return self.now - before

    def draft(self, rows: Sequence[DraftRow]) -> DraftBatch:
        for row in rows:
            self._ends[row.state] = len(row.token_ids)
        counts = [sum(row.num_drafts > place for row in rows) for place in range(rows[0].num_drafts)]
        self.now += self.costs.a_pass * len(counts)
        return DraftBatch([mx.zeros(count, mx.int32) for count in counts])


class Row:
    """One answer after another."""

    entry_media = None
    settings = GREEDY_ROW
    is_launched = False

    def __init__(self, speculator: Speculator, machine: Machine, prompt: int, answer: int) -> None:
        self._machine, self._speculator, self._lengths = machine, speculator, (prompt, answer)
        self.draft_state: DraftState
        self.begin()

    def begin(self) -> None:
        dice, (prompt, answer) = self._machine.dice, self._lengths
        self.draft_state, self.state = self._speculator.open(None), SequenceState(StatePool())
        self.left, self.room, self.is_new = dice.randrange(answer // 2, 3 * answer // 2), 256, True
        start = dice.randrange(10**5)  # so that nothing repeats itself
        self.token_ids = range(start, start + dice.randrange(prompt // 2, 3 * prompt // 2))

    def forced_tokens(self, limit: int) -> tuple[int, ...]:
        self._machine.now += self._machine.costs.attempt  # only a row that is due is asked
        return ()

    def step(self, chance: float) -> VerifiedWindow:
        num_drafts = self.draft_state.drafts.num_drafts
        wrong = (place for place in range(num_drafts) if self._machine.dice.random() >= chance)
        num_accepted = min(next(wrong, num_drafts), self.left - 1)
        self.left -= 1 + num_accepted
        self.room -= 1 + num_accepted
        self.token_ids = range(self.token_ids.start, self.token_ids.stop + 1 + num_accepted)
        return VerifiedWindow(self.draft_state, num_drafts, num_accepted, is_stopped=not self.left)


def tokens_per_s(
    costs: Costs, num_rows: int, chance: float, lengths: tuple[int, int], *, max_drafts: int, wrong: float = 1.0
) -> float:
    """Of 500 tokens a row behind the first 125. chance: of a draft, if those before it are right, to be right."""
    machine, planner = Machine(costs, wrong), DepthPlanner()
    alone = costs.step + costs.row
    for number in (1, 2, 4) * 2:  # as warm-up steps measure
        ratio = 1 + number * (costs.draft + costs.a_pass) / alone
        planner.times(1).observe_ratio(number, number, ratio)
    speculator = Speculator(machine, max_drafts, Ranking(), planner)
    rows = [Row(speculator, machine, *lengths) for _ in range(num_rows)]
    known_at, num_tokens, was_mixed, start = 0.0, 0, True, (0, 0.0)
    while num_tokens < 500 * num_rows:
        old, num_new = [row for row in rows if not row.is_new], sum(row.is_new for row in rows)
        num_drafts = sum(row.draft_state.drafts.num_drafts for row in old)
        machine.now += costs.step + costs.row * num_rows + costs.draft * num_drafts + costs.prompt * num_new
        windows = [row.step(chance) for row in old]
        seconds, known_at = machine.now - known_at, machine.now
        if windows:
            speculator.report(windows, seconds, is_mixed=was_mixed or num_new > 0)
        num_tokens += sum(1 + window.num_accepted for window in windows)
        was_mixed = num_new > 0
        for row in rows:
            row.is_new = False
        for row in old:
            if not row.left:
                row.begin()
        speculator.draft([row for row in rows if not row.is_new])
        if num_tokens < 125 * num_rows:
            start = num_tokens, machine.now
    assert speculator.num_failures == 0
    return (num_tokens - start[0]) / (machine.now - start[1])


def ratio(costs: Costs, num_rows: int, chance: float, lengths: tuple[int, int], wrong: float = 1.0) -> float:
    plain = tokens_per_s(costs, num_rows, chance, lengths, max_drafts=0)
    return tokens_per_s(costs, num_rows, chance, lengths, max_drafts=4, wrong=wrong) / plain


@pytest.mark.parametrize("lengths", [(40, 60), (300, 12), (300, 150)])
@pytest.mark.parametrize("num_rows", [1, 4, 8])
@pytest.mark.parametrize("costs", [LARGE, SMALL], ids=["large", "small"])
def test_prefills_for_drafts_cost_hardly_anything(costs: Costs, num_rows: int, lengths: tuple[int, int]) -> None:
    """Also where they take three times as long as expected, and for answers of a few tokens."""
    for chance in (0.0, 0.6):
        for wrong in (1.0, 3.0):
            assert ratio(costs, num_rows, chance, lengths, wrong) > 0.97


@pytest.mark.parametrize(
    ("num_rows", "lengths", "least"), [(1, (40, 60), 2.0), (1, (300, 150), 2.2), (4, (40, 60), 1.6)]
)
def test_good_drafts_are_prefilled_for(num_rows: int, lengths: tuple[int, int], least: float) -> None:
    assert ratio(LARGE, num_rows, 0.9, lengths) > least
