"""Figures and their measurements."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import mlx.core as mx

from headrace.bench.figures import Spread, spread
from headrace.perf.host import HostWork

WARM_UPS = 4
"""Steps before timed ones: kernels are built, memory is touched."""

Side = Literal["headrace", "mlx-lm"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One measure of one side.

    times_s: of each timed repeat. num_tokens: that each of them computed. num_bytes: that each had to move at least;
    None if not counted. forward_s, build_s: the forward alone of a decode step, and of that the time in which the
    host builds its graph. num_operations, num_launches: of the forward; the latter without those that only name views.
    host: what a decode step costs the host. peak_bytes: of all memory held meanwhile. note: what is to be known of it.
    """

    side: Side
    measure: str
    times_s: tuple[float, ...]
    num_tokens: int
    num_bytes: int | None = None
    forward_s: tuple[float, ...] = ()
    build_s: tuple[float, ...] = ()
    num_operations: int | None = None
    num_launches: int | None = None
    host: HostWork | None = None
    peak_bytes: int = 0
    note: str = ""

    @property
    def is_prefill(self) -> bool:
        """Whether it is told by its rate."""
        return self.measure.startswith("prefill")

    @property
    def token_s(self) -> float:
        """Seconds a token, at the median."""
        return self.time_s.median / self.num_tokens

    @property
    def time_s(self) -> Spread:
        """Of the repeats."""
        found = spread(self.times_s)
        assert found is not None, "a figure has at least one repeat"
        return found


def timed(call: Callable[[], object], num_repeats: int, num_warm_ups: int = 1) -> tuple[float, ...]:
    """Seconds of each repeat. The call has to wait for the device itself."""
    times = []
    for _ in range(num_warm_ups + num_repeats):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return tuple(times[num_warm_ups:])


def watch_memory() -> None:
    """Begin a measure: buffers of the last one are given back, and the peak starts anew."""
    mx.clear_cache()
    mx.reset_peak_memory()
