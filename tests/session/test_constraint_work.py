"""Compiling and checking beside the event loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from headrace.errors import Overloaded
from headrace.session import bounded_work
from headrace.session.bounded_work import BoundedWork


def test_no_more_calls_run_at_once_than_there_are_threads_and_no_more_wait_than_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bounded_work, "MAX_WAITING", 3)
    go_on, running, most = threading.Event(), [0], [0]

    def call(number: int) -> int:
        running[0] += 1
        most[0] = max(most[0], running[0])
        assert go_on.wait(30)
        running[0] -= 1
        return number

    async def ask() -> list[int | BaseException]:
        work = BoundedWork(1)
        tasks = [asyncio.create_task(work.run(call, number)) for number in range(5)]
        await asyncio.sleep(0)
        tasks[2].cancel()
        await asyncio.sleep(0)
        assert work.start(call, 9)  # the cancelled one has made room
        await asyncio.sleep(0)
        assert not work.start(call, 10)
        go_on.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    first, second, third, *refused = asyncio.run(ask())
    assert (first, second) == (0, 1)
    assert isinstance(third, asyncio.CancelledError)
    assert [type(each) for each in refused] == [Overloaded, Overloaded]
    assert most == [1]
