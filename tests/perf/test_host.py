"""Steps cost the host what its thread does, not what it waits for."""

from __future__ import annotations

import sys
import time

from headrace.perf.host import host_work, num_host_steps


def add(kept: list[object], number: int) -> None:
    kept.append([number])


def test_calls_and_objects_of_a_step_are_counted() -> None:
    kept: list[object] = []
    num_made = 0

    def step() -> None:
        nonlocal num_made
        num_made += 1
        for number in range(100):
            add(kept, number)

    work = host_work(step, 3)
    assert num_made == num_host_steps(3)
    # the step itself, 100 calls of ours, an append in each
    assert work.num_calls == 1 + 100 + 100
    # a list's header and its items
    assert 200 <= work.num_objects < 230
    assert sys.getprofile() is None


def test_what_is_given_back_between_two_calls_counts_as_nothing() -> None:
    def step() -> None:
        abs(-1)
        ([1], [2], [3])  # noqa: B018
        abs(-1)

    assert host_work(step, 1).num_objects <= 3


def test_a_wait_is_no_work() -> None:
    assert host_work(lambda: time.sleep(0.2), 1).seconds < 0.1
