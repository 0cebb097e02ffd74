"""Each rule of the scheduler on a hand-made case."""

from __future__ import annotations

import pytest

from headrace.errors import ConfigError, ContextTooLong, InvalidRequest
from headrace.scheduler.scheduler import RequestFailure, Scheduler, StepOutcome
from headrace.types.events import FinishReason, TokenOutput
from headrace.types.request import GenerationRequest, SamplingParams
from headrace.types.step import Chunk, ChunkFailure, ChunkResult, StepPlan, StepResult

GREEDY = SamplingParams(temperature=0, top_p=1, top_k=0, min_p=0, seed=0)


def request(name: str, prompt: int, max_tokens: int = 4, stop: frozenset[int] = frozenset()) -> GenerationRequest:
    """A request whose prompt is the numbers from 100 on."""
    return GenerationRequest(name, tuple(range(100, 100 + prompt)), GREEDY, max_tokens, stop)


def answer(plan: StepPlan, token_id: int = 7) -> StepResult:
    """All chunks computed, every sampled token the same."""
    return StepResult(
        tuple(
            ChunkResult(chunk.sequence_id, len(chunk.token_ids), (token_id,) if chunk.samples else ())
            for chunk in plan.chunks
        )
    )


def lengths(plan: StepPlan) -> dict[str, int]:
    """How many tokens the plan computes of each sequence."""
    return {chunk.sequence_id: len(chunk.token_ids) for chunk in plan.chunks}


def test_an_idle_scheduler_plans_nothing() -> None:
    scheduler = Scheduler(4, 64, 1000)
    assert scheduler.schedule() == StepPlan(())
    assert scheduler.schedule() == StepPlan(())


def test_a_request_goes_from_prompt_to_last_token() -> None:
    scheduler = Scheduler(4, 64, 1000)
    scheduler.add(request("a", 3, max_tokens=2))
    assert (scheduler.num_waiting, scheduler.num_running) == (1, 0)

    plan = scheduler.schedule()
    assert plan.chunks == (Chunk("a", 0, (100, 101, 102), samples=True, output_index=0),)
    assert (scheduler.num_waiting, scheduler.num_running) == (0, 1)
    assert scheduler.update(answer(plan, 7)) == StepOutcome((TokenOutput("a", (7,)),))

    plan = scheduler.schedule()
    assert plan.chunks == (Chunk("a", 3, (7,), samples=True, output_index=1),)
    assert scheduler.update(answer(plan, 8)) == StepOutcome((TokenOutput("a", (8,), FinishReason.LENGTH),))
    assert scheduler.num_running == 0
    assert scheduler.released() == ("a",)
    assert scheduler.released() == ()


def test_a_long_prompt_is_split_on_the_grid_and_samples_only_at_its_end() -> None:
    scheduler = Scheduler(4, 70, 1000)
    scheduler.add(request("a", 150))
    spans = []
    for _ in range(3):
        (chunk,) = scheduler.schedule().chunks
        spans.append((chunk.start, chunk.start + len(chunk.token_ids), chunk.samples))
        outcome = scheduler.update(answer(StepPlan((chunk,))))
    assert spans == [(0, 64, False), (64, 128, False), (128, 150, True)]
    assert outcome.outputs == (TokenOutput("a", (7,)),)


def test_a_budget_under_the_grid_still_makes_progress() -> None:
    scheduler = Scheduler(4, 5, 1000)
    scheduler.add(request("a", 12))
    starts = []
    for _ in range(3):
        plan = scheduler.schedule()
        starts.append(plan.chunks[0].start)
        scheduler.update(answer(plan))
    assert starts == [0, 5, 10]


def test_a_rest_of_the_budget_that_reaches_no_grid_line_is_left_and_made_up_for() -> None:
    scheduler = Scheduler(4, 40, 1000)
    scheduler.add(request("long", 100))
    scheduler.add(request("short", 20))
    plan = scheduler.schedule()
    assert lengths(plan) == {"short": 20}
    scheduler.update(answer(plan))
    scheduler.add(request("newcomer", 20))
    plan = scheduler.schedule()
    assert lengths(plan) == {"short": 1, "long": 32}
    scheduler.update(answer(plan))
    assert lengths(scheduler.schedule()) == {"short": 1, "newcomer": 20}


def test_prefill_shares_the_step_with_every_decode_row() -> None:
    scheduler = Scheduler(8, 64, 1000)
    for name in "abc":
        scheduler.add(request(name, 2, max_tokens=50))
    scheduler.update(answer(scheduler.schedule()))
    scheduler.add(request("long", 200))
    for _ in range(3):
        plan = scheduler.schedule()
        assert lengths(plan) == {"a": 1, "b": 1, "c": 1, "long": 64}
        scheduler.update(answer(plan))
    assert lengths(scheduler.schedule()) == {"a": 1, "b": 1, "c": 1, "long": 8}


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    scheduler = Scheduler(8, 512, 40_000)
    scheduler.add(request("long", 32_768))
    for _ in range(5):
        scheduler.update(answer(scheduler.schedule()))
    scheduler.add(request("short", 20))
    steps = 0
    outputs: tuple[TokenOutput, ...] = ()
    while not outputs:
        steps += 1
        outputs = scheduler.update(answer(scheduler.schedule())).outputs
    assert outputs == (TokenOutput("short", (7,)),)
    assert steps <= 2


