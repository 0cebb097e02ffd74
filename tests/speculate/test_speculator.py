"""What the engine asks about drafts, where the answers go wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from headrace.models.mtp_head import HeadOutputs
from headrace.models.step import Row
from headrace.sampling.rows import SamplingRow
from headrace.speculate.depth import DepthPlanner, DraftForecast
from headrace.speculate.head import HeadDrafter
from headrace.speculate.ranking import Ranking
from headrace.speculate.speculator import DraftState, Speculator, VerifiedWindow
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

    def forward(self, *arguments: object, launch: bool = True) -> mx.array:
        raise RuntimeError("out of memory")


class ReadingHead(BrokenHead):
    """Notes how many entries of how many sequences it is given at once."""

    def __init__(self) -> None:
        self.given: list[list[int]] = []

    def forward(
        self, entries: Sequence[Row], hidden: mx.array, ids: mx.array | None = None, *, launch: bool = True
    ) -> HeadOutputs:
        assert hidden.shape[1] == sum(len(one.token_ids) for one in entries)
        self.given.append([len(one.token_ids) for one in entries])
        rows = mx.zeros((len(entries), 4))
        return HeadOutputs(rows, rows)


@dataclass
class Drafting:
    """A sequence with room for 100 tokens."""

    draft_state: DraftState
    state: SequenceState
    token_ids: Sequence[int]
    room: int = 100
    settings: SamplingRow = GREEDY
    entry_media: None = None
    is_launched: bool = False

    def forced_tokens(self, limit: int) -> tuple[int, ...]:
        return ()


def compute(state: SequenceState, num_tokens: int) -> None:
    """Steps of one token each."""
    hidden = state.layer(HIDDEN, HiddenState)
    for _ in range(num_tokens):
        state.begin(1)
        hidden.write(state.length, mx.zeros((1, 1, 4)), ())
        state.commit(1)


def timed(*numbers_of_rows: int) -> DepthPlanner:
    """A planner that knows that steps of these numbers of rows take 10 ms without drafts."""
    planner = DepthPlanner()
    for num_rows in numbers_of_rows:
        for _ in range(3):
            planner.times(num_rows).observe_undrafted(300, 0.01)
    return planner


def test_a_head_that_fails_leaves_no_hidden_rows_behind() -> None:
    speculator = Speculator(HeadDrafter(BrokenHead()), 4, Ranking(), timed(1))
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
    speculator = Speculator(HeadDrafter(head), 4, Ranking(), DepthPlanner())
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
    """Of four steps two count: the first never does, and in the second something was compiled."""
    head, planner = ReadingHead(), DepthPlanner()
    speculator = Speculator(HeadDrafter(head), 4, Ranking(), planner)
    row, state = speculator.open(None), SequenceState(StatePool())
    known = []
    for length, num_new_variants in ((1, 0), (2, 1), (3, 1), (4, 1)):
        compute(state, 1)
        speculator.draft([Drafting(row, state, list(range(length + 1)))])
        head.num_new_variants = num_new_variants
        speculator.report([VerifiedWindow(row, 0, 0, False)], 0.01, is_mixed=False)
        known.append(planner.times(1).undrafted_s(length + 1))
    assert known == [None, None, None, 0.01]


def sequence(speculator: Speculator, length: int, max_drafts: int | None = None) -> Drafting:
    """One that has computed so many tokens."""
    state = SequenceState(StatePool())
    compute(state, length)
    return Drafting(speculator.open(max_drafts), state, range(length + 1))


def test_while_no_attempt_is_due_steps_are_overlapped_and_no_row_is_drafted_for() -> None:
    """A vain attempt takes a quarter of a step, and wrong drafts have emptied the budget."""
    planner = timed(2)
    for _ in range(3):
        planner.times(2).observe(300, 0, 0, 0.0125)
    speculator = Speculator(HeadDrafter(ReadingHead()), 4, Ranking(), planner)
    rows = [sequence(speculator, length) for length in (5, 7)]
    speculator.draft(rows)
    speculator.report(
        [VerifiedWindow(one.draft_state, one.draft_state.drafts.num_drafts, 0, False) for one in rows],
        0.08,
        is_mixed=False,
    )
    assert speculator.may_overlap([one.draft_state for one in rows])
    speculator.draft(rows)
    assert not any(one.draft_state.drafts.num_drafts for one in rows)


def test_a_sequence_with_a_long_prompt_is_drafted_for_from_its_first_step_on() -> None:
    planner = DepthPlanner()
    for _ in range(3):
        planner.times(1).observe_undrafted(5000, 0.01)
    speculator = Speculator(HeadDrafter(ReadingHead()), 4, Ranking(), planner)
    assert not speculator.may_overlap([speculator.open(None, 5000)])
    assert speculator.may_overlap([speculator.open(None, 500)])  # how long such a step takes is not known


def test_accepted_drafts_are_followed_by_an_attempt() -> None:
    speculator = Speculator(HeadDrafter(ReadingHead()), 4, Ranking(), timed(1))
    one = sequence(speculator, 5)
    for _ in range(20):
        assert not speculator.may_overlap([one.draft_state])
        speculator.draft([one])
        assert one.draft_state.drafts.num_drafts > 0
        speculator.report(
            [VerifiedWindow(one.draft_state, one.draft_state.drafts.num_drafts, 1, False)], 0.011, is_mixed=False
        )


def test_who_may_have_no_drafts_or_has_lost_them_is_never_waited_for() -> None:
    speculator = Speculator(HeadDrafter(ReadingHead()), 4, Ranking(), timed(1, 2, 3))
    rows = [sequence(speculator, 5, max_drafts) for max_drafts in (0, None, None)]
    assert not speculator.may_overlap([one.draft_state for one in rows])
    assert speculator.may_overlap([rows[0].draft_state])
    rows[1].draft_state.has_failed = True
    assert speculator.may_overlap([one.draft_state for one in rows[:2]])
    assert not speculator.may_overlap([rows[2].draft_state])


def test_no_row_is_drafted_for_while_a_step_is_under_way_but_the_head_catches_up() -> None:
    head = ReadingHead()
    speculator = Speculator(HeadDrafter(head), 4, Ranking(), timed(2))
    going, staying = sequence(speculator, 100), sequence(speculator, 10)
    going.is_launched, going.token_ids = True, range(100)
    speculator.draft([going, staying])
    assert (going.draft_state.drafts.num_drafts, staying.draft_state.drafts.num_drafts) == (0, 0)
    assert head.given == [[99]]
    going.is_launched, going.token_ids = False, range(101)
    speculator.draft([going, staying])
    assert going.draft_state.drafts.num_drafts + staying.draft_state.drafts.num_drafts > 0


def test_steps_without_drafts_are_timed_first_and_may_overlap() -> None:
    speculator = Speculator(HeadDrafter(ReadingHead()), 4, Ranking(), DepthPlanner())
    one = sequence(speculator, 5)
    for _ in range(3):
        assert speculator.may_overlap([one.draft_state])
        speculator.draft([one])
        assert one.draft_state.drafts.num_drafts == 0
        speculator.report([VerifiedWindow(one.draft_state, 0, 0, False)], 0.01, is_mixed=False)
    assert not speculator.may_overlap([one.draft_state])
    speculator.draft([one])
    assert one.draft_state.drafts.num_drafts > 0


def test_drafts_have_to_be_faster_than_steps_without_any_attempt() -> None:
    """Three drafted tokens in 12 ms are worth it beside one in 10 ms, but not beside one in 3 ms."""
    for undrafted_s, is_drafted in ((0.010, True), (0.003, False)):
        planner, forecast = DepthPlanner(), DraftForecast((0.999, 0.998), True, 300)
        times = planner.times(1)
        for _ in range(3):
            times.observe_undrafted(300, undrafted_s)
        for _ in range(3):
            times.observe(300, 1, 1, 0.011)
            times.observe(300, 2, 2, 0.012)
        assert planner.plan([forecast]) == ((2,) if is_drafted else (0,))


def test_only_steps_between_two_others_tell_what_overlapped_steps_take() -> None:
    planner = DepthPlanner()
    speculator = Speculator(HeadDrafter(ReadingHead()), 4, Ranking(), planner)
    one = sequence(speculator, 5, max_drafts=0)
    speculator.draft([one])
    for was_overlapped, next_overlaps, is_mixed in ((False, True, False), (True, False, False), (True, True, True)):
        for _ in range(9):
            speculator.report(
                [VerifiedWindow(one.draft_state, 0, 0, False)],
                0.004,
                is_mixed=is_mixed,
                was_overlapped=was_overlapped,
                next_overlaps=next_overlaps,
            )
        assert planner.times(1).undrafted_s(6) is None
    for _ in range(3):
        speculator.report(
            [VerifiedWindow(one.draft_state, 0, 0, False)],
            0.004,
            is_mixed=False,
            was_overlapped=True,
            next_overlaps=True,
        )
    assert planner.times(1).undrafted_s(6) == 0.004
