"""Prompts beside running streams get what the streams can bear, as measured."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler.made_up import AMPLE, answer, request

from headrace.scheduler.prefill import PREFILL_GRID
from headrace.scheduler.scheduler import Scheduler
from headrace.scheduler.step_time_model import REMEASURE_EVERY, SLOWDOWN, STREAM_GAP_S, StepTimeModel
from headrace.types.step import Chunk, StepPlan

CHUNK = 2048


@dataclass(frozen=True)
class Machine:
    """What steps take on a made-up machine: a fixed part, one per row, one per piece of a prompt and per token of it.

    depth_s: what a token takes more for each token that precedes it.
    """

    fixed_s: float
    row_s: float
    chunk_s: float
    token_s: float
    depth_s: float = 0.0

    def step_s(self, num_rows: int, num_prompt_tokens: int) -> float:
        chunk_s = self.chunk_s if num_prompt_tokens else 0.0
        return self.fixed_s + self.row_s * num_rows + chunk_s + self.token_s * num_prompt_tokens

    def plan_s(self, plan: StepPlan) -> float:
        prompts = [chunk for chunk in plan.chunks if chunk.output_index == 0]
        of_depth = sum(len(chunk.token_ids) * self.depth_s * middle(chunk) for chunk in prompts)
        return self.step_s(len(plan.chunks) - len(prompts), plan.num_prompt_tokens) + of_depth


def middle(chunk: Chunk) -> float:
    return chunk.start + len(chunk.token_ids) / 2


# as the bundled model on one core, and as one of four billion parameters on a large GPU, which builds each mixed step
CPU = Machine(fixed_s=0.008, row_s=0.001, chunk_s=0.005, token_s=0.0003, depth_s=1e-7)
GPU = Machine(fixed_s=0.0037, row_s=0.0001, chunk_s=0.029, token_s=20e-6)
FLAT = Machine(fixed_s=0.02, row_s=0.001, chunk_s=0.004, token_s=0.0005)


def run(pace: StepTimeModel, machine: Machine, num_rows: int, num_steps: int, chunk: int = CHUNK) -> list[int]:
    """Budgets of steps in which there is always more prompt to compute."""
    budgets = []
    for _ in range(num_steps):
        budgets.append(pace.prompt_budget(num_rows, chunk))
        pace.observe(num_rows, budgets[-1], machine.step_s(num_rows, budgets[-1]))
    return budgets


@pytest.mark.parametrize("chunk", [1, 5, 32, 100, 2048])
def test_without_streams_a_step_takes_the_full_chunk(chunk: int) -> None:
    pace = StepTimeModel()
    assert pace.prompt_budget(0, chunk) == chunk
    run(pace, FLAT, 4, 40)
    assert pace.prompt_budget(0, chunk) == chunk


@pytest.mark.parametrize("num_rows", [1, 8, 32])
@pytest.mark.parametrize("machine", [CPU, GPU, FLAT])
def test_the_price_of_a_piece_is_found_apart_from_that_of_its_tokens(machine: Machine, num_rows: int) -> None:
    pace = StepTimeModel()
    run(pace, machine, num_rows, 60)
    assert pace.decode_step_s(num_rows) == pytest.approx(machine.step_s(num_rows, 0))
    assert pace.chunk_s == pytest.approx(machine.chunk_s)
    assert pace.prompt_token_s() == pytest.approx(machine.token_s)


@pytest.mark.parametrize("num_rows", [1, 8, 32])
@pytest.mark.parametrize("machine", [CPU, FLAT])
def test_pieces_are_as_large_as_the_streams_bear(machine: Machine, num_rows: int) -> None:
    plain_s = machine.step_s(num_rows, 0)
    # by hand: what a mixed step may take more than a plain one, without the price of the piece, in tokens
    expected = ((SLOWDOWN - 1) * plain_s - machine.chunk_s) / machine.token_s
    budgets = run(StepTimeModel(), machine, num_rows, 60)[-REMEASURE_EVERY - 1 :]
    *large, half = sorted(budgets, reverse=True)[:REMEASURE_EVERY]
    assert set(large) <= {int(expected), int(expected) - 1}
    assert half == -(-large[0] // 2)
    assert machine.step_s(num_rows, large[0]) <= SLOWDOWN * plain_s * (1 + 1e-9)


def test_a_piece_is_never_mostly_its_fixed_price() -> None:
    budgets = run(StepTimeModel(), GPU, 7, 60)[-REMEASURE_EVERY - 1 :]
    assert GPU.chunk_s > (SLOWDOWN - 1) * GPU.step_s(7, 0)  # no piece, however small, is within what the streams bear
    assert max(budgets) == pytest.approx(GPU.chunk_s / GPU.token_s, abs=1)


def test_a_piece_where_tokens_are_dear_is_smaller_than_a_block() -> None:
    slow = Machine(fixed_s=0.01, row_s=0.0, chunk_s=0.0, token_s=0.003)
    assert set(run(StepTimeModel(), slow, 1, 100)[-40:]) == {0, 6, 3}
    slower = Machine(fixed_s=0.01, row_s=0.0, chunk_s=0.0, token_s=1.0)
    assert set(run(StepTimeModel(), slower, 1, 100)[-40:]) == {0, 1}


@pytest.mark.parametrize("chunk", [1, 5, 31])
def test_a_small_chunk_is_never_exceeded(chunk: int) -> None:
    assert set(run(StepTimeModel(), FLAT, 1, 40, chunk)) == {0, chunk, -(-chunk // 2)}


def test_prompts_that_cost_nothing_are_not_held_up() -> None:
    for free in (Machine(0.01, 0.0, 0.0, 0.0), Machine(0.0, 0.0, 0.0, 0.0)):
        assert set(run(StepTimeModel(), free, 3, 60)[-34:]) == {0, CHUNK, CHUNK // 2}


def test_two_plain_steps_come_before_the_first_prompt_and_one_after_every_sixteen() -> None:
    is_plain = [budget == 0 for budget in run(StepTimeModel(), GPU, 4, 2 + 3 * (REMEASURE_EVERY + 1))]
    round = [False] * REMEASURE_EVERY + [True]
    assert is_plain == [True, True] + 3 * round


@pytest.mark.parametrize(("low", "high"), [(7, 8), (4, 7)])
def test_rows_that_come_and_go_do_not_keep_prompts_waiting(low: int, high: int) -> None:
    pace = StepTimeModel()
    budgets = [run(pace, FLAT, low + step % (high - low + 1), 1)[0] for step in range(200)]
    assert budgets.count(0) <= 2 + 200 / REMEASURE_EVERY


def test_a_size_never_seen_is_approached_in_few_steps() -> None:
    pace = StepTimeModel()
    for _ in range(2):
        pace.observe(1, 0, 1.0)
    assert run(pace, Machine(1.0, 0.0, 0.0, 1e-9), 1, 5) == [32, 64, 256, 1024, 2048]


def test_steps_that_waited_for_a_compiler_are_got_over() -> None:
    pace = StepTimeModel()
    pace.observe(0, 300, 30.0)  # the first prompt
    pace.observe(1, 0, 20.0)  # the first plain step
    pace.observe(1, 0, FLAT.step_s(1, 0))
    budgets = run(pace, FLAT, 1, 80)
    assert budgets[0] == PREFILL_GRID
    assert max(budgets[-REMEASURE_EVERY:]) == int((2 * 0.021 - 0.004) / 0.0005)


def test_the_model_follows_a_machine_that_slows_down() -> None:
    pace = StepTimeModel()
    run(pace, FLAT, 4, 60)
    slower = Machine(fixed_s=0.048, row_s=0.0, chunk_s=0.016, token_s=0.002)
    assert max(run(pace, slower, 4, 200)[-REMEASURE_EVERY:]) == 40  # (2 * 0.048 - 0.016) / 0.002


@settings(max_examples=100, deadline=None)
@given(
    fixed_s=st.floats(1e-3, 0.1),
    piece=st.floats(0.0, 1.0),
    token_s=st.floats(1e-6, 1e-2),
    noise=st.lists(st.floats(1.0, 1.1), min_size=40, max_size=40),
    hiccups=st.sets(st.integers(0, 199), max_size=8),
    num_rows=st.integers(1, 32),
)
def test_on_a_noisy_machine_streams_keep_their_share(
    fixed_s: float, piece: float, token_s: float, noise: list[float], hiccups: set[int], num_rows: int
) -> None:
    machine = Machine(fixed_s, 0.0, piece * fixed_s, token_s)
    twin, pace = StepTimeModel(), StepTimeModel()
    # a hiccup beside another could be most of a median's measurements
    rare = {step for step in hiccups if not hiccups & set(range(step - 5 * (REMEASURE_EVERY + 1), step))}
    for step in range(200):
        budget = pace.prompt_budget(num_rows, CHUNK)
        assert budget == twin.prompt_budget(num_rows, CHUNK)
        if step > 20 and budget > PREFILL_GRID:
            # a tenth of noise in plain steps may all be taken for prompts' and the other way round
            assert machine.step_s(num_rows, budget) <= 1.5 * SLOWDOWN * machine.step_s(num_rows, 0)
        duration_s = machine.step_s(num_rows, budget) * (50 if step in rare else noise[step % 40])
        for each in (pace, twin):
            each.observe(num_rows, budget, duration_s)


@dataclass
class Steps:
    """Durations of the steps of a scheduler on a made-up machine, and how many plain ones come first."""

    seconds: list[float]
    quiet_s: float

    @property
    def gap_p95(self) -> float:
        return sorted(self.seconds)[int(len(self.seconds) * 0.95)] / self.quiet_s


def serve(machine: Machine, num_streams: int, prompts: dict[str, int], chunk: int) -> Steps:
    """Steps from when the prompts arrive, beside so many streams, until the last of them is computed."""
    scheduler = Scheduler(64, chunk, 100_000, memory=AMPLE)
    for number in range(num_streams):
        scheduler.add(request(f"stream {number}", 8, max_tokens=80_000), 0.0)
    seconds: list[float] = []
    started, left = 0, set(prompts)
    while left:
        if len(seconds) == 10:
            started = len(seconds)
            for name, length in prompts.items():
                scheduler.add(request(name, length, max_tokens=1), 0.0)
        plan = scheduler.schedule()
        seconds.append(machine.plan_s(plan))
        left -= set(scheduler.update(answer(plan), seconds[-1], 0.0).finished)
    return Steps(seconds[started:], machine.step_s(num_streams, 0))


@pytest.mark.parametrize("num_streams", [1, 4])
@pytest.mark.parametrize(
    "prompts", [{"long": 14_600}, {"long": 14_600, "second": 9_000, "third": 700, **{f"{n}": 40 for n in range(9)}}]
)
def test_gaps_stay_within_three_plain_steps_beside_prompts_whose_tokens_get_dearer(
    num_streams: int, prompts: dict[str, int]
) -> None:
    steps = serve(CPU, num_streams, prompts, 256)
    # twelve prompts beside one stream are a burst
    gaps = max(3 * steps.quiet_s, STREAM_GAP_S * len(prompts) / (2 * num_streams)) / steps.quiet_s
    assert steps.gap_p95 <= 1.05 * gaps
    assert max(steps.seconds) <= 2 * gaps * steps.quiet_s


def test_a_prompt_takes_what_its_share_of_the_time_gives() -> None:
    steps, alone = serve(CPU, 1, {"long": 14_600}, 256), serve(CPU, 0, {"long": 14_600}, 256)
    # of three plain steps' time one goes to the stream, and the price of a piece off the rest: by hand 3 / (2 - 5 / 9)
    share = SLOWDOWN / (SLOWDOWN - 1 - CPU.chunk_s / CPU.step_s(1, 0))
    assert sum(steps.seconds) <= 1.15 * share * sum(alone.seconds)


def test_on_a_gpu_a_prompt_is_a_few_large_pieces() -> None:
    steps, alone = serve(GPU, 7, {"long": 20_000}, 2048), serve(GPU, 0, {"long": 20_000}, 2048)
    assert len(steps.seconds) <= 30
    assert sum(steps.seconds) <= 2.2 * sum(alone.seconds)


@pytest.mark.parametrize("num_rows", [1, 8])
def test_beside_fast_streams_chunks_fill_a_gap_that_no_reader_sees(num_rows: int) -> None:
    # as compiled steps on a large GPU, where three plain steps have room for a third of what a gap has
    fast = Machine(fixed_s=0.003, row_s=0.0001, chunk_s=0.004, token_s=28e-6)
    budgets = run(StepTimeModel(), fast, num_rows, 60)[-REMEASURE_EVERY - 1 :]
    assert 3 * fast.step_s(num_rows, 0) < STREAM_GAP_S
    # by hand: of 25 ms the plain step and the fixed cost go off
    assert max(budgets) == pytest.approx((0.025 - fast.step_s(num_rows, 0) - 0.004) / 28e-6, abs=1)
    assert fast.step_s(num_rows, max(budgets)) <= STREAM_GAP_S * (1 + 1e-9)


def test_a_burst_of_prompts_may_take_longer_gaps_of_few_streams() -> None:
    model = StepTimeModel()
    for _ in range(3):
        model.observe(4, 0, 0.005)
    assert model.spare_s(4, num_prompts=8) == pytest.approx(STREAM_GAP_S - 0.005)
    assert model.spare_s(4, num_prompts=40) == pytest.approx(5 * STREAM_GAP_S - 0.005)
