"""What requests wait for, as the scheduler plans: rows, memory, their turn, a stage."""

from __future__ import annotations

from scheduler.made_up import AMPLE, answer, request

from headrace.scheduler.admission import SLICE_TOKENS, MemoryBudget
from headrace.scheduler.rows import MAX_HELD_BACK
from headrace.scheduler.scheduler import Scheduler
from headrace.scheduler.stages import PromptPlan
from headrace.types.request import GenerationRequest
from headrace.types.status import WaitReason

A_BYTE_A_TOKEN = MemoryBudget(100, lambda num_tokens: num_tokens)


def reasons(scheduler: Scheduler) -> dict[str, WaitReason | None]:
    return {status.request_id: status.waits_for for status in scheduler.status(0.0)}


def step(scheduler: Scheduler) -> None:
    scheduler.update(answer(scheduler.schedule()), 0.0, 0.0)


def test_a_new_request_waits_for_the_step_in_progress_and_then_runs() -> None:
    scheduler = Scheduler(2, 64, 1000, memory=AMPLE)
    scheduler.add(request("a", 10), 0.0)
    assert reasons(scheduler) == {"a": WaitReason.STEP}
    step(scheduler)
    scheduler.add(request("b", 10), 0.0)
    assert reasons(scheduler) == {"a": None, "b": WaitReason.STEP}
    step(scheduler)
    assert reasons(scheduler) == {"a": None, "b": None}


def test_all_that_find_no_row_wait_for_rows() -> None:
    scheduler = Scheduler(2, 64, 1000, memory=AMPLE)
    for name, n in (("a", 1), ("two", 2), ("b", 1)):
        scheduler.add(request(name, 10, n=n), 0.0)
    step(scheduler)
    # one row is left, and none overtakes the next in turn
    assert reasons(scheduler) == {"a": None, "two": WaitReason.ROWS, "b": WaitReason.TURN}
    scheduler.abort("two")
    step(scheduler)
    scheduler.add(request("c", 10), 0.0)
    assert reasons(scheduler) == {"a": None, "b": None, "c": WaitReason.ROWS}


def test_a_request_without_bytes_waits_for_memory_and_those_behind_it_for_their_turn() -> None:
    scheduler = Scheduler(4, 64, 1000, memory=A_BYTE_A_TOKEN)
    for name, prompt in (("a", 50), ("large", 80), ("small", 5)):
        scheduler.add(request(name, prompt), 0.0)
    step(scheduler)
    assert reasons(scheduler) == {"a": None, "large": WaitReason.MEMORY, "small": WaitReason.TURN}


def test_one_preempted_for_another_waits_for_its_turn_and_then_for_what_it_lacks() -> None:
    scheduler = Scheduler(1, 64, 1000, memory=AMPLE)
    scheduler.add(request("low", 10, 100, priority=1), 0.0)
    for _ in range(SLICE_TOKENS):
        step(scheduler)
    scheduler.add(request("high", 10, 9), 0.0)
    step(scheduler)
    assert reasons(scheduler) == {"low": WaitReason.TURN, "high": None}
    step(scheduler)
    assert reasons(scheduler) == {"low": WaitReason.ROWS, "high": None}


def test_one_preempted_for_lack_of_bytes_waits_for_memory_and_so_a_newcomer_for_its_turn() -> None:
    # powers of two: 1024 for each, until the old one needs 2048 and leaves the young one no room to grow
    memory = MemoryBudget(2048 + 1024 + 700, lambda num_tokens: 1 << (num_tokens - 1).bit_length())
    scheduler = Scheduler(3, 128, 10_000, memory=memory)
    scheduler.add(request("old", 100, 1000), 0.0)
    scheduler.add(request("young", 100, 990), 0.0)
    while scheduler.num_preemptions == 0:
        step(scheduler)
    scheduler.add(request("new", 1, 500), 0.0)
    for _ in range(2):
        assert reasons(scheduler) == {"old": None, "young": WaitReason.MEMORY, "new": WaitReason.TURN}
        step(scheduler)


class Slow:
    """A stage in which one request waits."""

    def __init__(self, name: str, reason: WaitReason) -> None:
        self.name, self.reason = name, reason
        self.waits = True

    def prepare(self, request: GenerationRequest, plan: PromptPlan) -> PromptPlan | WaitReason:
        return self.reason if self.waits and request.request_id == self.name else plan

    def still_waits(self, request_id: str) -> bool:
        return self.waits

    def end(self, request_id: str) -> None:
        """Nothing is held."""


def test_one_that_waits_in_a_stage_is_overtaken_and_says_so_until_it_lacks_a_row() -> None:
    stage = Slow("slow", WaitReason.MEDIA)
    scheduler = Scheduler(1, 64, 1000, memory=AMPLE, stages=[stage])
    for name in ("slow", "other"):
        scheduler.add(request(name, 10), 0.0)
    step(scheduler)
    assert reasons(scheduler) == {"slow": WaitReason.MEDIA, "other": None}
    scheduler.add(request("third", 10), 0.0)
    assert reasons(scheduler) == {"slow": WaitReason.MEDIA, "other": None, "third": WaitReason.ROWS}


class OnePrefix:
    """All prompts share a prefix that the first one computes. attempts: to start, since they were last counted."""

    def __init__(self) -> None:
        self.attempts = 0

    def prepare(self, request: GenerationRequest, plan: PromptPlan) -> PromptPlan | WaitReason:
        self.attempts += 1
        return plan if request.request_id == "0" else WaitReason.PREFIX

    def still_waits(self, request_id: str) -> bool:
        return False

    def end(self, request_id: str) -> None:
        pass


def test_a_step_tries_a_limited_number_of_requests_that_others_may_overtake() -> None:
    stage = OnePrefix()
    scheduler = Scheduler(4, 64, 1000, memory=AMPLE, stages=[stage])
    for number in range(500):
        scheduler.add(request(str(number), 10), 0.0)
    for attempts in (1 + MAX_HELD_BACK, MAX_HELD_BACK):  # the first one starts in the first step
        stage.attempts = 0
        step(scheduler)
        assert stage.attempts == attempts
    found = list(reasons(scheduler).values())
    assert found == [None, *[WaitReason.PREFIX] * MAX_HELD_BACK, *[WaitReason.TURN] * (499 - MAX_HELD_BACK)]
