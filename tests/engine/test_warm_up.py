"""Warm-up: an ordinary load finds all that its steps are built of."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import pytest
from models import tiny_fused

from headrace.backend import blas
from headrace.engine.outcomes import Outcome
from headrace.engine.runner import Runner
from headrace.engine.warm_up import warm_up
from headrace.engine.windows import Window
from headrace.errors import EngineDead
from headrace.models.install import choose_levels
from headrace.models.packed import PackedModel
from headrace.scheduler.reservations import MemoryBudget
from headrace.scheduler.scheduler import Scheduler
from headrace.state.slabs import StatePool
from headrace.types.request import GenerationRequest, SamplingParams

VOCAB = 97
AMPLE = MemoryBudget(2**62, lambda num_tokens: 1)
GREEDY = SamplingParams(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=0)


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> Iterator[PackedModel]:
    blas.install("fast")
    model = tiny_fused.build(tiny_fused.widen("qwen3_5", monkeypatch))
    yield PackedModel(model, choose_levels(model), tiny_fused.KERNELS)
    blas.uninstall()


def answer(packed: PackedModel, states: StatePool, num_requests: int) -> None:
    scheduler, runner = Scheduler(num_requests, 256, 64, memory=AMPLE), Runner(packed, VOCAB, pool=states, ahead=True)
    for number in range(num_requests):
        prompt = tuple((5 * number + 3 * place) % VOCAB for place in range(20))
        scheduler.add(GenerationRequest(str(number), prompt, GREEDY, 12), 0.0)
    while scheduler.num_running + scheduler.num_waiting:
        result = runner.execute(scheduler.schedule(), scheduler.planned_requests())
        assert not result.failures
        scheduler.update(result, 0.001, 0.0)
        runner.free(scheduler.released())
        scheduler.forget_ended()


@pytest.mark.parametrize("num_requests", [1, 3, 5, 6])
def test_requests_after_it_meet_no_step_that_has_to_be_built(packed: PackedModel, num_requests: int) -> None:
    assert packed.is_compiled
    states = StatePool(4096, 6)
    line = warm_up(packed, VOCAB, states, AMPLE, 6, 256)
    assert line.startswith("warm-up: steps of up to 6 rows in ")
    num_built = packed.num_new_forms
    assert num_built > 0
    answer(packed, states, num_requests)
    assert packed.num_new_forms == num_built


def test_a_failure_of_it_is_logged_and_stops_nothing(
    packed: PackedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("no device")

    monkeypatch.setattr("headrace.engine.warm_up.Scheduler", fail)
    with caplog.at_level(logging.ERROR):
        line = warm_up(packed, VOCAB, StatePool(), AMPLE, 2, 256)
    assert "steps of 1 rows could not be warmed up" in caplog.text
    assert line.startswith("warm-up: steps of up to 0 rows in ")


def test_the_report_claims_no_size_whose_steps_fail(
    packed: PackedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compute = Runner._compute

    def fail_from_three_rows(self: Runner, windows: Sequence[Window]) -> list[Outcome]:
        if len(windows) >= 3:
            raise RuntimeError("no such kernel")
        return compute(self, windows)

    monkeypatch.setattr(Runner, "_compute", fail_from_three_rows)
    with caplog.at_level(logging.ERROR):
        line = warm_up(packed, VOCAB, StatePool(), AMPLE, 6, 256)
    assert line.startswith("warm-up: steps of up to 2 rows in ")
    assert "steps of 3 rows could not be warmed up" in caplog.text
    assert "steps of 4 rows" not in caplog.text


def test_a_lost_device_ends_the_start(packed: PackedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """As CUDA does after an illegal access."""

    def fail(*arrays: object) -> None:
        raise RuntimeError("CUDA error: misaligned address")

    monkeypatch.setattr("mlx.core.eval", fail)
    monkeypatch.setattr("mlx.core.async_eval", fail)
    with pytest.raises(EngineDead, match="the device fails at every call since a step failed$"):
        warm_up(packed, VOCAB, StatePool(), AMPLE, 2, 256)
