"""The activation of fused projections against float64; without CUDA the operations that stand for it."""

import mlx.core as mx
import numpy as np
import pytest
from backend.cuda.references import TOLERANCE, error

from benchmarks.references import double, silu
from headrace.backend.cuda.row_kernels import swiglu

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 2), (1, 3, 96), (2, 5, 1600), (1, 1, 1), (1, 3, 51), (2, 5, 1601)])
def test_gates_are_the_first_half(shape: tuple[int, int, int], dtype: mx.Dtype) -> None:
    projected = mx.array(3 * np.random.default_rng(0).standard_normal((*shape[:2], 2 * shape[2]))).astype(dtype)
    gate, value = np.split(double(projected), 2, axis=-1)
    got = swiglu(projected)
    assert got.dtype == dtype
    assert error(got, silu(gate) * value) < TOLERANCE[dtype]
