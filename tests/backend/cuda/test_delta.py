"""Kernels of gated delta layers against float64; without CUDA the operations that stand for them."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from backend.cuda.references import TOLERANCE, error

from benchmarks import references as layer_references
from benchmarks.references import double
from headrace.backend.cuda import delta
from headrace.backend.cuda.kernel import CudaKernel
from headrace.backend.cuda.shapes import DeltaShape, DeltaWeights, Prepared, Stash
from headrace.backend.gated_delta import replay_and_scan, scan

pytestmark = pytest.mark.gpu

HEADS = [(1, 1, 64, 16), (2, 4, 128, 128), (2, 6, 64, 48), (1, 2, 256, 32), (1, 1, 256, 256), (1, 2, 64, 208)]
"""Key heads, value heads, and their dimensions."""
SORTS = [
    *((HEADS[0], mx.float32), (HEADS[0], mx.float16), (HEADS[1], mx.float32), (HEADS[1], mx.bfloat16)),
    *((HEADS[2], mx.float32), (HEADS[2], mx.bfloat16), (HEADS[3], mx.float16), (HEADS[4], mx.float32)),
    (HEADS[5], mx.bfloat16),
]


def shape_of(num_k_heads: int, num_v_heads: int, head_k_dim: int, head_v_dim: int, kernel_size: int = 4) -> DeltaShape:
    """Of a projection of an odd width where the convolution has an odd one."""
    width = 2 * (num_k_heads * head_k_dim + num_v_heads * head_v_dim + num_v_heads) + kernel_size % 2
    return DeltaShape(num_k_heads, num_v_heads, head_k_dim, head_v_dim, kernel_size, width)


class Numbers:
    """Random arrays of a type."""

    def __init__(self, seed: int, dtype: mx.Dtype) -> None:
        self._random = np.random.default_rng(seed)
        self._dtype = dtype

    def __call__(self, *shape: int, dtype: mx.Dtype | None = None) -> mx.array:
        drawn = mx.array(self._random.standard_normal(shape).astype(np.float32))
        return drawn.astype(dtype or self._dtype)

    def gates(self, *shape: int) -> mx.array:
        """Within 0 and 1, float32."""
        return mx.sigmoid(self(*shape, dtype=mx.float32) + 1)

    def keys(self, *shape: int) -> mx.array:
        """Of length 1."""
        drawn = self(*shape, dtype=mx.float32)
        return (drawn / mx.sqrt((drawn * drawn).sum(axis=-1, keepdims=True))).astype(self._dtype)

    def weights(self, shape: DeltaShape) -> DeltaWeights:
        heads = shape.num_v_heads
        return DeltaWeights(
            0.3 * self(shape.num_channels, shape.kernel_size),
            mx.abs(self(heads, dtype=mx.float32)),
            self(heads),
            1 + 0.1 * self(shape.head_v_dim),
            mx.array([1e-6]),
        )

    def stash(self, rows: int, num_tokens: int, shape: DeltaShape) -> Stash:
        return Stash(
            self.keys(rows, num_tokens, shape.num_k_heads, shape.head_k_dim),
            self(rows, num_tokens, shape.num_v_heads, shape.head_v_dim),
            self.gates(rows, num_tokens, shape.num_v_heads),
            self.gates(rows, num_tokens, shape.num_v_heads),
        )


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("heads", "rows", "num_tokens", "num_pending"),
    [(HEADS[1], 1, 37, 20), (HEADS[0], 2, 5, 1), (HEADS[3], 1, 70, 69), (HEADS[2], 3, 1, 0), (HEADS[2], 1, 33, 0)],
)
def test_a_scan_is_the_rule_token_by_token(
    heads: tuple[int, int, int, int], rows: int, num_tokens: int, num_pending: int, dtype: mx.Dtype
) -> None:
    drawn = Numbers(num_tokens, dtype)
    num_k_heads, num_v_heads, head_k_dim, head_v_dim = heads
    q = drawn(rows, num_tokens, num_k_heads, head_k_dim) / head_k_dim
    k = drawn.keys(rows, num_tokens, num_k_heads, head_k_dim)
    v = drawn(rows, num_tokens, num_v_heads, head_v_dim)
    g, beta = drawn.gates(rows, num_tokens, num_v_heads), drawn.gates(rows, num_tokens, num_v_heads)
    state = drawn(rows, num_v_heads, head_v_dim, head_k_dim, dtype=mx.float32)
    between = state
    if num_pending:
        first = (x[:, :num_pending] for x in (k, v, g, beta))
        later = Prepared(*(x[:, num_pending:] for x in (q, k, v, g, beta)))
        got, between = replay_and_scan("cuda", Stash(*first), later, state)
    else:
        got = scan("cuda", q, k, v, g, beta, state)
    assert got.y.dtype == dtype and got.end_state.dtype == mx.float32
    for row in range(rows):
        y, end, kept = layer_references.scan(*(double(x)[row] for x in (q, k, v, g, beta, state)), num_pending)
        assert error(got.y[row], y[num_pending:]) < TOLERANCE[dtype]
        assert error(got.end_state[row], end) < TOLERANCE[mx.float32]
        assert error(between[row], kept) < TOLERANCE[mx.float32]


@pytest.mark.parametrize(("heads", "dtype"), SORTS, ids=str)
def test_the_norm_of_the_output_is_gated(heads: tuple[int, int, int, int], dtype: mx.Dtype) -> None:
    shape, drawn = shape_of(*heads), Numbers(3, dtype)
    weights, projected = drawn.weights(shape), drawn(1, 9, shape.width)
    y = drawn(9, shape.num_v_heads, shape.head_v_dim)
    got = delta.gated_norm(shape, weights, y, projected)
    assert got.dtype == dtype
    assert error(got, layer_references.gated_norm(shape, weights, double(y), double(projected)[0])) < TOLERANCE[dtype]


NORM_OF_A_STEP = CudaKernel(
    "norm_of_a_step",
    ("gated_norm.cuh",),
    ("y", "projected", "weight", "eps"),
    ("out",),
    "const int at = blockIdx.x * DV; const T* z = projected + blockIdx.x / HV * WIDTH + Z_AT + blockIdx.x % HV * DV;"
    "norm_head<DV>(y + at, weight, eps[0], [&](int d) { return silu(static_cast<float>(z[d])); }, out + at);",
)


@pytest.mark.skipif(not mx.cuda.is_available(), reason="there are only the kernels' sources to compare")
@pytest.mark.parametrize("kernel_size", [4, 3])
@pytest.mark.parametrize(("heads", "dtype"), SORTS, ids=str)
def test_the_norm_has_the_bits_of_a_steps(heads: tuple[int, int, int, int], dtype: mx.Dtype, kernel_size: int) -> None:
    shape, drawn = shape_of(*heads, kernel_size), Numbers(4, dtype)
    weights, projected = drawn.weights(shape), drawn(1, 5, shape.width)
    y = drawn(5, shape.num_v_heads, shape.head_v_dim)
    sizes = {"HV": shape.num_v_heads, "DV": shape.head_v_dim, "WIDTH": shape.width, "Z_AT": shape.z_at}
    (wanted,) = NORM_OF_A_STEP(
        (y, projected, weights.norm, weights.eps),
        {"T": dtype, **sizes},
        (5 * shape.num_v_heads, 1, 1),
        32,
        (((1, 5, shape.value_dim), dtype),),
    )
    assert mx.array_equal(delta.gated_norm(shape, weights, y, projected), wanted)


def test_heads_that_the_kernels_can_not_do_are_named() -> None:
    assert delta.refusal(128, 128) is None
    assert delta.refusal(96, 128) == "a key head of 96"
    assert delta.refusal(128, 24) == "a value head of 24"
    assert delta.refusal(128, 272) == "a value head of 272"
