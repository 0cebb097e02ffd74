"""Several choices share one prefill, go on alone, and end together where they must; what is told about tokens."""

from __future__ import annotations

import pytest
from scheduler.made_up import AMPLE, FakeRunner, answer, lengths, request, score, solo

from headrace.scheduler.scheduler import Scheduler, StepOutcome
from headrace.types.events import FinishReason, TokenOutput
from headrace.types.request import GenerationRequest
from headrace.types.step import ChunkFailure, ChunkResult, StepResult


def started(requested: GenerationRequest, chunk_tokens: int = 64) -> Scheduler:
    """A scheduler with one request and room for four sequences."""
    scheduler = Scheduler(4, chunk_tokens, 1000, memory=AMPLE)
    scheduler.add(requested, 0.0)
    return scheduler


def run_alone(scheduler: Scheduler, runner: FakeRunner) -> list[TokenOutput]:
    """All outputs until nothing is left to do."""
    outputs: list[TokenOutput] = []
    while scheduler.num_running + scheduler.num_waiting:
        result = runner.execute(scheduler.schedule())
        outputs += scheduler.update(result, 0.0, 0.0).outputs
        scheduler.set_num_drafts(runner.draft(result))
    return outputs


def test_only_the_first_choice_computes_the_prompt_and_the_others_fork_at_its_end() -> None:
    scheduler = started(request("a", 70, n=3))
    (chunk,) = scheduler.schedule().chunks
    assert (chunk.sequence_id, chunk.request_id, chunk.choice) == ("a/0", "a", 0)
    assert (len(chunk.token_ids), chunk.samples, chunk.forks) == (64, False, ())
    scheduler.update(StepResult((ChunkResult("a/0", 64),)), 0.0, 0.0)
    plan = scheduler.schedule()
    (chunk,) = plan.chunks
    assert (len(chunk.token_ids), chunk.samples, chunk.forks) == (6, True, ("a/1", "a/2"))
    results = (ChunkResult("a/2", 0, (9,)), ChunkResult("a/1", 0, (8,)), ChunkResult("a/0", 6, (7,)))
    outcome = scheduler.update(StepResult(results), 0.0, 0.0)
    assert outcome.outputs == tuple(TokenOutput("a", (7 + choice,), choice=choice) for choice in range(3))
    chunks = scheduler.schedule().chunks
    assert [(c.sequence_id, c.choice, c.start, c.token_ids, c.output_index, c.forks) for c in chunks] == [
        (f"a/{choice}", choice, 70, (7 + choice,), 1, ()) for choice in range(3)
    ]


def test_a_single_choice_is_known_by_the_requests_own_id() -> None:
    (chunk,) = started(request("a", 3)).schedule().chunks
    assert (chunk.sequence_id, chunk.forks) == ("a", ())


def test_choices_take_as_many_rows_as_they_are() -> None:
    scheduler = started(request("a", 3, n=3))
    scheduler.add(request("b", 3, n=2), 0.0)
    assert scheduler.num_waiting == 2
    plan = scheduler.schedule()
    assert lengths(plan) == {"a/0": 3}
    assert (scheduler.num_running, scheduler.num_waiting) == (3, 1)


def test_each_choice_finishes_on_its_own_and_the_request_with_the_last() -> None:
    scheduler = started(request("a", 3, max_tokens=3, stop=frozenset({5}), n=3))
    scheduler.schedule()
    results = (ChunkResult("a/0", 3, (5,)), ChunkResult("a/1", 0, (8,)), ChunkResult("a/2", 0, (9,)))
    outcome = scheduler.update(StepResult(results), 0.0, 0.0)
    assert outcome == StepOutcome(
        (
            TokenOutput("a", (), FinishReason.STOP, stop_token_id=5),
            TokenOutput("a", (8,), choice=1),
            TokenOutput("a", (9,), choice=2),
        )
    )
    assert (scheduler.num_running, scheduler.take_released()) == (2, ("a/0",))
    assert lengths(scheduler.schedule()) == {"a/1": 1, "a/2": 1}
    outcome = scheduler.update(StepResult((ChunkResult("a/1", 1, (8,)), ChunkResult("a/2", 1, (5,)))), 0.0, 0.0)
    ended = TokenOutput("a", (), FinishReason.STOP, choice=2, stop_token_id=5)
    assert outcome == StepOutcome((TokenOutput("a", (8,), choice=1), ended))
    assert scheduler.take_released() == ("a/2",)
    outcome = scheduler.update(answer(scheduler.schedule(), 8), 0.0, 0.0)
    assert outcome == StepOutcome((TokenOutput("a", (8,), FinishReason.LENGTH, choice=1),), finished=("a",))
    assert (scheduler.num_running, scheduler.take_released(), scheduler.abort("a")) == (0, ("a/1",), False)


