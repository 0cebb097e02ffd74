"""Prompts of which only some tokens are computed: counts are of these, and what clients are told is of all."""

from __future__ import annotations

from dataclasses import replace

import pytest
from scheduler.made_up import AMPLE, FakeRunner, answer, request, solo

from headrace.errors import Overloaded
from headrace.scheduler.admission import MemoryBudget
from headrace.scheduler.scheduler import Scheduler
from headrace.scheduler.stages import PromptPlan
from headrace.scheduler.step_time_model import SLOWDOWN, StepTimeModel
from headrace.types.events import SparseUsage, TokenOutput
from headrace.types.request import GenerationRequest, SelectedTokens
from headrace.types.status import WaitReason

USAGE = SparseUsage(4, 90)
KEPT = (10, 11, 70, 99)


class KeepsSome:
    """Of every long prompt, 6 tokens are cached and those at KEPT are computed. waiting: requests, and for what."""

    def __init__(self, **waiting: WaitReason) -> None:
        self.waiting = waiting

    def prepare(self, request: GenerationRequest, plan: PromptPlan) -> PromptPlan | WaitReason:
        if request.request_id in self.waiting:
            return self.waiting[request.request_id]
        return PromptPlan(6, "", KEPT, USAGE) if len(request.prompt) == 100 else plan

    def still_waits(self, request_id: str) -> bool:
        return request_id in self.waiting

    def end(self, request_id: str) -> None:
        """Nothing is held."""


def scheduler(memory: MemoryBudget = AMPLE, max_queue: int | None = None) -> Scheduler:
    return Scheduler(4, 64, 1000, memory=memory, max_queue=max_queue, stages=[KeepsSome()])


def test_only_the_kept_tokens_are_computed_behind_the_cached_ones() -> None:
    asked = request("a", 100)
    planner = scheduler()
    planner.add(asked, 0.0)
    (chunk,) = planner.schedule().chunks
    assert (chunk.start, chunk.token_ids, chunk.samples) == (6, tuple(asked.prompt[each] for each in KEPT), True)
    positions = (*range(6), *KEPT)
    known = planner.planned_requests()["a"]
    assert known.prompt == tuple(asked.prompt[each] for each in positions)
    assert known.selected == SelectedTokens(asked.prompt, positions)
    assert known.full_prompt == asked.prompt
    assert replace(known, prompt=asked.prompt, selected=None) == asked


def test_the_answer_goes_on_from_the_kept_tokens_and_its_first_output_tells_what_was_kept() -> None:
    planner, asked = scheduler(), request("a", 100, n=2)
    planner.add(asked, 0.0)
    first = planner.update(answer(planner.schedule()), 0.0, 0.0).outputs
    assert [(output.choice, output.sparse, output.num_cached_tokens) for output in first] == [
        (0, USAGE, 6),
        (1, None, 6),
    ]
    plan = planner.schedule()
    assert [(chunk.start, chunk.output_index) for chunk in plan.chunks] == [(10, 1), (10, 1)]
    assert all(output.sparse is None for output in planner.update(answer(plan), 0.0, 0.0).outputs)


def test_what_is_said_is_what_the_kept_tokens_alone_would_give() -> None:
    planner, asked = scheduler(), request("a", 100, max_tokens=12)
    planner.add(asked, 0.0)
    kept = tuple(asked.prompt[each] for each in (*range(6), *KEPT))
    runner = FakeRunner(computed={"a": list(asked.prompt[:6])}, requests={"a": replace(asked, prompt=kept)})
    outputs: list[TokenOutput] = []
    while planner.num_running + planner.num_waiting:
        outputs += planner.update(runner.execute(planner.schedule()), 0.0, 0.0).outputs
    said = [token_id for output in outputs for token_id in output.token_ids]
    assert (said, outputs[-1].finish_reason) == solo(replace(asked, prompt=kept))


def test_a_thinned_prompt_is_promised_no_more_bytes_than_its_kept_tokens_take() -> None:
    planner = scheduler()
    planner.add(request("a", 100, max_tokens=4, n=2), 0.0)
    planner.schedule()
    assert planner.reserved_bytes == 2 * (10 + 4)


def test_its_status_tells_the_whole_prompts_length_and_what_was_kept() -> None:
    planner = scheduler()
    planner.add(request("a", 100), 0.0)
    planner.update(answer(planner.schedule()), 0.0, 1.0)
    (status,) = planner.status(1.0)
    assert (status.num_prompt_tokens, status.num_computed_tokens, status.num_cached_tokens) == (100, 10, 6)
    assert status.sparse == USAGE


def test_what_waits_for_its_own_scores_takes_no_place_in_the_queue() -> None:
    stage = KeepsSome(a=WaitReason.SCORES, b=WaitReason.MEDIA, c=WaitReason.PREFIX)
    planner = Scheduler(4, 64, 1000, memory=AMPLE, max_queue=0, stages=[stage])
    planner.add(request("a", 100), 0.0)
    planner.add(request("b", 100), 0.0)
    assert planner.num_waiting == 2
    with pytest.raises(Overloaded):
        planner.add(request("c", 100), 0.0)


def measured(plain_s: float, prompt_token_s: float) -> StepTimeModel:
    """Knows what steps take."""
    pace = StepTimeModel()
    for _ in range(2):
        pace.observe(1, 0, plain_s)
    for _ in range(3):
        pace.observe(1, 64, plain_s + 64 * prompt_token_s)
    return pace


def test_prompts_take_the_time_that_they_are_given() -> None:
    pace = measured(1.0, 0.01)
    assert pace.budget_within(0.0, 2048) == 0
    assert pace.budget_within(0.01, 2048) == 32  # what a piece costs at least is not known yet
    assert pace.budget_within(0.505, 2048) == 50
    assert pace.budget_within(100.0, 2048) == 256  # four times the largest so far
    assert pace.spare_s(1) == pytest.approx((SLOWDOWN - 1) * 1.0)


def test_a_first_prompt_beside_others_streams_is_one_block_until_its_cost_is_known() -> None:
    assert StepTimeModel().budget_within(100.0, 2048) == 32
    assert StepTimeModel().budget_within(100.0, 8) == 8


def test_a_step_may_be_told_to_leave_prompts_out() -> None:
    planner = scheduler()
    planner.add(request("stream", 5, max_tokens=9), 0.0)
    assert planner.spare_s is None
    planner.update(answer(planner.schedule()), 0.0, 0.0)
    planner.add(request("prompt", 40), 0.0)
    plan = planner.schedule(0.0)
    assert [chunk.request_id for chunk in plan.chunks] == ["stream"]
    assert plan.num_prompt_tokens == 0
    planner.update(answer(plan), 1.0, 1.0)
    planner.update(answer(planner.schedule(0.0)), 1.0, 2.0)
    assert planner.spare_s == pytest.approx((SLOWDOWN - 1) * 1.0)
    assert planner.schedule(5.0).num_prompt_tokens == 32


def test_progress_is_in_tokens_of_the_full_prompt() -> None:
    planner = Scheduler(4, 2, 1000, memory=AMPLE, stages=[KeepsSome()])
    planner.add(replace(request("a", 100), reports_progress=True), 0.0)
    told = []
    for _ in range(2):
        told.append(planner.update(answer(planner.schedule()), 0.0, 0.0).outputs[0])
    # Two kept tokens a step: up to positions 11 and 99.
    assert [(each.num_cached_tokens, each.num_processed) for each in told] == [(6, 12), (6, 100)]