def test_two_long_prompts_take_turns() -> None:
    scheduler = Scheduler(8, 64, 2000)
    scheduler.add(request("a", 640))
    scheduler.add(request("b", 640))
    turns = []
    for _ in range(8):
        plan = scheduler.schedule()
        turns += [chunk.sequence_id for chunk in plan.chunks]
        scheduler.update(answer(plan))
    assert turns.count("a") == turns.count("b") == 4


def test_newcomers_can_not_starve_a_long_prompt() -> None:
    max_num_seqs, chunk_tokens, num_chunks = 4, 64, 10
    scheduler = Scheduler(max_num_seqs, chunk_tokens, 1000)
    scheduler.add(request("long", chunk_tokens * num_chunks))
    bound = 2 * max_num_seqs * num_chunks
    for step in range(bound):
        # Each newcomer is as long as a step, so that it leaves the long one nothing in its own step.
        scheduler.add(request(f"new {step}", chunk_tokens, max_tokens=1))
        outputs = scheduler.update(answer(scheduler.schedule())).outputs
        if any(output.request_id == "long" for output in outputs):
            return
    pytest.fail(f"the long prompt was not finished in {bound} steps")


def test_no_more_run_than_allowed_and_the_queue_keeps_its_order() -> None:
    scheduler = Scheduler(2, 64, 1000)
    for name in "abcd":
        scheduler.add(request(name, 2, max_tokens=1))
    plan = scheduler.schedule()
    assert lengths(plan) == {"a": 2, "b": 2}
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 2)
    scheduler.update(answer(plan))
    assert lengths(scheduler.schedule()) == {"c": 2, "d": 2}


@pytest.mark.parametrize("max_tokens", [2, 9])
def test_a_stop_token_ends_the_output_and_is_not_part_of_it(max_tokens: int) -> None:
    scheduler = Scheduler(2, 64, 1000)
    scheduler.add(request("a", 2, max_tokens=max_tokens, stop=frozenset({5, 6})))
    scheduler.update(answer(scheduler.schedule(), 7))
    outcome = scheduler.update(answer(scheduler.schedule(), 6))
    assert outcome.outputs == (TokenOutput("a", (), FinishReason.STOP),)
    assert scheduler.num_running == 0


def test_a_stop_token_in_the_prompt_means_nothing() -> None:
    scheduler = Scheduler(2, 64, 1000)
    scheduler.add(request("a", 2, stop=frozenset({100, 101})))
    assert scheduler.update(answer(scheduler.schedule())).outputs == (TokenOutput("a", (7,)),)


@pytest.mark.parametrize(
    ("gained", "emitted", "reason"),
    [
        ((1, 2, 3), (1, 2, 3), None),
        ((1, 9, 3), (1,), FinishReason.STOP),
        ((9, 2, 3), (), FinishReason.STOP),
        ((1, 2, 3, 4, 5), (1, 2, 3, 4), FinishReason.LENGTH),
        ((1, 2, 3, 4, 9), (1, 2, 3, 4), FinishReason.LENGTH),
        ((1, 2, 3, 9, 5), (1, 2, 3), FinishReason.STOP),
    ],
)
def test_drafts_beyond_the_end_are_dropped(
    gained: tuple[int, ...], emitted: tuple[int, ...], reason: FinishReason | None
) -> None:
    scheduler = Scheduler(2, 64, 1000)
    scheduler.add(request("a", 2, max_tokens=5, stop=frozenset({9})))
    scheduler.update(answer(scheduler.schedule()))
    scheduler.schedule()
    outcome = scheduler.update(StepResult((ChunkResult("a", len(gained), gained),)))
    assert outcome.outputs == (TokenOutput("a", emitted, reason),)
    if reason is None:
        assert scheduler.schedule().chunks == (Chunk("a", 5, (3,), output_index=4),)


def test_a_waiting_request_can_be_aborted_and_leaves_no_rows_behind() -> None:
    scheduler = Scheduler(1, 64, 1000)
    scheduler.add(request("a", 2))
    scheduler.add(request("b", 2))
    scheduler.update(answer(scheduler.schedule()))
    assert scheduler.abort("b")
    assert (scheduler.num_waiting, scheduler.released()) == (0, ())


