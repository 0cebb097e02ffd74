"""How a request stands, told for a given moment."""

from __future__ import annotations

from scheduler.made_up import AMPLE, answer, request

from headrace.scheduler.scheduler import Scheduler
from headrace.types.status import Phase, RequestStatus, WaitReason
from headrace.types.step import ChunkResult, StepResult


def test_a_request_is_told_from_its_arrival_to_its_end() -> None:
    scheduler = Scheduler(1, 64, 1000, memory=AMPLE)
    scheduler.add(request("a", 70, max_tokens=5, session="s", priority=2), 10.0)
    scheduler.add(request("b", 3, priority=3), 11.0)
    queued, other = scheduler.status(12.5)
    assert queued == RequestStatus("a", Phase.QUEUED, 70, 0, 0, 0, 0.0, 2.5, "s", 2, waits_for=WaitReason.STEP)
    assert (other.request_id, other.age_s, other.session, other.priority) == ("b", 1.5, "", 3)

    scheduler.update(answer(scheduler.schedule()), 1.0, 13.0)
    prefill, other = scheduler.status(13.0)
    assert prefill == RequestStatus("a", Phase.PREFILL, 70, 64, 0, 0, 0.0, 3.0, "s", 2)
    assert (other.phase, other.waits_for) == (Phase.QUEUED, WaitReason.ROWS)

    scheduler.update(answer(scheduler.schedule()), 1.0, 14.0)
    decode, _ = scheduler.status(15.0)
    assert decode == RequestStatus("a", Phase.DECODE, 70, 70, 0, 1, 0.0, 5.0, "s", 2)

    scheduler.update(answer(scheduler.schedule()), 1.0, 15.0)
    scheduler.update(answer(scheduler.schedule()), 1.0, 16.0)
    decode, _ = scheduler.status(18.0)
    assert (decode.num_computed_tokens, decode.num_output_tokens) == (72, 3)
    assert decode.tokens_per_s == (3 - 1) / (18.0 - 14.0)

    for now in (17.0, 18.0):
        scheduler.update(answer(scheduler.schedule()), 1.0, now)
    assert [status.request_id for status in scheduler.status(19.0)] == ["b"]


def test_choices_are_counted_together_and_their_prompt_once() -> None:
    scheduler = Scheduler(4, 64, 1000, memory=AMPLE)
    scheduler.add(request("a", 10, n=3, stop=frozenset({5})), 0.0)
    scheduler.schedule()
    first = (ChunkResult("a/0", 10, (5,)), ChunkResult("a/1", 0, (7,)), ChunkResult("a/2", 0, (8,)))
    scheduler.update(StepResult(first), 1.0, 1.0)
    (status,) = scheduler.status(1.0)
    assert (status.phase, status.num_computed_tokens, status.num_output_tokens) == (Phase.DECODE, 10, 2)
    scheduler.update(answer(scheduler.schedule()), 1.0, 2.0)
    (status,) = scheduler.status(2.0)
    assert (status.num_computed_tokens, status.num_output_tokens) == (12, 4)
    assert status.tokens_per_s == 2.0
