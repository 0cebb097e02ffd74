"""Each rule of the scheduler on a hand-made case."""

from __future__ import annotations

from dataclasses import replace

import pytest
from scheduler.made_up import AMPLE, answer, lengths, request

from headrace.errors import ConfigError, InvalidRequest
from headrace.scheduler.scheduler import Scheduler, StepOutcome
from headrace.types.events import FinishReason, OutputTimes, TokenOutput
from headrace.types.step import Chunk, ChunkFailure, ChunkResult, StepPlan, StepResult


def scheduler_of(max_num_seqs: int, chunk_tokens: int, max_model_len: int) -> Scheduler:
    """One for which memory is no limit."""
    return Scheduler(max_num_seqs, chunk_tokens, max_model_len, memory=AMPLE)


def take(scheduler: Scheduler, result: StepResult) -> StepOutcome:
    """The outcome of a result that took no time, so that steps have their full budget."""
    return scheduler.update(result, 0.0, 0.0)


def measure_plain_steps(scheduler: Scheduler) -> None:
    """Two decode-only steps, which come before the first prompt beside as many rows."""
    for _ in range(2):
        plan = scheduler.schedule()
        assert set(lengths(plan).values()) == {1}
        take(scheduler, answer(plan))


def test_an_idle_scheduler_plans_nothing() -> None:
    scheduler = scheduler_of(4, 64, 1000)
    assert scheduler.schedule() == StepPlan(())
    assert scheduler.schedule() == StepPlan(())


def test_a_request_goes_from_prompt_to_last_token() -> None:
    scheduler = scheduler_of(4, 64, 1000)
    scheduler.add(request("a", 3, max_tokens=2), 0.0)
    assert (scheduler.num_waiting, scheduler.num_running) == (1, 0)

    plan = scheduler.schedule()
    assert plan.chunks == (Chunk("a", "a", 0, (100, 101, 102), samples=True, output_index=0),)
    assert (scheduler.num_waiting, scheduler.num_running) == (0, 1)
    assert take(scheduler, answer(plan, 7)) == StepOutcome((TokenOutput("a", (7,)),))

    plan = scheduler.schedule()
    assert plan.chunks == (Chunk("a", "a", 3, (7,), samples=True, output_index=1),)
    assert take(scheduler, answer(plan, 8)) == StepOutcome(
        outputs=(TokenOutput("a", (8,), FinishReason.LENGTH),), finished=("a",)
    )
    assert scheduler.num_running == 0
    assert scheduler.take_released() == ("a",)
    assert scheduler.take_released() == ()


def test_a_long_prompt_is_split_on_the_grid_and_samples_only_at_its_end() -> None:
    scheduler = scheduler_of(4, 70, 1000)
    scheduler.add(request("a", 150), 0.0)
    spans = []
    for _ in range(3):
        (chunk,) = scheduler.schedule().chunks
        spans.append((chunk.start, chunk.start + len(chunk.token_ids), chunk.samples))
        outcome = take(scheduler, answer(StepPlan((chunk,))))
    assert spans == [(0, 64, False), (64, 128, False), (128, 150, True)]
    assert outcome.outputs == (TokenOutput("a", (7,)),)


def test_a_request_that_asks_is_told_after_each_step_how_far_its_prompt_is() -> None:
    scheduler = scheduler_of(4, 70, 1000)
    scheduler.add(replace(request("a", 150, n=2), reports_progress=True), 5.0)
    outputs = []
    for now in (12.0, 14.0, 16.0, 18.0):
        outputs.append(scheduler.update(answer(scheduler.schedule()), 2.0, now).outputs)
    first, second, third, decoded = outputs
    assert [(each.num_processed, each.token_ids) for each in (*first, *second)] == [(64, ()), (128, ())]
    assert [(each.num_processed, each.choice, each.token_ids) for each in third] == [
        (150, 0, ()),
        (None, 0, (7,)),
        (None, 1, (7,)),
    ]
    assert [each.num_processed for each in decoded] == [None, None]
    # All know when the first step began, which is later than the request's arrival, and the first output came.
    times = [each.times for each in (*first, *third, *decoded)]
    assert times == [
        OutputTimes(10.0, 12.0, 12.0),
        *[OutputTimes(10.0, 16.0, 16.0)] * 3,
        *[OutputTimes(10.0, 16.0, 18.0)] * 2,
    ]


