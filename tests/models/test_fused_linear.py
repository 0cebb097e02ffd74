"""Products with quantised weights: by which road they go for how many tokens, and their sums in float64."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from benchmarks.references import double
from headrace.backend.cuda.row_kernels import swiglu
from headrace.backend.operations import operations
from headrace.models.fused_linear import FusedLinear, product_refusal

pytestmark = pytest.mark.gpu

DTYPE = mx.bfloat16 if mx.cuda.is_available() else mx.float32
NUM_TOKENS = (1, 16, 17, 96, 97, 255, 256)


@pytest.mark.parametrize(
    ("group_size", "bits", "mode", "library"),
    [
        (64, 4, "affine", ()),
        (32, 8, "affine", ()),
        (64, 6, "affine", (1, 16, 17, 96, 97, 255)),
        (32, 4, "mxfp4", (1, 16, 17, 96, 97, 255)),
    ],
)
def test_the_librarys_quantised_product_is_left_to_what_nothing_else_does(
    group_size: int, bits: int, mode: str, library: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(bits)
    held = [nn.Linear(256, width, bias=True) for width in (24, 40)]
    for one in held:
        one.set_dtype(DTYPE)
    parts = [one.to_quantized(group_size, bits, mode) for one in held]
    stored = [(part.weight, part.scales, part.get("biases"), group_size, bits, mode) for part in parts]
    weights = np.concatenate([double(mx.dequantize(*one)) for one in stored])
    bias = np.concatenate([double(part.bias) for part in parts])
    product = FusedLinear(parts)
    for number in NUM_TOKENS:
        x = mx.array(rng.standard_normal((1, number, 256))).astype(DTYPE)
        got = product(x)
        assert ("QuantizedMatmul" in operations([got])) is (number in library), number
        want = double(x) @ weights.T + bias
        np.testing.assert_allclose(double(got), want, rtol=0, atol=1e-2 * np.abs(want).max())


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("width", [40, 41])
def test_residuals_and_gates_are_the_same_by_whichever_road(width: int, bits: int | None, has_bias: bool) -> None:
    rng = np.random.default_rng(7)
    parts = []
    for _ in range(2):
        part = nn.Linear(256, width, bias=has_bias)
        part.set_dtype(DTYPE)
        parts.append(part if bits is None else part.to_quantized(64, bits))
    product = FusedLinear(parts)
    for number in NUM_TOKENS:
        x, residual = (mx.array(rng.standard_normal((1, number, size))).astype(DTYPE) for size in (256, 2 * width))
        plain = product(x)
        assert mx.array_equal(product(x, residual), residual + plain)
        assert mx.array_equal(product.gated(x), swiglu(plain))


@pytest.mark.parametrize("bits", [None, 4])
def test_a_bias_and_a_residual_are_added_once_behind_a_sum_over_ranks(bits: int | None) -> None:
    """Of one rank, whose sum is what it has; tests/ranks has two."""
    rng = np.random.default_rng(7)
    whole = nn.Linear(256, 40, bias=True)
    whole.set_dtype(DTYPE)
    whole = whole if bits is None else whole.to_quantized(64, bits)
    part = nn.layers.distributed.shard_linear(whole, "sharded-to-all", group=mx.distributed.init())
    stored = (whole.weight,) if bits is None else (whole.weight, whole.scales, whole.biases, 64, bits)
    weights, bias = double(stored[0] if bits is None else mx.dequantize(*stored)), 10 * double(whole.bias)
    part.bias = 10 * whole.bias  # so that twice the bias differs by more than roundings
    product = FusedLinear([part])
    assert not product.adds_residual
    assert product_refusal(part) == "weights that are split over ranks"
    for number in NUM_TOKENS:
        x, residual = (mx.array(rng.standard_normal((1, number, size))).astype(DTYPE) for size in (256, 40))
        want = double(x) @ weights.T + bias
        for found, expected in ((product(x), want), (product(x, residual), want + double(residual))):
            np.testing.assert_allclose(double(found), expected, rtol=0, atol=1e-2 * np.abs(expected).max())
