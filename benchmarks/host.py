"""What a step costs the host: time, calls and objects of its thread, and operations of its graph."""

from __future__ import annotations

import io
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType

import mlx.core as mx

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


VIEWS = frozenset(
    "AsStrided Broadcast BroadcastAxes ExpandDims Flatten NumberOfElements Reshape Slice Split Squeeze StopGradient"
    " Transpose Unflatten View".split()
)
"""Operations that as a rule only say how an array's memory is to be read, and launch nothing."""

# A node each time that an operation is computed, with a line for each input behind it; the number in it is not its
# own, compiled functions share theirs.
_PRIMITIVE = re.compile(r'\{ \d+ \[label ="([^"]+)".*\n((?:"\w+" -> \d+\n)*)')


def operations(arrays: Sequence[mx.array]) -> Counter[str]:
    """How many operations of each kind have to be computed for arrays that are not evaluated yet."""
    return Counter(name for name, _ in _nodes(arrays))


def _nodes(arrays: Sequence[mx.array]) -> list[tuple[str, int]]:
    """Name and number of inputs of each operation."""
    drawn = io.StringIO()
    mx.export_to_dot(drawn, *arrays)
    return [(name, inputs.count("\n")) for name, inputs in _PRIMITIVE.findall(drawn.getvalue())]


def num_launches(found: Counter[str]) -> int:
    """Operations that are no views."""
    return sum(count for name, count in found.items() if name not in VIEWS)


def metal_launches(arrays: Sequence[mx.array]) -> int:
    """Kernels that Metal launches for arrays that are not evaluated yet.

    There each part of a concatenation is copied by its own kernel (`concatenate_gpu`), and what is padded is filled
    and then written to. Copies that inputs in other layouts need, and those of arrays that can't be written in place,
    don't show in a graph.
    """
    return sum(_metal_kernels(name, num_inputs) for name, num_inputs in _nodes(arrays))


def _metal_kernels(name: str, num_inputs: int) -> int:
    if name in VIEWS:
        return 0
    return {"Concatenate": num_inputs, "Pad": 2}.get(name, 1)