def test_progress_is_not_reported_unasked() -> None:
    scheduler = scheduler_of(4, 70, 1000)
    scheduler.add(request("a", 150), 0.0)
    assert take(scheduler, answer(scheduler.schedule())).outputs == ()


def test_a_budget_under_the_grid_still_makes_progress() -> None:
    scheduler = scheduler_of(4, 5, 1000)
    scheduler.add(request("a", 12), 0.0)
    starts = []
    for _ in range(3):
        plan = scheduler.schedule()
        starts.append(plan.chunks[0].start)
        take(scheduler, answer(plan))
    assert starts == [0, 5, 10]


def test_a_rest_of_the_budget_that_reaches_no_grid_line_is_left_and_made_up_for() -> None:
    scheduler = scheduler_of(4, 264, 1000)
    scheduler.add(request("long", 600), 0.0)
    scheduler.add(request("short", 240, max_tokens=20), 0.0)
    plan = scheduler.schedule()
    assert lengths(plan) == {"short": 240}
    take(scheduler, answer(plan))
    measure_plain_steps(scheduler)
    scheduler.add(request("newcomer", 20), 0.0)
    plan = scheduler.schedule()
    assert lengths(plan) == {"short": 1, "long": 256}
    take(scheduler, answer(plan))
    # half of the budget, to learn what a piece costs apart from its tokens
    assert lengths(scheduler.schedule()) == {"short": 1, "newcomer": 20, "long": 96}


def test_prefill_shares_the_step_with_every_decode_row() -> None:
    scheduler = scheduler_of(8, 64, 1000)
    for name in "abc":
        scheduler.add(request(name, 2, max_tokens=50), 0.0)
    take(scheduler, answer(scheduler.schedule()))
    measure_plain_steps(scheduler)
    scheduler.add(request("long", 200), 0.0)
    for num_tokens in (32, 32, 64, 64):
        plan = scheduler.schedule()
        assert lengths(plan) == {"a": 1, "b": 1, "c": 1, "long": num_tokens}
        take(scheduler, answer(plan))
    assert lengths(scheduler.schedule()) == {"a": 1, "b": 1, "c": 1, "long": 8}


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    scheduler = scheduler_of(8, 512, 40_000)
    scheduler.add(request("long", 32_768), 0.0)
    for _ in range(5):
        take(scheduler, answer(scheduler.schedule()))
    scheduler.add(request("short", 20), 0.0)
    steps = 0
    outputs: tuple[TokenOutput, ...] = ()
    while not outputs:
        steps += 1
        outputs = take(scheduler, answer(scheduler.schedule())).outputs
    assert outputs == (TokenOutput("short", (7,)),)
    assert steps <= 2


def test_two_long_prompts_take_turns() -> None:
    scheduler = scheduler_of(8, 64, 2000)
    scheduler.add(request("a", 640), 0.0)
    scheduler.add(request("b", 640), 0.0)
    turns = []
    for _ in range(8):
        plan = scheduler.schedule()
        turns += [chunk.sequence_id for chunk in plan.chunks]
        take(scheduler, answer(plan))
    assert turns.count("a") == turns.count("b") == 4


def test_newcomers_can_not_starve_a_long_prompt() -> None:
    max_num_seqs, chunk_tokens, num_chunks = 4, 64, 10
    scheduler = scheduler_of(max_num_seqs, chunk_tokens, 1000)
    scheduler.add(request("long", chunk_tokens * num_chunks), 0.0)
    bound = 2 * max_num_seqs * num_chunks
    for step in range(bound):
        # Each newcomer is as long as a step, so that it leaves the long one nothing in its own step.
        scheduler.add(request(f"new {step}", chunk_tokens, max_tokens=1), 0.0)
        outputs = take(scheduler, answer(scheduler.schedule())).outputs
        if any(output.request_id == "long" for output in outputs):
            return
    pytest.fail(f"the long prompt was not finished in {bound} steps")