def test_a_running_request_can_be_aborted_between_steps() -> None:
    scheduler = Scheduler(1, 64, 1000)
    scheduler.add(request("a", 2))
    scheduler.update(answer(scheduler.schedule()))
    assert scheduler.abort("a")
    assert (scheduler.num_running, scheduler.released()) == (0, ("a",))
    assert scheduler.schedule() == StepPlan(())


@pytest.mark.parametrize("fails", [False, True])
def test_an_abort_in_flight_takes_effect_when_the_result_arrives(fails: bool) -> None:
    scheduler = Scheduler(2, 64, 1000)
    scheduler.add(request("a", 2))
    plan = scheduler.schedule()
    assert scheduler.abort("a")
    assert not scheduler.abort("a")
    assert (scheduler.num_running, scheduler.released()) == (1, ())
    with pytest.raises(InvalidRequest, match="already in use"):
        scheduler.add(request("a", 2))
    result = StepResult((), (ChunkFailure("a", ValueError("late")),)) if fails else answer(plan)
    assert scheduler.update(result) == StepOutcome()
    assert (scheduler.num_running, scheduler.released()) == (0, ("a",))
    scheduler.add(request("a", 2))


def test_only_requests_that_are_being_worked_on_can_be_aborted() -> None:
    scheduler = Scheduler(1, 64, 1000)
    assert not scheduler.abort("nobody")
    scheduler.add(request("a", 2, max_tokens=1))
    scheduler.update(answer(scheduler.schedule()))
    assert not scheduler.abort("a")


def test_a_failing_row_fails_alone() -> None:
    scheduler = Scheduler(4, 64, 1000)
    scheduler.add(request("good", 2))
    scheduler.add(request("bad", 2))
    scheduler.schedule()
    error = ValueError("its own work")
    outcome = scheduler.update(StepResult((ChunkResult("good", 2, (7,)),), (ChunkFailure("bad", error),)))
    assert outcome == StepOutcome((TokenOutput("good", (7,)),), (RequestFailure("bad", error),))
    assert scheduler.released() == ("bad",)
    assert lengths(scheduler.schedule()) == {"good": 1}


def test_what_can_not_fit_the_context_is_refused_with_the_numbers() -> None:
    scheduler = Scheduler(1, 64, max_model_len=10)
    scheduler.add(request("fits", 6, max_tokens=4))
    with pytest.raises(ContextTooLong, match=r"7 prompt tokens and 4 output tokens make 11.* 10$"):
        scheduler.add(request("too long", 7, max_tokens=4))
    assert scheduler.num_waiting == 1


@pytest.mark.parametrize(
    ("bad", "param"),
    [(request("a", 1), "request_id"), (request("b", 0), "prompt"), (request("b", 1, max_tokens=0), "max_tokens")],
)
def test_an_impossible_request_is_refused_by_name(bad: GenerationRequest, param: str) -> None:
    scheduler = Scheduler(1, 64, 10)
    scheduler.add(request("a", 1))
    with pytest.raises(InvalidRequest) as caught:
        scheduler.add(bad)
    assert caught.value.param == param
    assert scheduler.num_waiting == 1


@pytest.mark.parametrize(
    ("counts", "name"), [((0, 1, 1), "max_num_seqs"), ((1, 0, 1), "prefill_chunk"), ((1, 1, -1), "max_model_len")]
)
def test_a_scheduler_without_room_is_refused_by_name(counts: tuple[int, int, int], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        Scheduler(*counts)


def test_a_step_can_not_be_planned_before_the_last_ones_result() -> None:
    scheduler = Scheduler(1, 64, 10)
    scheduler.add(request("a", 1))
    scheduler.schedule()
    with pytest.raises(RuntimeError, match="update"):
        scheduler.schedule()


@pytest.mark.parametrize(
    "result",
    [
        StepResult(()),
        StepResult((ChunkResult("b", 2, (7,)),)),
        StepResult((ChunkResult("a", 2, (7,)), ChunkResult("a", 2, (7,)))),
        StepResult((ChunkResult("a", 2, (7,)),), (ChunkFailure("a", ValueError()),)),
        StepResult((ChunkResult("a", 1, (7,)),)),
        StepResult((ChunkResult("a", 2),)),
        StepResult((ChunkResult("a", 2, (7, 8)),)),
    ],
)
def test_a_result_that_does_not_fit_the_plan_is_refused_whole(result: StepResult) -> None:
    scheduler = Scheduler(1, 64, 10)
    scheduler.add(request("a", 2))
    plan = scheduler.schedule()
    with pytest.raises(ValueError, match="a"):
        scheduler.update(result)
    assert scheduler.update(answer(plan)).outputs == (TokenOutput("a", (7,)),)


def test_a_chunk_inside_a_prompt_may_not_gain_tokens() -> None:
    scheduler = Scheduler(1, 32, 100)
    scheduler.add(request("a", 40))
    scheduler.schedule()
    with pytest.raises(ValueError, match="does not sample"):
        scheduler.update(StepResult((ChunkResult("a", 32, (7,)),)))
