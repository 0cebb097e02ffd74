"""What a step costs the host: time, calls and objects of its thread. Its operations: `headrace.backend.operations`."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

NUM_COUNTED = 5
"""Steps whose calls and objects are counted, which slows them down."""


@dataclass(frozen=True, slots=True)
class HostWork:
    """Medians of steps.

    seconds: processor time of the thread that makes the step: Python, building graphs and launching them, but neither
    waiting for the device nor what other threads compute. num_calls: functions called, Python's and others.
    num_objects: blocks of memory that Python took; those that were given back before the next call or return are
    missing.
    """

    seconds: float
    num_calls: int
    num_objects: int


def num_host_steps(num_steps: int) -> int:
    """Steps that `host_work` makes."""
    return num_steps + NUM_COUNTED


def host_work(step: Callable[[], object], num_steps: int) -> HostWork:
    """Make `num_host_steps(num_steps)` steps, after others have warmed up, and tell what they cost."""
    times = []
    for _ in range(num_steps):
        started = time.thread_time()
        step()
        times.append(time.thread_time() - started)
    counts = [_counted(step) for _ in range(NUM_COUNTED)]
    num_calls, num_objects = (round(statistics.median(each)) for each in zip(*counts, strict=True))
    return HostWork(statistics.median(times), num_calls, num_objects)


def _counted(step: Callable[[], object]) -> tuple[int, int]:
    """Calls and objects of one step."""
    num_calls = num_objects = 0
    held = sys.getallocatedblocks()

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal num_calls, num_objects, held
        now = sys.getallocatedblocks()
        num_objects += max(0, now - held)
        num_calls += event in ("call", "c_call")
        held = sys.getallocatedblocks()

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(before)
    # the last call is the one that ends counting
    return num_calls - 1, num_objects