def test_no_more_run_than_allowed_and_the_queue_keeps_its_order() -> None:
    scheduler = scheduler_of(2, 64, 1000)
    for name in "abcd":
        scheduler.add(request(name, 2, max_tokens=1), 0.0)
    plan = scheduler.schedule()
    assert lengths(plan) == {"a": 2, "b": 2}
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 2)
    take(scheduler, answer(plan))
    assert lengths(scheduler.schedule()) == {"c": 2, "d": 2}


@pytest.mark.parametrize("max_tokens", [2, 9])
def test_a_stop_token_ends_the_output_and_is_not_part_of_it(max_tokens: int) -> None:
    scheduler = scheduler_of(2, 64, 1000)
    scheduler.add(request("a", 2, max_tokens=max_tokens, stop=frozenset({5, 6})), 0.0)
    take(scheduler, answer(scheduler.schedule(), 7))
    outcome = take(scheduler, answer(scheduler.schedule(), 6))
    assert outcome.outputs == (TokenOutput("a", (), FinishReason.STOP, stop_token_id=6),)
    assert scheduler.num_running == 0


def test_a_stop_token_in_the_prompt_means_nothing() -> None:
    scheduler = scheduler_of(2, 64, 1000)
    scheduler.add(request("a", 2, stop=frozenset({100, 101})), 0.0)
    assert take(scheduler, answer(scheduler.schedule())).outputs == (TokenOutput("a", (7,)),)


@pytest.mark.parametrize(
    ("gained", "emitted", "reason"),
    [
        ((1, 2, 3), (1, 2, 3), None),
        ((1, 9, 3), (1,), FinishReason.STOP),
        ((9, 2, 3), (), FinishReason.STOP),
        ((1, 2, 3, 4), (1, 2, 3, 4), FinishReason.LENGTH),
        ((1, 2, 3, 9), (1, 2, 3), FinishReason.STOP),
    ],
)
def test_drafts_beyond_the_end_are_dropped(
    gained: tuple[int, ...], emitted: tuple[int, ...], reason: FinishReason | None
) -> None:
    scheduler = scheduler_of(2, 64, 1000)
    scheduler.add(request("a", 2, max_tokens=5, stop=frozenset({9})), 0.0)
    scheduler.schedule()
    take(scheduler, StepResult((ChunkResult("a", 2, (7,)),)))
    scheduler.set_num_drafts({"a": 8, "ended": 3})
    # a fourth draft could not be output: one token is, and the window gains one more than its drafts
    assert scheduler.schedule().chunks == (Chunk("a", "a", 2, (7,), num_drafts=3, output_index=1),)
    outcome = take(scheduler, StepResult((ChunkResult("a", len(gained), gained, num_verified=3),)))
    stop = 9 if reason is FinishReason.STOP else None
    counts = {"num_drafted": 3, "num_accepted": len(gained) - 1}
    assert outcome.outputs == (TokenOutput("a", emitted, reason, stop_token_id=stop, **counts),)
    if reason is None:
        assert scheduler.schedule().chunks == (Chunk("a", "a", 5, (3,), output_index=4),)


def test_a_waiting_request_can_be_aborted_and_leaves_no_rows_behind() -> None:
    scheduler = scheduler_of(1, 64, 1000)
    scheduler.add(request("a", 2), 0.0)
    scheduler.add(request("b", 2), 0.0)
    take(scheduler, answer(scheduler.schedule()))
    assert scheduler.abort("b")
    assert (scheduler.num_waiting, scheduler.take_released()) == (0, ())


def test_a_running_request_can_be_aborted_between_steps() -> None:
    scheduler = scheduler_of(1, 64, 1000)
    scheduler.add(request("a", 2), 0.0)
    take(scheduler, answer(scheduler.schedule()))
    assert scheduler.abort("a")
    assert not scheduler.abort("a")
    assert (scheduler.num_running, scheduler.take_released()) == (0, ("a",))
    assert scheduler.schedule() == StepPlan(())
    scheduler.add(request("a", 2), 0.0)


def test_only_requests_that_are_being_worked_on_can_be_aborted() -> None:
    scheduler = scheduler_of(1, 64, 1000)
    assert not scheduler.abort("nobody")
    scheduler.add(request("a", 2, max_tokens=1), 0.0)
    take(scheduler, answer(scheduler.schedule()))
    assert not scheduler.abort("a")


