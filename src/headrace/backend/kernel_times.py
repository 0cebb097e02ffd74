"""Times the few kernels that a model's speed follows from on this device. Takes some ten seconds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import mlx.core as mx

from headrace.backend.device import dtype_name

_CHAIN = 500
"""Operations that each wait for the one before."""
_LARGE_BYTES = 256 << 20
_SPENT_S = 0.3


def kernel_times() -> dict[str, float]:
    """By name, which ends with the unit: µs an operation, GB/s and GFLOP/s. A CPU computes smaller products."""
    times = {"launch_us": _chain_s() / _CHAIN * 1e6, "copy_gb_per_s": 2e-9 * _LARGE_BYTES / _copy_s()}
    is_cpu = mx.default_device().type == mx.DeviceType.cpu
    width, most_tokens, context = (512, 64, 512) if is_cpu else (4096, 512, 4096)
    for dtype in (mx.float32,) if is_cpu else (mx.float16, mx.bfloat16):
        name = dtype_name(dtype)
        x = mx.random.normal((most_tokens, width)).astype(dtype)
        weight = mx.random.normal((width, width)).astype(dtype)
        quantized = mx.quantize(weight, group_size=64, bits=4)
        num_bytes = sum(part.nbytes for part in quantized)
        for num_tokens in (1, 8, most_tokens):
            seconds = _median_s(_quantized(x[:num_tokens], quantized))
            operations = 2e-9 * num_tokens * width * width / seconds
            times[f"4_bit_{name}_{num_tokens}_gflop_per_s"] = operations
            times[f"4_bit_{name}_{num_tokens}_gb_per_s"] = 1e-9 * num_bytes / seconds
        times[f"matmul_{name}_gflop_per_s"] = 2e-9 * most_tokens * width * width / _median_s(_product(x, weight))
        for head_dim in (128, 256):
            for num_queries in (1, most_tokens):
                times[f"attention_{name}_{head_dim}_{num_queries}_us"] = 1e6 * _median_s(
                    _attention(head_dim, num_queries, context, dtype)
                )
    return {name: float(f"{value:.4g}") for name, value in times.items()}


def _quantized(x: mx.array, parts: Sequence[mx.array]) -> Callable[[], mx.array]:
    weight, scales, biases = parts
    return lambda: mx.quantized_matmul(x, weight, scales, biases, group_size=64, bits=4)


def _product(x: mx.array, weight: mx.array) -> Callable[[], mx.array]:
    return lambda: x @ weight


def _attention(head_dim: int, num_queries: int, context: int, dtype: mx.Dtype) -> Callable[[], mx.array]:
    """16 heads over 4 of keys."""
    queries = mx.random.normal((1, 16, num_queries, head_dim)).astype(dtype)
    keys = mx.random.normal((1, 4, context, head_dim)).astype(dtype)
    mask = None if num_queries == 1 else "causal"
    return lambda: mx.fast.scaled_dot_product_attention(queries, keys, keys, scale=0.1, mask=mask)


def _chain_s() -> float:
    one = mx.ones((16,))

    def chain() -> mx.array:
        x = one
        for _ in range(_CHAIN):
            x = x + one
        return x

    return _median_s(chain)


def _copy_s() -> float:
    large = mx.zeros((_LARGE_BYTES // 4,), mx.int32)
    return _median_s(lambda: large + 1)


def _median_s(compute: Callable[[], mx.array]) -> float:
    """Median of as many runs as fit the time, at least three, after one that builds what is needed."""
    mx.eval(compute())
    times: list[float] = []
    while len(times) < 3 or sum(times) < _SPENT_S:
        mx.synchronize()
        started = time.perf_counter()
        mx.eval(compute())
        times.append(time.perf_counter() - started)
    return statistics.median(times)
