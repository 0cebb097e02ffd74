"""Long work of several threads: one computes at a time, and one that waits for something lets others go on."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from headrace.cancellation import run_in_pool
from headrace.long_work import let_others_run, run_exclusively


class Gauge:
    """The largest number of threads that were inside at once."""

    def __init__(self) -> None:
        self.most = self._now = 0
        self._lock = threading.Lock()

    def pass_through(self) -> None:
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        for _ in range(200):
            sum(range(1000))
        with self._lock:
            self._now -= 1


def test_one_computes_at_a_time() -> None:
    gauge = Gauge()
    with ThreadPoolExecutor(8) as threads:
        for call in [threads.submit(run_exclusively, gauge.pass_through) for _ in range(16)]:
            call.result()
    assert gauge.most == 1


def test_what_is_set_aside_goes_on_beside_others() -> None:
    def meet() -> None:
        with let_others_run():
            both.wait(60)
        gauge.pass_through()

    both, gauge = threading.Barrier(2), Gauge()
    with ThreadPoolExecutor(2) as threads:
        for call in [threads.submit(run_exclusively, meet) for _ in range(2)]:
            call.result()
    assert gauge.most == 1


def test_outside_of_long_work_nothing_is_set_aside() -> None:
    gauge = Gauge()

    def use(number: int) -> None:
        with let_others_run():
            pass
        run_exclusively(gauge.pass_through)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(use, range(16)))
    assert gauge.most == 1


@pytest.mark.parametrize("is_aside", [False, True])
def test_a_failure_passes_the_turn_on(is_aside: bool) -> None:
    def fail() -> None:
        if is_aside:
            with let_others_run():
                raise ValueError("no")
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        run_exclusively(fail)
    assert run_exclusively(int, "7") == 7


def test_whoever_is_cancelled_while_waiting_does_not_take_a_turn() -> None:
    ran: list[str] = []

    def hold() -> None:
        holding.set()
        assert release.wait(60)

    async def scenario() -> None:
        with ThreadPoolExecutor(2) as threads:
            first = asyncio.create_task(run_in_pool(threads, run_exclusively, hold))
            await asyncio.to_thread(holding.wait, 60)
            second = asyncio.create_task(run_in_pool(threads, run_exclusively, ran.append, "ran"))
            await asyncio.sleep(0.01)
            second.cancel()
            await asyncio.gather(second, return_exceptions=True)
            release.set()
            await first
        # The pool has ended, and with it both calls.

    holding, release = threading.Event(), threading.Event()
    asyncio.run(scenario())
    assert ran == []
