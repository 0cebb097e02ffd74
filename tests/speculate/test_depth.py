"""Depths planned against made-up machines and texts, whose best choice arithmetic tells."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pytest

from headrace.speculate.depth import DepthPlanner, DraftForecast
from headrace.speculate.ranking import Ranking, RowAcceptance
from headrace.speculate.step_times import StepTimes


class StepShape(NamedTuple):
    """What a step's time depends on; num_context: tokens of all rows."""

    num_rows: int
    num_drafts: int
    num_passes: int
    num_context: int


Machine = Callable[[StepShape], float]
"""Seconds of a step."""


def gpu(shape: StepShape) -> float:
    """Hardly any cost for a draft, a little for a pass of the head."""
    return 0.010 + 0.00005 * (shape.num_rows + shape.num_drafts) + 0.0006 * shape.num_passes


def cpu(shape: StepShape) -> float:
    """Two tokens cost nearly as much as eight, which cost twice as much as one."""
    num_tokens = shape.num_rows + shape.num_drafts
    return (0.020 if num_tokens == 1 else 0.036 + 0.001 * num_tokens) + 0.001 * shape.num_passes


def slow(shape: StepShape) -> float:
    """Every token costs the same: drafts can't pay."""
    return 0.010 * (shape.num_rows + shape.num_drafts) + 0.001 * shape.num_passes


def forecast(*survival: float, uses_model: bool = True) -> DraftForecast:
    return DraftForecast(survival, uses_model, 1000)


def measure(times: StepTimes, seconds: float, num_drafts: int = 0, num_passes: int = 0, num_context: int = 300) -> None:
    """Three steps that took so long; the first of a kind does not count."""
    for _ in range(3):
        if num_drafts:
            times.observe(num_context, num_drafts, num_passes, seconds)
        else:
            times.observe_undrafted(num_context, seconds)


def timed(machine: Machine, num_rows: int, num_drafts: int = 24, num_passes: int = 4) -> DepthPlanner:
    """A planner that has measured a machine throughout."""
    planner, context = DepthPlanner(), 1000 * num_rows
    times = planner.times(num_rows)
    measure(times, machine(StepShape(num_rows, 0, 0, context)), num_context=context)
    for drafts, head in itertools.product(range(1, num_drafts + 1), range(num_passes + 1)):
        measure(times, machine(StepShape(num_rows, drafts, head, context)), drafts, head, context)
    return planner


def observe(
    planner: DepthPlanner, rows: Sequence[DraftForecast], depths: Sequence[int], num_gained: int, seconds: float
) -> None:
    """A step without prompts, on a machine that overlaps none."""
    has_attempted = any(depths)
    planner.observe(
        rows, depths, num_gained, seconds, is_timed=True, is_baseline=not has_attempted, has_attempted=has_attempted
    )


def tokens_per_second(rows: Sequence[DraftForecast], depths: Sequence[int], machine: Machine) -> float:
    head = max((depth for row, depth in zip(rows, depths, strict=True) if row.uses_model), default=0)
    gained = sum(1 + sum(row.survival[:depth]) for row, depth in zip(rows, depths, strict=True))
    return gained / machine(StepShape(len(rows), sum(depths), head, 1000 * len(rows)))