def test_rows_of_ended_choices_go_to_others() -> None:
    scheduler = started(request("a", 3, n=4, stop=frozenset({5})))
    scheduler.add(request("b", 3, n=2), 0.0)
    scheduler.schedule()
    forks = tuple(ChunkResult(f"a/{choice}", 0, (5 if choice < 3 else 7,)) for choice in (1, 2, 3))
    scheduler.update(StepResult((ChunkResult("a/0", 3, (7,)), *forks)), 0.0, 0.0)
    scheduler.schedule()
    assert (scheduler.num_running, scheduler.num_waiting) == (4, 0)


@pytest.mark.parametrize("when", ["waiting", "prefilling", "decoding"])
def test_an_abort_ends_every_choice(when: str) -> None:
    scheduler = started(request("a", 70, n=3))
    rows: tuple[str, ...] = ()
    if when != "waiting":
        scheduler.update(answer(scheduler.schedule()), 0.0, 0.0)
        rows = ("a/0",)
    if when == "decoding":
        scheduler.update(answer(scheduler.schedule()), 0.0, 0.0)
        rows = ("a/0", "a/1", "a/2")
    assert scheduler.abort("a")
    assert not scheduler.abort("a")
    assert scheduler.status(0.0) == ()
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.reserved_bytes) == (0, 0, 0)
    assert scheduler.take_released() == rows
    assert not scheduler.schedule().chunks


@pytest.mark.parametrize("failing", [("a/0",), ("a/1",), ("a/0", "a/1", "a/2")])
@pytest.mark.parametrize("is_forking", [False, True])
def test_the_failure_of_one_choice_is_the_requests_only_outcome(failing: tuple[str, ...], is_forking: bool) -> None:
    scheduler = started(request("a", 3, n=3))
    plan = scheduler.schedule()
    if not is_forking:
        scheduler.update(answer(plan), 0.0, 0.0)
        plan = scheduler.schedule()
    whole = answer(plan)
    errors = tuple(ChunkFailure(sequence_id, ValueError(sequence_id)) for sequence_id in failing)
    kept = tuple(each for each in whole.results if each.sequence_id not in failing)
    outcome = scheduler.update(StepResult(kept, errors), 0.0, 0.0)
    assert outcome == StepOutcome(errors={"a": errors[0].error})
    assert scheduler.take_released() == ("a/0", "a/1", "a/2")
    assert (scheduler.num_running, scheduler.reserved_bytes) == (0, 0)


def test_logprobs_go_with_their_tokens_and_those_of_dropped_tokens_are_dropped() -> None:
    asked = request("a", 5, max_tokens=9, n=2, logprobs=0)
    outputs = run_alone(started(asked), FakeRunner(num_drafts=3, requests={"a": asked}))
    for choice in (0, 1):
        expected, _ = solo(asked, choice)
        history = [*asked.prompt, *expected]
        told = [score for output in outputs if output.choice == choice for score in output.logprobs]
        assert told == [score(history[end], history[:end]) for end in range(5, 14)]
    assert all(len(output.logprobs) == len(output.token_ids) for output in outputs)


def test_the_stop_token_has_log_probabilities_and_what_follows_it_has_none() -> None:
    asked = request("a", 5, stop=frozenset({5}), logprobs=0)
    scheduler = started(asked)
    scheduler.schedule()
    scheduler.update(StepResult((ChunkResult("a", 5, (7,), (score(7, asked.prompt),)),)), 0.0, 0.0)
    scheduler.set_num_drafts({"a": 2})
    scheduler.schedule()
    scores = tuple(score(token_id, (*asked.prompt, 7)) for token_id in (8, 5, 9))
    outcome = scheduler.update(StepResult((ChunkResult("a", 3, (8, 5, 9), scores, num_verified=2),)), 0.0, 0.0)
    (output,) = outcome.outputs
    assert (output.token_ids, output.stop_token_id, output.num_tokens) == ((8,), 5, 2)
    assert [each.token_id for each in output.logprobs] == [8, 5]


@pytest.mark.parametrize("prompt", [1, 2, 32, 33, 150])
@pytest.mark.parametrize("stops_at_once", [False, True])
def test_prompt_logprobs_are_gathered_and_told_once(prompt: int, stops_at_once: bool) -> None:
    stop = frozenset(range(12)) if stops_at_once else frozenset[int]()
    asked = request("a", prompt, stop=stop, n=2, prompt_logprobs=0)
    outputs = run_alone(started(asked, chunk_tokens=40), FakeRunner(requests={"a": asked}))
    assert outputs[0].choice == 0
    assert outputs[0].prompt_logprobs == (
        None,
        *(score(asked.prompt[place], asked.prompt[:place]) for place in range(1, prompt)),
    )
    assert all(output.prompt_logprobs is None for output in outputs[1:])


def test_nothing_is_told_about_the_prompt_unless_asked_for() -> None:
    scheduler = started(request("a", 3))
    outcome = scheduler.update(answer(scheduler.schedule()), 0.0, 0.0)
    assert outcome.outputs[0].prompt_logprobs is None
