"""Prompts beside running streams get what the streams can bear, as measured."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.scheduler.pace import REMEASURE_EVERY, SLOWDOWN, Pace
from headrace.scheduler.prefill import PREFILL_GRID

CHUNK = 2048


@dataclass(frozen=True)
class Machine:
    """What steps take on a made-up machine: a fixed part, one per row and one per prompt token."""

    fixed_s: float
    row_s: float
    token_s: float

    def step_s(self, num_rows: int, num_prompt_tokens: int) -> float:
        return self.fixed_s + self.row_s * num_rows + self.token_s * num_prompt_tokens


GPU = Machine(fixed_s=0.006, row_s=0.0002, token_s=20e-6)
CPU = Machine(fixed_s=0.02, row_s=0.1, token_s=0.005)


def run(pace: Pace, machine: Machine, num_rows: int, num_steps: int, chunk: int = CHUNK) -> list[int]:
    """Budgets of steps in which there is always more prompt to compute."""
    budgets = []
    for _ in range(num_steps):
        budgets.append(pace.prompt_budget(num_rows, chunk))
        pace.observe(num_rows, budgets[-1], machine.step_s(num_rows, budgets[-1]))
    return budgets


@pytest.mark.parametrize("chunk", [1, 5, 32, 100, 2048])
def test_without_streams_a_step_takes_the_full_chunk(chunk: int) -> None:
    pace = Pace()
    assert pace.prompt_budget(0, chunk) == chunk
    run(pace, CPU, 4, 40)
    assert pace.prompt_budget(0, chunk) == chunk


@pytest.mark.parametrize("num_rows", [1, 8, 32])
def test_streams_keep_their_share_of_speed(num_rows: int) -> None:
    pace = Pace()
    run(pace, GPU, 0, 3)
    budgets = run(pace, GPU, num_rows, 60)[-REMEASURE_EVERY:]
    plain_s = GPU.step_s(num_rows, 0)
    # by hand: what a mixed step may take more than a plain one, in tokens, down to a multiple of the grid
    expected = int((SLOWDOWN - 1) * plain_s / GPU.token_s) // PREFILL_GRID * PREFILL_GRID
    assert expected > PREFILL_GRID
    assert set(budgets) == {0, expected}
    assert GPU.step_s(num_rows, expected) <= SLOWDOWN * plain_s


def test_a_block_of_the_grid_is_computed_however_slow_the_machine() -> None:
    pace = Pace()
    run(pace, CPU, 0, 3)
    slow = Machine(fixed_s=0.01, row_s=0.0, token_s=1.0)
    assert set(run(pace, slow, 1, 100)[3:]) == {0, PREFILL_GRID}


@pytest.mark.parametrize("chunk", [1, 5, 31])
def test_a_chunk_under_the_grid_is_never_exceeded(chunk: int) -> None:
    assert set(run(Pace(), CPU, 1, 40, chunk)) == {0, chunk}


def test_prompts_that_cost_nothing_are_not_held_up() -> None:
    free = Machine(fixed_s=0.01, row_s=0.0, token_s=0.0)
    assert set(run(Pace(), free, 3, 40)) == {0, CHUNK}
    nothing = Machine(0.0, 0.0, 0.0)
    assert set(run(Pace(), nothing, 3, 40)) == {0, CHUNK}


def test_a_few_prompt_tokens_say_nothing_about_long_prompts() -> None:
    pace = Pace()
    for _ in range(9):
        pace.observe(0, PREFILL_GRID - 1, GPU.step_s(0, PREFILL_GRID - 1))
    assert pace.prompt_token_s == 0
    pace.observe(0, 1000, 5.0)
    assert pace.prompt_token_s == 0.005


def test_two_plain_steps_come_before_the_first_prompt_and_one_after_every_sixteen() -> None:
    is_plain = [budget == 0 for budget in run(Pace(), GPU, 4, 2 + 3 * (REMEASURE_EVERY + 1))]
    round = [False] * REMEASURE_EVERY + [True]
    assert is_plain == [True, True] + 3 * round


@pytest.mark.parametrize(("low", "high", "num_kinds"), [(7, 8, 2), (4, 7, 1)])
def test_rows_that_come_and_go_do_not_keep_prompts_waiting(low: int, high: int, num_kinds: int) -> None:
    pace = Pace()
    budgets = [run(pace, GPU, low + step % (high - low + 1), 1)[0] for step in range(200)]
    assert budgets.count(0) <= 2 * num_kinds + 200 / REMEASURE_EVERY


def test_steps_that_waited_for_a_compiler_are_got_over() -> None:
    pace = Pace()
    pace.observe(0, 300, 30.0)  # the first prompt
    pace.observe(1, 0, 20.0)  # the first plain step
    pace.observe(1, 0, GPU.step_s(1, 0))
    budgets = run(pace, GPU, 1, 40)
    assert budgets[0] == PREFILL_GRID  # the first measurement of a prompt is all there is
    expected = int((SLOWDOWN - 1) * GPU.step_s(1, 0) / GPU.token_s) // PREFILL_GRID * PREFILL_GRID
    assert set(budgets[6:]) == {0, expected}


def test_the_model_follows_a_machine_that_slows_down() -> None:
    pace = Pace()
    run(pace, GPU, 4, 60)
    slower = Machine(fixed_s=0.012, row_s=0.0, token_s=100e-6)
    budgets = run(pace, slower, 4, 100)[-REMEASURE_EVERY:]
    assert set(budgets) == {0, 352}  # 3 * 0.012 / 100e-6 = 360, down to the grid


@settings(max_examples=100)
@given(
    fixed_s=st.floats(1e-3, 0.1),
    token_s=st.floats(1e-6, 1e-2),
    noise=st.lists(st.floats(1.0, 1.2), min_size=40, max_size=40),
    hiccups=st.sets(st.integers(0, 199), max_size=20),
    num_rows=st.integers(1, 32),
)
def test_on_a_noisy_machine_streams_keep_nearly_half_of_their_speed(
    fixed_s: float, token_s: float, noise: list[float], hiccups: set[int], num_rows: int
) -> None:
    machine = Machine(fixed_s, 0.0, token_s)
    twin, pace = Pace(), Pace()
    # a hiccup beside another could be most of what a median looks at
    rare = {step for step in hiccups if not hiccups & set(range(step - 5 * (REMEASURE_EVERY + 1), step))}
    for step in range(200):
        budget = pace.prompt_budget(num_rows, CHUNK)
        assert budget == twin.prompt_budget(num_rows, CHUNK)
        assert budget in (0, CHUNK) or budget % PREFILL_GRID == 0
        if step > 20 and budget > PREFILL_GRID:
            # 20 % of noise may lie in the plain steps (all of it spent on prompts) and in what a prompt token takes
            assert machine.step_s(num_rows, budget) <= 1.2 * 1.25 * SLOWDOWN * machine.step_s(num_rows, 0)
        duration_s = machine.step_s(num_rows, budget) * (50 if step in rare else noise[step % 40])
        for each in (pace, twin):
            each.observe(num_rows, budget, duration_s)
