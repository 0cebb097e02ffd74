"""A sum and its norm against float64; without CUDA the operations that stand for them."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from backend.cuda.references import TOLERANCE, error

from benchmarks.references import double, rms_norm
from headrace.backend.cuda.row_kernels import sum_norm

pytestmark = pytest.mark.gpu

WIDTHS = (1, 96, 1001, 1028, 2560, 5120, 8192, 16384, 32768)
"""Of odd ones a thread reads a number at a time; of the widest it keeps more than one vector."""
RANDOM = tuple(int(width) for width in np.random.default_rng(0).integers(1, 12_000, 4))


def arrays(shape: tuple[int, ...], dtype: mx.Dtype) -> tuple[mx.array, mx.array, mx.array]:
    """Two to be added, of different sizes, and a weight."""
    random = np.random.default_rng(1)
    x, y, weight = (random.standard_normal(size) for size in (shape, shape, shape[-1:]))
    return tuple(mx.array(a).astype(dtype) for a in (3 * x, y, 1 + weight / 4))  # type: ignore[return-value]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("width", [*WIDTHS, *RANDOM])
def test_the_sum_is_rounded_and_then_normed(width: int, dtype: mx.Dtype) -> None:
    x, y, weight = arrays((2, 3, width), dtype)
    total, normed = sum_norm(x, y, weight, mx.array([1e-6]))
    assert total.dtype == normed.dtype == dtype
    assert mx.array_equal(total, (x.astype(mx.float32) + y.astype(mx.float32)).astype(dtype))
    assert error(normed, rms_norm(double(total), double(weight), 1e-6)) < TOLERANCE[dtype]


def test_epsilon_is_added_to_the_mean_square() -> None:
    x = mx.full((1, 64), 3.0)
    _, normed = sum_norm(x, x - 2, mx.full((64,), 2.0), mx.array([9.0]))
    # 4 / √(16 + 9), twice
    assert mx.allclose(normed, mx.full((1, 64), 1.6))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_the_norm_is_rounded_where_the_librarys_is(dtype: mx.Dtype) -> None:
    """Before the weight and behind it; what its sum of squares is in another order may move the last bit of few."""
    x, y, weight = arrays((1, 64, 640), dtype)
    total, normed = sum_norm(x, y, weight, mx.array([1e-5]))
    same = double(normed) == double(mx.fast.rms_norm(total, weight, 1e-5))
    assert same.mean() > 0.99


@pytest.mark.parametrize("num_tokens", [1, 2, 300, 2000])
def test_a_token_gets_the_same_in_any_company(num_tokens: int) -> None:
    x, y, weight = arrays((1, num_tokens, 320), mx.bfloat16)
    eps = mx.array([1e-6])
    together, last = sum_norm(x, y, weight, eps), sum_norm(x[:, -1:], y[:, -1:], weight, eps)
    assert all(mx.array_equal(many[:, -1:], one) for many, one in zip(together, last, strict=True))