def test_a_failing_row_fails_alone() -> None:
    scheduler = scheduler_of(4, 64, 1000)
    scheduler.add(request("good", 2), 0.0)
    scheduler.add(request("bad", 2), 0.0)
    scheduler.schedule()
    error = ValueError("its own work")
    outcome = take(scheduler, StepResult((ChunkResult("good", 2, (7,)),), (ChunkFailure("bad", error),)))
    assert outcome == StepOutcome((TokenOutput("good", (7,)),), {"bad": error})
    assert scheduler.take_released() == ("bad",)
    assert lengths(scheduler.schedule()) == {"good": 1}


def test_the_id_of_a_request_that_is_worked_on_is_refused() -> None:
    scheduler = scheduler_of(4, 64, 100)
    scheduler.add(request("a", 1, n=2), 0.0)
    for taken in ("a", "a/0", "a/1"):
        with pytest.raises(InvalidRequest, match="already in use") as caught:
            scheduler.add(request(taken, 1), 0.0)
        assert caught.value.param == "request_id"
    scheduler.add(request("b/1", 1), 0.0)
    with pytest.raises(InvalidRequest, match="'b/1' is already in use"):
        scheduler.add(request("b", 1, n=2), 0.0)
    assert scheduler.num_waiting == 2


@pytest.mark.parametrize(
    ("counts", "name"),
    [
        ((0, 1, 1, None), "max_num_seqs"),
        ((1, 0, 1, None), "prefill_chunk"),
        ((1, 1, -1, None), "max_model_len"),
        ((1, 1, 1, -1), "max_queue"),
    ],
)
def test_a_scheduler_without_room_is_refused_by_name(counts: tuple[int, int, int, int | None], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        Scheduler(*counts[:3], memory=AMPLE, max_queue=counts[3])


def test_a_step_can_not_be_planned_before_the_last_ones_result() -> None:
    scheduler = scheduler_of(1, 64, 10)
    scheduler.add(request("a", 1), 0.0)
    scheduler.schedule()
    with pytest.raises(RuntimeError, match="update"):
        scheduler.schedule()


def test_a_step_with_a_failure_is_not_measured() -> None:
    scheduler = scheduler_of(4, 64, 1000)
    for name in "abc":
        scheduler.add(request(name, 2, max_tokens=50), 0.0)
    take(scheduler, answer(scheduler.schedule()))
    scheduler.add(request("long", 100), 0.0)
    plan = scheduler.schedule()
    kept = tuple(result for result in answer(plan).results if result.sequence_id != "c")
    scheduler.update(StepResult(kept, (ChunkFailure("c", ValueError()),)), 0.0, 0.0)
    measure_plain_steps(scheduler)
    assert lengths(scheduler.schedule()) == {"a": 1, "b": 1, "long": 32}


def test_the_output_of_a_session_counts_in_its_share_of_the_queue() -> None:
    scheduler = scheduler_of(3, 64, 1000)
    scheduler.add(request("chatty 0", 10, max_tokens=30, n=2, session="chatty"), 0.0)
    scheduler.add(request("quiet 0", 15, max_tokens=100, session="quiet"), 0.0)
    for _ in range(2):
        take(scheduler, answer(scheduler.schedule()))
    scheduler.add(request("chatty 1", 10, n=2, session="chatty"), 0.0)
    scheduler.add(request("quiet 1", 10, n=2, session="quiet"), 0.0)
    while scheduler.num_running == 3:
        take(scheduler, answer(scheduler.schedule()))
    scheduler.schedule()
    waiting = [status.request_id for status in scheduler.status(0.0) if status.phase == "queued"]
    assert waiting == ["chatty 1"]


def test_once_all_was_idle_no_session_has_a_past() -> None:
    scheduler = scheduler_of(1, 64, 1000)
    scheduler.add(request("busy 0", 50, max_tokens=1, session="busy"), 0.0)
    take(scheduler, answer(scheduler.schedule()))
    scheduler.add(request("busy 1", 2, session="busy"), 0.0)
    scheduler.add(request("new 1", 2, session="new"), 0.0)
    assert lengths(scheduler.schedule()) == {"busy 1": 2}
