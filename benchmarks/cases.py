"""A computation at a shape, how it is timed, and the shapes at which the CUDA kernels are measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from benchmarks.figures import watch_memory
from benchmarks.references import Float64, largest_error
from headrace.backend.cuda import moe
from headrace.backend.cuda.shapes import DeltaShape, HeadShape
from headrace.backend.device import DeviceKind
from headrace.bench.figures import Spread, spread

_NUM_REPEATS = 5
_CALLS_AT_ONCE = 10
"""Calls whose results are asked for together, so that the wait for the device is shared."""
_CALLS_OF_CHAIN = {"cpu": 4, "cuda": 40, "metal": 40}
_AHEAD = {"cpu": 64, "cuda": 8192, "metal": 4096}
"""Rows of the square matrices whose products a chain waits for: longer than the host takes for the chain."""

Step = Callable[[mx.array, int], Sequence[mx.array]]
Error = Callable[[Sequence[mx.array]], float]


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
    error: Error
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


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """What is measured. rows: pairs of rows and tokens of each. contexts: of attention. chunks: tokens of one row.

    products: outputs and inputs. experts: their width and inner width. cycled_bytes: of arrays that are used in turn.
    """

    dtype: mx.Dtype
    cycled_bytes: int
    rows: tuple[tuple[int, int], ...]
    contexts: tuple[int, ...]
    chunks: tuple[int, ...]
    delta: DeltaShape
    heads: HeadShape
    rotary: int
    inner_width: int
    products: tuple[tuple[int, int], ...]
    routing: moe.Routing
    experts: tuple[int, int]

    @property
    def num_tokens(self) -> tuple[int, ...]:
        """Of steps, each once."""
        return tuple(dict.fromkeys(rows * tokens for rows, tokens in self.rows))


def _delta_shape(num_k: int, num_v: int, dim: int) -> DeltaShape:
    return DeltaShape(num_k, num_v, dim, dim, 4, 2 * (num_k * dim + num_v * dim + num_v))


_SMALL = LayerSizes(
    mx.float32,
    1 << 20,
    ((1, 1), (4, 1), (2, 4)),
    (100,),
    (70,),
    _delta_shape(2, 4, 64),
    HeadShape(4, 2, 64),
    16,
    256,
    ((256, 128),),
    moe.Routing(8, 2, True),
    (128, 64),
)
_QWEN3_5 = LayerSizes(
    mx.bfloat16,
    400 << 20,
    ((1, 1), (8, 1), (8, 4), (32, 1)),
    (1024, 8192, 65536),
    (32, 2048),
    _delta_shape(16, 32, 128),
    HeadShape(16, 4, 256),
    64,
    9216,
    ((12352, 2560), (2560, 9216), (248320, 2560)),
    moe.Routing(256, 8, True),
    (2048, 512),
)
"""Those of Qwen3.5-4B, the experts of Qwen3.5-35B-A3B."""


def sizes_of(kind: DeviceKind) -> LayerSizes:
    return _QWEN3_5 if kind == "cuda" else _SMALL


def case_of(kernel: str, shape: str, num_bytes: int, chain: Chain, error: Error, form: str | None = None) -> Case:
    """Of a chain's first call. form: None for what a kernel's function runs on this machine."""
    form = form or ("kernel" if mx.cuda.is_available() else "operations")
    return Case(kernel, form, shape, num_bytes, lambda: chain.step(chain.x, 0), error, chain=chain)


def error_of_first(wanted: Float64, part: Callable[[mx.array], mx.array] = lambda y: y) -> Error:
    """part: of the first result, what is compared."""
    return lambda found: largest_error(part(found[0]), wanted)


def error_of_all(wanted: Sequence[Float64]) -> Error:
    return lambda found: max(largest_error(*pair) for pair in zip(found, wanted, strict=True))


def rows_name(num_rows: int, num_tokens: int) -> str:
    return f"{num_rows} × {num_tokens} tokens"


def num_copies(sizes: LayerSizes, num_bytes: int) -> int:
    """How many things of so many bytes are taken in turn."""
    return -(-sizes.cycled_bytes // num_bytes)


def normal(sizes: LayerSizes, *shape: int, scale: float = 1.0) -> mx.array:
    """Random numbers, not computed yet."""
    return mx.random.normal(shape, dtype=sizes.dtype, scale=scale)


def num_bytes(arrays: Sequence[mx.array]) -> int:
    return sum(array.nbytes for array in arrays)
