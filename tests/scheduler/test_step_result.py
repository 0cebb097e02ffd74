"""A result that does not fit its plan is refused before anything is taken over."""

from __future__ import annotations

from dataclasses import replace

import pytest
from scheduler.made_up import AMPLE, answer, request

from headrace.scheduler.scheduler import Scheduler
from headrace.scheduler.step_result import check_result
from headrace.types.events import TokenLogprobs, TokenOutput
from headrace.types.step import Chunk, ChunkFailure, ChunkResult, StepPlan, StepResult

SCORE = TokenLogprobs(7, -1.0, rank=1)


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
    scheduler = Scheduler(1, 64, 10, memory=AMPLE)
    scheduler.add(request("a", 2), 0.0)
    plan = scheduler.schedule()
    with pytest.raises(ValueError, match="a"):
        scheduler.update(result, 0.0, 0.0)
    assert scheduler.update(answer(plan), 0.0, 0.0).outputs == (TokenOutput("a", (7,)),)


def test_a_chunk_inside_a_prompt_may_not_gain_tokens() -> None:
    chunk = Chunk("a", "a", 0, (1, 2), samples=False)
    with pytest.raises(ValueError, match="does not sample"):
        check_result([chunk], StepResult((ChunkResult("a", 2, (7,)),)), {"a": request("a", 40)})


def test_accepted_drafts_are_gained_as_well() -> None:
    chunk = Chunk("a", "a", 2, (7,), num_drafts=2, output_index=1)
    requests = {"a": request("a", 2)}
    for num_accepted in range(3):
        gained = (8, 9, 7)[: num_accepted + 1]
        fitting = ChunkResult("a", 1 + num_accepted, gained, num_verified=2)
        check_result([chunk], StepResult((fitting,)), requests)
        with pytest.raises(ValueError, match="do not fit"):
            check_result([chunk], StepResult((replace(fitting, token_ids=gained[1:]),)), requests)


@pytest.mark.parametrize(("num_verified", "num_accepted"), [(3, 1), (1, 2), (0, 1), (2, -1)])
def test_no_more_drafts_are_right_than_were_verified_and_no_more_verified_than_planned(
    num_verified: int, num_accepted: int
) -> None:
    chunk = Chunk("a", "a", 2, (7,), num_drafts=2, output_index=1)
    result = ChunkResult("a", 1 + num_accepted, (7,) * (num_accepted + 1), num_verified=num_verified)
    with pytest.raises(ValueError, match="do not fit"):
        check_result([chunk], StepResult((result,)), {"a": request("a", 2)})


FORKING = Chunk("a/0", "a", 0, (100, 101), forks=("a/1",))
FIRST = ChunkResult("a/0", 2, (7,))


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ((FIRST,), "planned"),
        ((FIRST, ChunkResult("a/1", 0, (7,)), ChunkResult("a/1", 0, (7,))), "planned"),
        ((FIRST, ChunkResult("a/2", 0, (7,))), "planned"),
        ((FIRST, ChunkResult("a/1", 2, (7,))), "a/1: a fork commits nothing"),
        ((FIRST, ChunkResult("a/1", 0)), "a/1: a fork commits nothing"),
        ((FIRST, ChunkResult("a/1", 0, (7, 7))), "a/1: a fork commits nothing"),
    ],
)
def test_a_fork_is_answered_once_and_with_one_token(results: tuple[ChunkResult, ...], message: str) -> None:
    requests = {"a": request("a", 2, n=2)}
    check_result(StepPlan((FORKING,)).chunks, StepResult((FIRST, ChunkResult("a/1", 0, (7,)))), requests)
    with pytest.raises(ValueError, match=message):
        check_result([FORKING], StepResult(results), requests)


@pytest.mark.parametrize("num_given", [0, 1, 2])
@pytest.mark.parametrize("is_fork", [False, True])
@pytest.mark.parametrize("asked", [None, 0, 5])
def test_every_gained_token_has_its_logprobs_if_they_are_asked_for(
    asked: int | None, is_fork: bool, num_given: int
) -> None:
    requests = {"a": request("a", 2, n=2, logprobs=asked)}
    fitting = (SCORE,) if asked is not None else ()
    given = (SCORE,) * num_given
    first = ChunkResult("a/0", 2, (7,), fitting if is_fork else given)
    fork = ChunkResult("a/1", 0, (7,), given if is_fork else fitting)
    if given == fitting:
        check_result([FORKING], StepResult((first, fork)), requests)
    else:
        with pytest.raises(ValueError, match="log-probabilities of the output"):
            check_result([FORKING], StepResult((first, fork)), requests)


@pytest.mark.parametrize(
    ("start", "num_tokens", "num_due"),
    [(0, 4, 4), (4, 4, 4), (4, 5, 5), (4, 6, 5), (10, 1, 0)],  # token i predicts token i + 1 of the prompt's ten
)
def test_prompt_logprobs_are_due_for_what_the_chunk_predicts_of_the_prompt(
    start: int, num_tokens: int, num_due: int
) -> None:
    requests = {"a": request("a", 10, prompt_logprobs=1)}
    samples = start + num_tokens >= 10
    chunk = Chunk("a", "a", start, (1,) * num_tokens, samples=samples)
    for num_given in {num_due, num_due + 1, max(0, num_due - 1)}:
        gained = (7,) if samples else ()
        result = StepResult((ChunkResult("a", num_tokens, gained, prompt_logprobs=(SCORE,) * num_given),))
        if num_given == num_due:
            check_result([chunk], result, requests)
        else:
            with pytest.raises(ValueError, match="of the prompt"):
                check_result([chunk], result, requests)
