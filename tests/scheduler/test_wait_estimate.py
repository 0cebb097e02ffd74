"""How long a request would wait for others: by hand, from steps of made-up lengths."""

from __future__ import annotations

import pytest
from scheduler.made_up import AMPLE, answer, request

from headrace.scheduler.admission import SLICE_TOKENS, MemoryBudget
from headrace.scheduler.scheduler import Scheduler
from headrace.types.request import IDLE_PRIORITY


class Clock:
    """Runs steps that take a second each."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.now = 0.0
        self._scheduler = scheduler

    def step(self, num: int = 1) -> None:
        for _ in range(num):
            plan = self._scheduler.schedule()
            self.now += 1.0
            self._scheduler.update(answer(plan), 1.0, self.now)


def started(rows: int = 2, memory: MemoryBudget = AMPLE) -> tuple[Scheduler, Clock]:
    scheduler = Scheduler(rows, 64, 10_000, memory=memory)
    return scheduler, Clock(scheduler)


def with_history(rows: int = 2, steps: int = 4) -> tuple[Scheduler, Clock]:
    """Two requests have run, one after the other, and held their row for `steps` seconds each."""
    scheduler, clock = started(rows)
    for name in ("first", "second"):
        scheduler.add(request(name, 10, steps), clock.now)
        clock.step(steps)
    assert scheduler.num_running == 0
    return scheduler, clock


def test_nothing_delays_a_request_that_is_alone() -> None:
    scheduler, _ = started()
    assert scheduler.wait_s(request("new", 500), 500) == 0.0


def test_the_wait_is_unknown_before_anything_was_measured() -> None:
    scheduler, clock = started(rows=1)
    scheduler.add(request("a", 10, 100), 0.0)
    clock.step()
    assert scheduler.wait_s(request("new", 10), 10) is None


@pytest.mark.parametrize("num_ahead", [0, 1, 2, 5])
def test_each_place_in_the_queue_costs_the_usual_time_of_a_request_over_those_that_run(num_ahead: int) -> None:
    scheduler, clock = with_history(rows=2, steps=4)
    for index in range(2 + num_ahead):
        scheduler.add(request(f"r{index}", 10, 50), clock.now)
    clock.step(2)
    assert (scheduler.num_running, scheduler.num_waiting) == (2, num_ahead)
    # every 4 s / 2 rows = 2 s one of them ends
    assert scheduler.wait_s(request("new", 10), 10) == 2.0 * (num_ahead + 1)


def test_requests_of_a_burst_count_before_the_next_step_starts_them() -> None:
    scheduler, clock = with_history(rows=2, steps=4)
    scheduler.add(request("a", 10), clock.now)
    assert scheduler.wait_s(request("new", 10), 10) == 0.0
    scheduler.add(request("b", 10), clock.now)
    assert scheduler.wait_s(request("new", 10), 10) == 4.0


def test_only_those_that_go_first_count() -> None:
    scheduler, clock = with_history(rows=1, steps=4)
    for name, priority in (("running", 0), ("normal", 0), ("low", 5)):
        scheduler.add(request(name, 10, 50, priority=priority), clock.now)
    clock.step()
    assert scheduler.wait_s(request("new", 10, priority=-1), 10) == 4.0
    assert scheduler.wait_s(request("new", 10), 10) == 8.0
    assert scheduler.wait_s(request("new", 10, priority=9), 10) == 12.0


def test_a_request_that_preempts_another_does_not_wait() -> None:
    scheduler, clock = with_history(rows=1)
    scheduler.add(request("low", 10, 500, priority=1), clock.now)
    clock.step(SLICE_TOKENS - 1)
    assert scheduler.wait_s(request("new", 10), 10) == 4.0
    clock.step()
    assert scheduler.wait_s(request("new", 10), 10) == 0.0
    assert scheduler.wait_s(request("new", 10, priority=1), 10) == 4.0


def test_a_request_without_memory_waits_for_one_to_end() -> None:
    memory = MemoryBudget(100, lambda num_tokens: num_tokens)
    scheduler, clock = started(rows=4, memory=memory)
    for name in ("first", "second"):
        scheduler.add(request(name, 10, 4), clock.now)
        clock.step(4)
    scheduler.add(request("large", 80, 10), clock.now)
    clock.step(3)
    assert scheduler.wait_s(request("small", 5), 5) == 0.0
    assert scheduler.wait_s(request("new", 30), 30) == 4.0


def test_a_prompt_waits_for_as_much_of_the_others_as_it_has_itself() -> None:
    scheduler, clock = started(rows=8)
    scheduler.add(request("known", 640, 1), 0.0)
    clock.step(10)  # 64 tokens a second
    for name, prompt in (("long", 640), ("short", 32)):
        scheduler.add(request(name, prompt), clock.now)
    assert scheduler.wait_s(request("new", 320), 320) == 0.0, "they have not started"
    clock.step()
    left = 640 + 32 - 64
    # the time per token is measured with the fixed time of a chunk apart, which chunks of one size don't show
    assert scheduler.wait_s(request("new", 5000), 5000) == pytest.approx(left / 64, rel=0.01)
    assert scheduler.wait_s(request("new", 100), 100) == pytest.approx(100 / 64, rel=0.01)
    assert scheduler.wait_s(request("new", 1), 1) == pytest.approx(1 / 64, rel=0.01)


def test_prepared_turns_delay_no_client() -> None:
    scheduler, clock = with_history()
    scheduler.add(request("idle", 640, priority=IDLE_PRIORITY), clock.now)
    clock.step()
    assert scheduler.wait_s(request("new", 500), 500) == 0.0


def test_asking_changes_nothing() -> None:
    asked, clock = with_history(rows=2)
    silent, other_clock = with_history(rows=2)
    for index in range(8):
        for scheduler, its in ((asked, clock), (silent, other_clock)):
            scheduler.add(request(f"r{index}", 20 * index + 1, 40, session=f"s{index % 3}"), its.now)
        asked.wait_s(request("new", 700, session="s1"), 700)
        asked.wait_s(request("new", 70, session="unknown", priority=-3), 70)
        for each in (clock, other_clock):
            each.step(3)
    assert asked.status(clock.now) == silent.status(other_clock.now)
    assert asked.reserved_bytes == silent.reserved_bytes