@pytest.mark.parametrize("machine", [gpu, cpu, slow])
@pytest.mark.parametrize("seed", range(12))
def test_the_plan_is_the_fastest_of_all_choices(machine: Machine, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = [
        forecast(*np.cumprod(rng.uniform(0.3, 1, rng.integers(0, 4))).tolist(), uses_model=bool(rng.integers(0, 3)))
        for _ in range(3)
    ]
    planner = timed(machine, 3)
    every = itertools.product(*(range(len(row.survival) + 1) for row in rows))
    best = max(every, key=lambda depths: tokens_per_second(rows, depths, machine))
    fastest, undrafted = (tokens_per_second(rows, depths, machine) for depths in (best, (0, 0, 0)))
    planned = planner.plan(rows)
    if fastest > 1.01 * undrafted:
        assert tokens_per_second(rows, planned, machine) == pytest.approx(fastest)
    else:
        assert sum(planned) <= 1  # a try


def test_likely_drafts_go_before_unlikely_ones_over_all_rows() -> None:
    def four_drafts(shape: StepShape) -> float:
        return 0.01 if shape.num_drafts <= 4 else 1.0

    rows = [forecast(0.9, 0.8, 0.7, 0.6), forecast(0.75, 0.3), forecast(0.2)]
    assert timed(four_drafts, 3).plan(rows) == (3, 1, 0)


def test_copies_are_drafted_without_passes_of_the_head() -> None:
    def dear_head(shape: StepShape) -> float:
        return 0.01 + 0.1 * shape.num_passes

    rows = [forecast(0.9, 0.8), forecast(0.5, 0.4, 0.3, uses_model=False)]
    assert timed(dear_head, 2).plan(rows) == (0, 3)


class Run:
    """A decode of some rows on a machine, drafted by the head; `chances` are those of a draft, by step.

    disturbed: seconds that a step seems to take longer, without any cost of drafts.
    """

    def __init__(
        self,
        machine: Machine,
        num_rows: int,
        max_depth: int = 4,
        disturbed: Machine = lambda shape: 0.0,
    ) -> None:
        self.machine, self.max_depth, self.disturbed = machine, max_depth, disturbed
        self.planner, self.ranking = DepthPlanner(), Ranking()
        self.records = [RowAcceptance() for _ in range(num_rows)]
        self.rng = np.random.default_rng(3)
        self.noise = np.random.default_rng(4)
        self.depths: list[tuple[int, ...]] = []
        self.seconds = self.undrafted = 0.0

    def step(self, chance: float) -> None:
        best = [self.ranking.best(record, self.max_depth, num_model=self.max_depth) for record in self.records]
        rows = [DraftForecast(each.survival, each.uses_model, 1000 + len(self.depths)) for each in best]
        depths = self.planner.plan(rows) if self.planner.is_due(rows) else (0,) * len(rows)
        gained = len(rows)
        for record, candidate, depth in zip(self.records, best, depths, strict=True):
            num_accepted = next((at for at in range(depth) if self.rng.random() >= chance), depth)
            self.ranking.report(record, candidate.first(depth), num_accepted)
            gained += num_accepted
        context = sum(row.num_context for row in rows)
        noise = 1 + 0.05 * self.noise.random() + 4 * (self.noise.random() < 0.005)
        shape = StepShape(len(rows), sum(depths), max(depths), context)
        spent = noise * self.machine(shape) + self.disturbed(shape)
        observe(self.planner, rows, depths, gained, spent)
        self.depths.append(depths)
        self.seconds += self.machine(StepShape(len(rows), sum(depths), max(depths), context))
        self.undrafted += gained / len(rows) * self.machine(StepShape(len(rows), 0, 0, context))

    def steps(self, count: int, chance: float) -> float:
        """How many times as fast these steps were as without drafts."""
        seconds, undrafted = self.seconds, self.undrafted
        for _ in range(count):
            self.step(chance)
        return (self.undrafted - undrafted) / (self.seconds - seconds)


@pytest.mark.parametrize("num_rows", [1, 4])
@pytest.mark.parametrize("machine", [gpu, cpu, slow])
def test_the_worst_text_is_at_most_three_per_cent_slower_than_without_drafts(machine: Machine, num_rows: int) -> None:
    run = Run(machine, num_rows)
    assert run.steps(100, 0.0) > 0.97
    assert run.steps(300, 0.0) > 0.97
    assert run.steps(2000, 0.0) > 0.98


@pytest.mark.parametrize(("machine", "num_rows", "least"), [(gpu, 1, 2.5), (gpu, 8, 2.4), (cpu, 1, 1.5)])
def test_a_text_whose_drafts_are_accepted_runs_nearly_as_fast_as_it_can(
    machine: Machine, num_rows: int, least: float
) -> None:
    chance, context = 0.85, 1000 * num_rows
    paces = [
        sum(chance**at for at in range(depth + 1)) / machine(StepShape(num_rows, depth * num_rows, depth, context))
        for depth in range(5)
    ]
    run = Run(machine, num_rows)
    run.steps(400, chance)
    speed = run.steps(600, chance)
    assert speed > 0.93 * max(paces) / paces[0]
    assert speed > least


@pytest.mark.parametrize("machine", [gpu, cpu])
def test_drafts_stop_when_the_text_turns_bad_and_come_back_when_it_turns_good(machine: Machine) -> None:
    run = Run(machine, 1)
    run.steps(300, 0.9)
    run.steps(100, 0.0)
    assert run.steps(900, 0.0) > 0.98
    run.steps(250, 0.9)
    assert run.steps(200, 0.9) > (2 if machine is gpu else 1.5)


def test_waiting_for_a_compiler_is_held_against_no_drafts() -> None:
    """A machine that takes 200 steps' time for the first step of each kind, as one does that compiles its kernels."""
    met: set[StepShape] = set()

    def compiling(shape: StepShape) -> float:
        kind = StepShape(shape.num_rows, shape.num_drafts, shape.num_passes, 0)
        is_new = kind not in met
        met.add(kind)
        return gpu(shape) + (2.0 if is_new else 0.0)

    run = Run(gpu, 1)
    run.machine = compiling
    run.steps(60, 0.9)
    run.machine = gpu
    assert run.steps(100, 0.9) > 2


def cheap(shape: StepShape) -> float:
    """Steps of 5 ms; a draft adds 2 % to them, a pass of the head 6 %."""
    return 0.005 * (1 + 0.02 * shape.num_drafts + 0.06 * shape.num_passes)


def first_of_each(seconds: float, kind: Callable[[StepShape], object]) -> Machine:
    """What a compiler takes: so many seconds for the first step of each kind."""
    met: set[object] = set()

    def disturbed(shape: StepShape) -> float:
        is_new = kind(shape) not in met
        met.add(kind(shape))
        return seconds * is_new

    return disturbed


def by_drafts(shape: StepShape) -> object:
    return shape.num_rows, shape.num_drafts, shape.num_passes


def by_drafts_and_context(shape: StepShape) -> object:
    return *by_drafts(shape), shape.num_context // 256


DISTURBANCES = {
    "nothing": (0.0, by_drafts),
    "seconds for each kind": (2.0, by_drafts),
    "three steps' time for each kind": (0.012, by_drafts),
    "seconds for each kind at each context": (2.0, by_drafts_and_context),
}


@pytest.mark.parametrize("disturbance", DISTURBANCES)
@pytest.mark.parametrize(("num_rows", "least"), [(1, 2.6), (4, 2.2), (8, 1.8)])
def test_cheap_drafts_are_made_as_deep_as_they_pay_whatever_a_compiler_takes(
    num_rows: int, least: float, disturbance: str
) -> None:
    """With a chance of 0.85 four drafts are 2.81, 2.38 and 1.97 times as fast as none, by the sum of its powers."""
    run = Run(cheap, num_rows, disturbed=first_of_each(*DISTURBANCES[disturbance]))
    run.steps(150, 0.85)
    assert run.steps(250, 0.85) > least


@pytest.mark.parametrize("disturbance", DISTURBANCES)
@pytest.mark.parametrize("num_rows", [1, 8])
def test_cheap_drafts_that_are_never_right_cost_three_per_cent_at_most(num_rows: int, disturbance: str) -> None:
    run = Run(cheap, num_rows, disturbed=first_of_each(*DISTURBANCES[disturbance]))
    assert run.steps(100, 0.0) > 0.97
    assert run.steps(300, 0.0) > 0.97


def test_a_first_time_that_a_compiler_took_does_not_end_the_drafts() -> None:
    """The first step of a kind does not count, nor does a single further one; two do."""
    times = StepTimes(1)
    measure(times, 0.005)
    for _ in range(2):
        times.observe(300, 2, 2, 5.0)
        assert times.ratio(2, 2) < 1.3
    times.observe(300, 2, 2, 5.0)
    assert times.ratio(2, 2) == 1000


def test_steps_without_drafts_take_no_longer_than_steps_with_them() -> None:
    times = StepTimes(4)
    measure(times, 3.0, num_context=4000)
    measure(times, 0.006, 4, 1, 4000)
    measure(times, 0.006, 4, 1, 4000)
    assert times.undrafted_s(4000) == 0.006
    assert times.ratio(4, 1) == 1.0


def test_drafts_are_bounded_by_what_more_of_them_took() -> None:
    times = StepTimes(1)
    measure(times, 1.0)
    assert times.upper_bound(2, 2) == pytest.approx(1 + 2 + 2 * 0.1)
    measure(times, 1.5, 4, 4)
    assert times.upper_bound(2, 2) == 1.5


def test_what_steps_took_is_forgotten() -> None:
    times = StepTimes(1)
    measure(times, 1.0)
    measure(times, 2.0, 2, 2)
    assert times.ratio(2, 2) == 2.0
    for _ in range(600):
        times.observe_undrafted(300, 1.0)
    times.observe_ratio(1, 0, 1.1)
    assert times.ratio(2, 2) < 1.5


def test_attempts_that_find_nothing_are_no_cost_of_drafts() -> None:
    """Two drafts took 0.2 s longer than a vain attempt, so eight are thought to take 0.8 s longer at most."""
    times = StepTimes(8)
    measure(times, 1.0)
    for _ in range(3):
        times.observe(300, 0, 0, 1.5)
    measure(times, 1.7, 2, 0)
    assert times.upper_bound(8, 0) == pytest.approx(1.5 + 0.8)


def test_a_machine_that_changes_is_measured_anew() -> None:
    run = Run(gpu, 1)
    run.steps(300, 0.7)
    assert sum(max(depths) > 1 for depths in run.depths[-100:]) > 80
    run.machine = slow
    run.steps(300, 0.7)
    run.steps(300, 0.7)
    assert sum(max(depths) for depths in run.depths[-200:]) < 30


def test_nothing_is_drafted_before_steps_without_drafts_were_timed() -> None:
    """Three, because the first does not count."""
    planner, rows = DepthPlanner(), [forecast(0.9)]
    for _ in range(3):
        assert not planner.is_due(rows)
        assert planner.plan(rows) == (0,)
        observe(planner, rows, (0,), 1, 0.01)
    assert planner.is_due(rows)
    assert planner.plan(rows) == (1,)


def test_steps_with_prompts_tell_nothing_about_times() -> None:
    planner, rows = DepthPlanner(), [forecast(0.9)]
    for _ in range(9):
        planner.observe(rows, (0,), 1, 0.01, is_timed=False, is_baseline=True, has_attempted=False)
    assert planner.times(1).undrafted_s(1000) is None


def test_steps_without_drafts_are_timed_again() -> None:
    """Of which an overlapped run's first and last are not representative."""
    planner, rows = timed(gpu, 1), [forecast(0.9, 0.8)]
    depths = []
    for _ in range(300):
        depths.append(planner.plan(rows)[0] if planner.is_due(rows) else 0)
        seconds = gpu(StepShape(1, depths[-1], depths[-1], 1000))
        is_baseline = depths[-2:] == [0, 0]
        planner.observe(
            rows,
            depths[-1:],
            1 + depths[-1],
            seconds,
            is_timed=True,
            is_baseline=is_baseline,
            has_attempted=depths[-1] > 0,
        )
    assert [step for step, depth in enumerate(depths) if depth == 0] == [128, 129, 258, 259]


def test_attempts_that_find_nothing_take_a_quarter_of_what_flows_in() -> None:
    """Each takes a quarter of a step: at 1.5 % of a step a piece there is one in 67 steps, one of which it is."""
    planner, rows = DepthPlanner(), [forecast()]
    attempts = []
    for step in range(450):
        is_due = planner.is_due(rows)
        attempts += [step] * is_due
        assert planner.plan(rows) == (0,)
        planner.observe(
            rows, (0,), 1, 0.0125 if is_due else 0.01, is_timed=True, is_baseline=not is_due, has_attempted=is_due
        )
    # the first are free as long as their cost is not known, and the last are as the budget is nearly full
    assert {later - earlier for earlier, later in itertools.pairwise(attempts[2:7])} <= {66, 67, 68}


def test_attempts_go_on_where_the_budget_is_full() -> None:
    planner, rows = timed(gpu, 1), [forecast()]
    is_due = []
    for _ in range(3000):
        is_due.append(planner.is_due(rows))
        planner.plan(rows)
        planner.observe(
            rows,
            (0,),
            1,
            0.02 if is_due[-1] else 0.01,
            is_timed=True,
            is_baseline=not is_due[-1],
            has_attempted=is_due[-1],
        )
    assert sum(is_due[2000:]) > 10


def test_attempts_go_on_beside_prompts() -> None:
    """The time of such steps is not known, so that they are charged what attempts took without prompts."""
    planner, rows = timed(gpu, 1), [forecast()]
    for _ in range(3):
        planner.times(1).observe(1000, 0, 0, 1.25 * gpu(StepShape(1, 0, 0, 1000)))
    attempts = []
    for step in range(300):
        attempts += [step] * planner.is_due(rows)
        is_due = planner.is_due(rows)
        assert planner.plan(rows) == (0,)
        planner.observe(rows, (0,), 1, 3.0, is_timed=False, is_baseline=False, has_attempted=is_due)
    assert {later - earlier for earlier, later in itertools.pairwise(attempts)} <= {66, 67, 68}
    assert len(attempts) > 3


@pytest.mark.parametrize("chance", [0.0, 0.9])
def test_disturbed_steps_do_not_keep_good_drafts_from_being_made(chance: float) -> None:
    """Half of all steps take three times as long, with drafts or without, as on a busy machine."""
    dice = np.random.default_rng(5)
    run = Run(gpu, 1, disturbed=lambda shape: 2 * gpu(shape) * (dice.random() < 0.5))
    run.steps(100, chance)
    assert run.steps(400, chance) > (2 if chance else 0.97)


def test_rows_without_drafts_are_planned_none() -> None:
    planner = timed(gpu, 2)
    assert planner.plan([forecast(), forecast()]) == (0, 0)
    assert planner.plan([]) == ()
    observe(planner, [], (), 0, 0.01)


def test_a_disturbed_time_does_not_move_a_median() -> None:
    times = StepTimes(1)
    for seconds in (5.0, 0.01, 0.011, 0.012, 9.0):
        times.observe_undrafted(1000, seconds)
    assert times.undrafted_s(1000) == 0.011


def test_a_context_that_was_not_timed_takes_what_the_nearest_similar_one_did() -> None:
    times = StepTimes(1)
    measure(times, 0.01, num_context=1000)
    measure(times, 0.05, num_context=64_000)
    assert times.undrafted_s(50_000) == 0.05
    assert times.undrafted_s(1900) == 0.01
    assert times.undrafted_s(8000) is None


def test_drafts_that_lost_time_for_many_rows_say_nothing_about_one() -> None:
    """They were wrong 20 times for 32 rows; one row's likely draft costs 6 % of a step and gains 0.8 of one."""
    planner = DepthPlanner()
    for num_rows in (32, 1):
        context = 1000 * num_rows
        measure(planner.times(num_rows), gpu(StepShape(num_rows, 0, 0, context)), num_context=context)
    many, one = [forecast(0.8)] * 32, [forecast(0.8)]
    for _ in range(20):
        observe(planner, many, [1] * 32, 32, 10 * gpu(StepShape(32, 32, 1, 32_000)))
    assert planner.plan(many) == (0,) * 32
    assert planner.is_due(one) and planner.plan(one) == (1,)


def test_disturbed_drafts_are_tried_again_once_their_times_are_forgotten() -> None:
    """Ten steps took ten times their time. At 1.5 % of a step a piece, owing it all would take 6,000 steps."""
    planner, rows = DepthPlanner(), [forecast(0.8)]
    measure(planner.times(1), gpu(StepShape(1, 0, 0, 1000)), num_context=1000)
    measure(planner.times(1), gpu(StepShape(1, 1, 1, 1000)), 1, 1, 1000)
    for _ in range(10):
        observe(planner, rows, [1], 1, 10 * gpu(StepShape(1, 1, 1, 1000)))
    drafted_at = None
    for step in range(1000):
        if drafted_at is None and planner.is_due(rows) and any(planner.plan(rows)):
            drafted_at = step
        observe(planner, rows, [0], 1, gpu(StepShape(1, 0, 0, 1000)))
    assert drafted_at is not None
