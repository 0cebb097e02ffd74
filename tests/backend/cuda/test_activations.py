"""The activation of fused projections against float64; without CUDA the operations that stand for it."""

import mlx.core as mx
import numpy as np
import pytest
from backend.cuda.references import TOLERANCE, error

from benchmarks.references import double, silu
from headrace.backend.cuda.kernel import CudaKernel
from headrace.backend.cuda.row_kernels import swiglu

pytestmark = pytest.mark.gpu

only_cuda = pytest.mark.skipif(not mx.cuda.is_available(), reason="there is only the kernel's source to test")
SHAPES = [
    *((1, 1, 2), (1, 3, 96), (2, 5, 1600), (1, 1, 1), (1, 3, 51), (2, 5, 1601), (1, 4, 1602), (2, 3, 1604)),
    *((1, 3, 8), (1, 2, 2056)),
]
"""Of widths by which a thread takes one number, two, four or eight, and of some of which the last block is not full."""


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gates_are_the_first_half(shape: tuple[int, int, int], dtype: mx.Dtype) -> None:
    projected = mx.array(3 * np.random.default_rng(0).standard_normal((*shape[:2], 2 * shape[2]))).astype(dtype)
    gate, value = np.split(double(projected), 2, axis=-1)
    got = swiglu(projected)
    assert got.dtype == dtype
    assert error(got, silu(gate) * value) < TOLERANCE[dtype]


@pytest.mark.parametrize("width", [1, 8])
@pytest.mark.parametrize(
    "gate", [-np.inf, -3e38, -1000.0, -89.0, -88.5, -64.5, -64.0, 64.0, 64.5, 3e38, np.inf, np.nan]
)
def test_gates_at_the_ends_of_the_range_leave_others_as_they_are(gate: float, width: int) -> None:
    gates = np.full(width, 0.5)
    gates[0] = gate
    got = np.array(swiglu(mx.array(np.concatenate([gates, np.ones(width)]), dtype=mx.float32)))
    wanted = gate if gate > 0 else 0.0
    assert np.allclose(got[0], np.nan if np.isnan(gate) or gate == -np.inf else wanted, atol=1e-25, equal_nan=True)
    assert np.allclose(got[1:], 0.5 / (1 + np.exp(-0.5)), rtol=1e-6)


SILUS = CudaKernel(
    "silus",
    (),
    ("x",),
    ("together", "alone"),
    "float own[8]; const int at = 8 * (blockIdx.x * blockDim.x + threadIdx.x);"
    "for (int i = 0; i < 8; i++) own[i] = x[at + i], alone[at + i] = silu(own[i]);"
    "silu(own); for (int i = 0; i < 8; i++) together[at + i] = own[i];",
)


@only_cuda
def test_several_numbers_get_the_bits_that_each_gets_alone() -> None:
    """All bfloat16 numbers, and float32 of all sizes, sorted: few have a large one beside them."""
    random, number = np.random.default_rng(0), 1 << 16
    all_short = (np.arange(number, dtype=np.uint32) << 16).view(np.float32)
    of_all_sizes = random.choice([-1, 1], number) * 10.0 ** random.uniform(-45, 38, number)
    x = np.concatenate(
        [all_short, of_all_sizes.astype(np.float32), random.uniform(-110, 110, number).astype(np.float32)]
    )
    x = np.where(np.isnan(x), np.float32(1), x)
    x = x[np.argsort(np.abs(x), kind="stable")]
    sizes = ((x.size,), mx.float32)
    together, alone = SILUS((mx.array(x),), {}, (x.size // 1024, 1, 1), 128, (sizes, sizes))
    bits, wanted = (np.array(found.view(mx.uint32)) for found in (together, alone))
    assert np.array_equal(bits[x > -np.inf], wanted[x > -np.inf])
    assert np.isnan(np.array(together)[x == -np.inf]).all()
    safe = np.abs(x) < 80
    wanted = x[safe] / (1 + np.exp(-x[safe].astype(np.float64)))
    assert np.allclose(np.array(together)[safe], wanted, rtol=1e-6, atol=1e-45)


ROUNDED = CudaKernel(
    "rounding",
    (),
    ("x",),
    ("out",),
    "const int i = blockIdx.x * blockDim.x + threadIdx.x; out[i] = rounded<T>(x[i]);",
)


@only_cuda
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_numbers_are_rounded_as_the_library_rounds_them(dtype: mx.Dtype) -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 1 << 16, dtype=np.uint64).astype(np.uint32)
    # every second one halfway between two of bfloat16
    bits[::2] = bits[::2] & 0xFFFF0000 | 0x8000
    numbers = bits.view(np.float32)
    x = mx.array(np.where(np.isnan(numbers), np.float32(0), numbers))
    (got,) = ROUNDED((x,), {"T": dtype}, (x.size // 128, 1, 1), 128, ((x.shape, mx.float32),))
    assert mx.array_equal(got.view(mx.uint32), x.astype(dtype).astype(mx.float32).view(mx.uint32))
