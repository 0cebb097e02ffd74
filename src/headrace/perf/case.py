"""A computation at a shape, and what it takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from headrace.backend.device import DeviceKind
from headrace.bench.figures import Spread, spread
from headrace.perf.timing import watch_memory

_NUM_REPEATS = 5
_CALLS_AT_ONCE = 10
"""Calls whose results are asked for together, so that the wait for the device is shared."""
_CALLS_OF_CHAIN = {"cpu": 4, "cuda": 40, "metal": 40}
_AHEAD = {"cpu": 64, "cuda": 8192, "metal": 4096}
"""Rows of the square matrices whose products a chain waits for: longer than the host takes for the chain."""

Step = Callable[[mx.array, int], Sequence[mx.array]]


@dataclass(frozen=True, slots=True)
class Chain:
    """Calls that wait for each other, so that none can begin before the last one's end.

    step: results of the i-th call, the first of x's type. x: its input, to which a number of the last call's first
    result is added. What has to come from memory differs from call to call.
    """

    x: mx.array
    step: Step


@dataclass(frozen=True, slots=True)
class Case:
    """A form at a shape. call: gives its results, not evaluated. error: of results, over the largest right value.

    num_bytes: that a call has to move at least. chain: of calls that take the host longer than the device.
    """

    kernel: str
    form: str
    shape: str
    num_bytes: int
    call: Callable[[], Sequence[mx.array]]
    error: Callable[[Sequence[mx.array]], float]
    is_long: bool = False
    chain: Chain | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """time_s: of one call."""

    case: Case
    time_s: Spread
    error: float


def measured(case: Case, kind: DeviceKind) -> Measured:
    """The time of a call once its kernels are built, without that of building its graph.

    A chain's is the device's time alone.
    """
    watch_memory()
    found = case.call()
    mx.eval(found)
    error = case.error(found)
    del found
    times = _plain(case) if case.chain is None else _chained(case.chain, kind)
    of_repeats = spread(times)
    assert of_repeats is not None, "there are repeats"
    return Measured(case, of_repeats, error)


def _plain(case: Case) -> list[float]:
    num_calls = 1 if case.is_long else _CALLS_AT_ONCE
    times = []
    for _ in range(_NUM_REPEATS + 1):
        calls = [case.call() for _ in range(num_calls)]
        started = time.perf_counter()
        mx.eval(calls)
        times.append((time.perf_counter() - started) / num_calls)
        del calls
    return times[1:]


def _chained(chain: Chain, kind: DeviceKind) -> list[float]:
    """Per call: the chain's time, less that of the same chain without the calls."""
    size, num_calls = _AHEAD[kind], _CALLS_OF_CHAIN[kind]
    ahead = (mx.random.normal((size, size)) * size**-0.5).astype(mx.bfloat16)
    mx.eval(ahead)
    links, calls = [], []
    for repeat in range(_NUM_REPEATS + 1):
        places = range(repeat * num_calls, (repeat + 1) * num_calls)
        links.append(_seconds(Chain(chain.x, lambda x, _: (x,)), ahead, places))
        calls.append(_seconds(chain, ahead, places))
    of_links = statistics.median(links[1:])
    # a call of less than the clock's noise takes nothing
    return [max(each - of_links, 0.0) / num_calls for each in calls[1:]]


def _seconds(chain: Chain, ahead: mx.array, places: range) -> float:
    """Of a chain behind two products: the host queues it while the device is at these."""
    long = ahead @ ahead @ ahead
    x, found = chain.x + long[0, 0].astype(chain.x.dtype), ()  # type: mx.array, Sequence[mx.array]
    for i in places:
        found = chain.step(x, i)
        x = chain.x + found[0].reshape(-1)[:1]
    started = time.perf_counter()
    mx.async_eval(long)
    mx.eval(x, found)
    return time.perf_counter() - started
