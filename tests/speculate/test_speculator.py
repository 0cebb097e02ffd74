"""What the engine asks about drafts, where the answers go wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from headrace.models.mtp_head import HeadEntries, HeadOutputs
from headrace.sampling.sampler import SamplingRow
from headrace.speculate.depth import DepthPlanner, DraftForecast
from headrace.speculate.head import HeadDrafter
from headrace.speculate.ranking import Ranking
from headrace.speculate.speculator import DraftState, Speculator, Verified
from headrace.speculate.step_costs import StepCosts, StepShape
from headrace.state.hidden import NUM_AGAIN, HiddenState
from headrace.state.sequence import SequenceState
from headrace.state.slabs import StatePool
from headrace.types.request import SamplingParams

GREEDY = SamplingRow(SamplingParams(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=0), 0)
HIDDEN = (7,)


class BrokenHead:
    """Has no memory left for anything."""

    is_compiled = False
    num_new_variants = 0

    def hidden_of(self, state: SequenceState) -> HiddenState:
        return state.layer(HIDDEN, HiddenState)

    def read(self, *arguments: object, launch: bool = True) -> mx.array:
        raise RuntimeError("out of memory")


class ReadingHead(BrokenHead):
    """Notes how many entries of how many sequences it is given at once."""

    def __init__(self) -> None:
        self.given: list[list[int]] = []

    def read(
        self, entries: Sequence[HeadEntries], hidden: mx.array, ids: mx.array | None = None, *, launch: bool = True
    ) -> HeadOutputs:
        assert hidden.shape[1] == sum(len(one.token_ids) for one in entries)
        self.given.append([len(one.token_ids) for one in entries])
        rows = mx.zeros((len(entries), 4))
        return HeadOutputs(rows, rows)


@dataclass
class Drafting:
    """A sequence with room for 100 tokens."""

    row: DraftState
    state: SequenceState
    token_ids: Sequence[int]
    room: int = 100
    settings: SamplingRow = GREEDY
    entry_media: None = None
    is_ahead: bool = False

    def forced_tokens(self, limit: int) -> tuple[int, ...]:
        return ()


def compute(state: SequenceState, num_tokens: int) -> None:
    """Steps of one token each."""
    hidden = state.layer(HIDDEN, HiddenState)
    for _ in range(num_tokens):
        state.begin(1)
        hidden.write(state.length, mx.zeros((1, 1, 4)), ())
        state.commit(1)


def ready() -> DepthPlanner:
    """A planner that makes drafts."""
    costs = StepCosts()
    for _ in range(3):
        costs.observe(StepShape(1, 0, 0, 300), 0.01)
    return DepthPlanner(costs)


def test_a_head_that_fails_leaves_no_hidden_rows_behind() -> None:
    speculator = Speculator(HeadDrafter(BrokenHead()), 4, Ranking(), ready())
    row, state = speculator.open(None), SequenceState(StatePool())
    hidden = state.layer(HIDDEN, HiddenState)
    for length in range(1, 301):
        compute(state, 1)
        speculator.draft([Drafting(row, state, list(range(length + 1)))])
    assert row.has_failed
    assert speculator.num_failures == 1
    assert sum(array.shape[1] for array in hidden.arrays()) < 10 + NUM_AGAIN


def test_rows_without_drafts_are_read_together_when_one_is_due() -> None:
    """Of 100, 40 and 10 computed tokens, the first of which has no entry, all of those that would soon be due."""
    head = ReadingHead()
    speculator = Speculator(HeadDrafter(head), 4, Ranking(), DepthPlanner(StepCosts()))
    rows = []
    for length in (100, 40, 10):
        state = SequenceState(StatePool())
        compute(state, length)
        rows.append(Drafting(speculator.open(0), state, list(range(length + 1))))
    speculator.draft(rows)
    assert head.given == [[99, 39]]
    speculator.draft(rows)
    assert head.given == [[99, 39]]
    assert speculator.num_failures == 0


def test_nothing_is_learned_from_the_time_of_a_step_that_had_to_be_compiled() -> None:
    head, costs = ReadingHead(), StepCosts()
    speculator = Speculator(HeadDrafter(head), 4, Ranking(), DepthPlanner(costs))
    row, state = speculator.open(None), SequenceState(StatePool())
    known = []
    for length, num_new_variants in ((1, 0), (2, 1), (3, 1), (4, 3)):
        compute(state, 1)
        speculator.draft([Drafting(row, state, list(range(length + 1)))])
        head.num_new_variants = num_new_variants
        speculator.report([Verified(row, 0, 0, False)], 0.01, is_mixed=False)
        known.append(costs.estimate(1, length + 1).num_timed)
    assert known == [1, 1, 2, 2]


def sequence(speculator: Speculator, length: int, max_drafts: int | None = None) -> Drafting:
    """One that has computed so many tokens."""
    state = SequenceState(StatePool())
    compute(state, length)
    return Drafting(speculator.open(max_drafts), state, range(length + 1))


def timed(num_rows: int, overlapped_s: float = 0.01) -> StepCosts:
    """Steps of one row and of more took 10 ms without drafts, and so long if they ran ahead."""
    costs = StepCosts()
    for rows in {1, num_rows}:
        for _ in range(3):
            costs.observe(StepShape(rows, 0, 0, 300), 0.01)
            costs.observe_overlapped(StepShape(rows, 0, 0, 300), overlapped_s)
    return costs


def test_a_sequence_that_begins_is_drafted_for_at_once_while_those_without_drafts_rest() -> None:
    """Each look costs a quarter of a step that could run ahead, so that looks at all rows are 25 steps apart."""
    speculator = Speculator(HeadDrafter(ReadingHead()), 4, Ranking(), DepthPlanner(timed(2, overlapped_s=0.008)))
    old, new = sequence(speculator, 5), sequence(speculator, 7)
    old.room = 0
    for _ in range(40):
        speculator.draft([old])
        speculator.report([Verified(old.row, 0, 0, False)], 0.008, is_mixed=False, was_ahead=True, goes_ahead=True)
    old.room = 100
    assert speculator.may_overlap([old.row])
    assert not speculator.may_overlap([old.row, new.row])
    speculator.draft([old, new])
    assert old.row.drafts.num_drafts == 0 < new.row.drafts.num_drafts


def test_who_may_have_no_drafts_or_has_lost_them_is_never_waited_for() -> None:
    speculator = Speculator(HeadDrafter(ReadingHead()), 4, Ranking(), DepthPlanner(timed(3)))
    rows = [sequence(speculator, 5, max_drafts) for max_drafts in (0, None, None)]
    assert not speculator.may_overlap([one.row for one in rows])
    assert speculator.may_overlap([rows[0].row])
    rows[1].row.has_failed = True
    assert speculator.may_overlap([one.row for one in rows[:2]])
    assert not speculator.may_overlap([rows[2].row])


def test_nobody_is_looked_at_for_drafts_while_a_step_is_under_way_but_the_head_reads() -> None:
    head = ReadingHead()
    speculator = Speculator(HeadDrafter(head), 4, Ranking(), DepthPlanner(timed(2)))
    going, staying = sequence(speculator, 100), sequence(speculator, 10)
    going.is_ahead, going.token_ids = True, range(100)
    speculator.draft([going, staying])
    assert (going.row.drafts.num_drafts, staying.row.drafts.num_drafts) == (0, 0)
    assert head.given == [[99]]
    going.is_ahead, going.token_ids = False, range(101)
    speculator.draft([going, staying])
    assert min(going.row.drafts.num_drafts, staying.row.drafts.num_drafts) > 0


def test_rows_are_looked_at_until_two_such_steps_are_timed_and_none_rests_before() -> None:
    speculator = Speculator(HeadDrafter(ReadingHead()), 4, Ranking(), DepthPlanner(StepCosts()))
    one = sequence(speculator, 5)
    for _ in range(2):
        assert not speculator.may_overlap([one.row])
        speculator.draft([one])
        assert one.row.drafts.num_drafts == 0
        speculator.report([Verified(one.row, 0, 0, False)], 0.01, is_mixed=False)
    speculator.draft([one])
    assert one.row.drafts.num_drafts > 0


def test_drafts_have_to_be_faster_than_steps_that_run_ahead() -> None:
    """Three drafted tokens in 12 ms are worth it beside one in 10 ms, but not beside one in 3 ms."""
    for overlapped_s, is_drafted in ((0.010, True), (0.003, False)):
        costs, forecast = StepCosts(), DraftForecast((0.999, 0.998), True, 300)
        for _ in range(3):
            costs.observe(StepShape(1, 0, 0, 300), 0.010)
            costs.observe(StepShape(1, 1, 1, 300), 0.011)
            costs.observe(StepShape(1, 2, 2, 300), 0.012)
        planner = DepthPlanner(costs)
        planner.observe_overlapped([forecast], overlapped_s)
        assert planner.plan([forecast]) == ((2,) if is_drafted else (0,))


def test_only_steps_between_two_others_tell_what_resting_takes() -> None:
    costs = StepCosts()
    for _ in range(3):
        costs.observe(StepShape(1, 0, 0, 300), 0.01)
    speculator = Speculator(HeadDrafter(ReadingHead()), 4, Ranking(), DepthPlanner(costs))
    one = sequence(speculator, 5, max_drafts=0)
    speculator.draft([one])
    known = []
    for was_ahead, goes_ahead, is_mixed in (
        (False, True, False),
        (True, False, False),
        (True, True, True),
        (True, True, False),
    ):
        speculator.report(
            [Verified(one.row, 0, 0, False)],
            0.004,
            is_mixed=is_mixed,
            was_ahead=was_ahead,
            goes_ahead=goes_ahead,
        )
        estimate = costs.estimate(1, 6)
        known.append((estimate.undrafted_s, estimate.overlapped, estimate.num_timed))
    assert known == [(0.01, 0.01, 3)] * 3 + [(0.01, 0.004, 3)]


def test_what_resting_takes_is_learned_before_looks_go_on() -> None:
    costs = StepCosts()
    for _ in range(3):
        costs.observe(StepShape(1, 0, 0, 300), 0.01)
    speculator = Speculator(HeadDrafter(ReadingHead()), 4, Ranking(), DepthPlanner(costs))
    one = sequence(speculator, 5)
    rested = []
    for _ in range(3):
        rested.append(speculator.may_overlap([one.row]))
        costs.observe_overlapped(StepShape(1, 0, 0, 300), 0.01)
    assert rested == [True, True, False]
