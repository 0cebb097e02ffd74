"""Products of a few tokens with large weights on NVIDIA GPUs, dense or quantised; of many with quantised ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import mlx.core as mx

from headrace.backend.cuda import kernel, ops
from headrace.backend.cuda.kernel import CudaKernel, or_ops
from headrace.backend.cuda.row_kernels import swiglu

MOST_TOKENS = 96
"""For which quantised weights go through `skinny`, 16 tokens a block. With 4-bit weights of 12,352 × 2,560 an H200
takes 0.019 ms for 16, half of it with idle processors: 96 should take 0.09 ms. The dense product takes 0.05 ms, and
making the weights dense writes 63 MB, 0.02 ms at least. Estimated, not timed."""

MOST_TOKENS_OF_DENSE = 32
"""For which weights that are not quantised do: as many as a block takes. An H200 takes as long as for MLX's products of
up to 8 tokens and what follows them (docs/benchmarks.md), and the host a third of the time."""

_WIDE_BLOCKS = 264
"""Blocks of 32 features from which on a block is that wide: two on each of the 132 multiprocessors of an H100."""

_NONE = "static_cast<const T*>(nullptr)"
"""An array that a kernel's function does without."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Of a linear layer, or of experts: `[…, N, K]` in the activations' type, or quantised as `mx.quantize` does.

    Quantised: weight uint32 `[…, N, K · bits / 32]`, scales and biases `[…, N, K / group_size]`.
    is_invariant: whether any number of tokens goes through `skinny`, which gives a token the same sums whatever is
    beside it.
    """

    weight: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None
    bits: int = 16
    group_size: int = 1
    is_invariant: bool = False

    @property
    def activations(self) -> mx.Dtype:
        return self.weight.dtype if self.scales is None else self.scales.dtype

    @property
    def num_features(self) -> int:
        return int(self.weight.shape[-2])

    @property
    def num_inputs(self) -> int:
        return int(self.weight.shape[-1]) * (1 if self.scales is None else 32 // self.bits)

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return (self.weight,) if self.scales is None or self.biases is None else (self.weight, self.scales, self.biases)


@dataclass(frozen=True, slots=True)
class Cut:
    """How the work is cut: tiles of 16 features a block makes, warps that share K, and steps of K under way in each."""

    tiles: int
    warps: int
    stages: int


_WIDE, _NARROW = Cut(2, 4, 3), Cut(1, 8, 4)


def refusal(weights: Weights, dtype: mx.Dtype) -> str | None:
    """Why the kernels don't do products of activations of this type with such weights; None if they do.

    Without CUDA, where operations stand for them, any type of activations is done.
    """
    if mx.cuda.is_available() and dtype not in (mx.bfloat16, mx.float16):
        return f"activations in {dtype}"
    if weights.scales is None:
        if weights.weight.dtype != dtype:
            return f"weights in {weights.weight.dtype} for activations in {dtype}"
    elif weights.biases is None or weights.bits not in (4, 8) or weights.group_size not in (32, 64, 128):
        return f"weights of {weights.bits} bits in groups of {weights.group_size}"
    elif weights.scales.dtype != dtype:
        return f"scales in {weights.scales.dtype} for activations in {dtype}"
    step = step_of(weights)
    if weights.num_inputs % step:
        return f"{weights.num_inputs} inputs, no multiple of {step}"
    return None if most_together(weights) else f"{kernel.largest_block()} bytes of shared memory"


def step_of(weights: Weights) -> int:
    return 64 if weights.scales is None else max(128, 2 * weights.group_size)


def most_together(weights: Weights) -> int:
    """Tokens that a block takes: as many as the shared memory holds beside either cut; 0 if not even 8.

    32 at most, 16 of quantised weights, whose sums of groups take more registers.
    """

    def needed(num_tokens: int) -> int:
        return max(shared_bytes(weights, replace(cut, stages=2), token_tiles(num_tokens)) for cut in (_WIDE, _NARROW))

    most = (32, 16, 8) if weights.scales is None else (16, 8)
    return next((n for n in most if needed(n) <= kernel.largest_block()), 0)


def cut_of(weights: Weights, num_tokens: int) -> Cut:
    """Of a block with so many tokens.

    Which warp adds what doesn't depend on the number of tokens: a token's result is the same in any company."""
    num_narrow = -(-weights.num_features // 16)
    if num_narrow >= 2 * _WIDE_BLOCKS:
        wanted = _WIDE
    else:  # with fewer stages more blocks run at a time
        wanted = replace(_NARROW, stages=4 if num_tokens <= 8 and num_narrow <= _WIDE_BLOCKS else 3)
    return fitted(weights, wanted, token_tiles(num_tokens))


def token_tiles(num_tokens: int) -> int:
    return 1 << (-(-num_tokens // 8) - 1).bit_length()


def fitted(weights: Weights, cut: Cut, num_tiles: int) -> Cut:
    """With as many stages as a block's shared memory holds, two at least."""
    each = shared_bytes(weights, replace(cut, stages=1), num_tiles)
    return replace(cut, stages=max(2, min(cut.stages, kernel.largest_block() // each)))


def shared_bytes(weights: Weights, cut: Cut, num_tiles: int) -> int:
    """Of a block: WARP in stream.cuh for each warp."""
    step = step_of(weights)
    scales = 0 if weights.scales is None else cut.tiles * 16 * 2 * (step // weights.group_size) * 2
    stage = cut.tiles * 16 * step * weights.bits // 8 + num_tiles * 8 * step * 2 + scales
    return cut.warps * cut.stages * stage


def residual_of(is_there: bool) -> str:
    return "residual" if is_there else _NONE


@cache
def _skinny(
    bits: int, group_size: int, cut: Cut, num_tiles: int, room: int, has_residual: bool, is_gated: bool
) -> CudaKernel:
    is_quantised = bits < 16
    inputs = ["x", "weight", *["scales", "biases"] * is_quantised, *["residual"] * has_residual]
    body = (
        "int num_tokens = 1; for (int i = 0; i + 1 < x_ndim; i++) num_tokens *= x_shape[i];"
        f"skinny<T, {bits}, {group_size}, {cut.tiles}, {num_tiles}, {cut.stages}, {cut.warps}, "
        f"{str(is_gated).lower()}>("
        f"x, num_tokens, weight_shape[0], x_shape[x_ndim - 1], weight, "
        f"{'scales, biases' if is_quantised else f'{_NONE}, {_NONE}'}, {residual_of(has_residual)}, out);"
    )
    name = f"skinny_{bits}_{group_size}_{cut.tiles}_{num_tiles}_{cut.stages}"
    name += "_added" * has_residual + "_gated" * is_gated
    sources = ("mma.cuh", "stream.cuh", "skinny.cuh")
    return CudaKernel(name, sources, inputs, ("out",), body, room)


@or_ops(ops.product)
def skinny(x: mx.array, weights: Weights, residual: mx.array | None = None, *, is_gated: bool = False) -> mx.array:
    """`x […, K]` times the transposed weights, `[…, N]`, summed in float32.

    residual: as many numbers, added to them once they are rounded. is_gated: the features are gates and then values;
    gives `[…, N / 2]` with the bits that `swiglu` makes of them.
    """
    *rows, num_inputs = x.shape
    num_tokens = x.size // num_inputs
    together = min(num_tokens, most_together(weights))
    num_tiles, cut = token_tiles(together), cut_of(weights, together)
    form, room = (weights.bits, weights.group_size, cut, num_tiles), shared_bytes(weights, cut, num_tiles)
    width = weights.num_features // (2 if is_gated else 1)
    (out,) = _skinny(*form, room, residual is not None, is_gated)(
        (x, *weights.arrays, *(() if residual is None else (residual,))),
        {"T": x.dtype},
        (-(-num_tokens // together), -(-width // (cut.tiles * (8 if is_gated else 16))), 1),
        32 * cut.warps,
        (((*rows, width), x.dtype),),
    )
    return out


@cache
def _dense(bits: int, group: int) -> CudaKernel:
    size = f"static_cast<long>(weight_shape[0]) * weight_shape[1] * {32 // bits}"
    body = f"dense<T, {bits}, {group}>(weight, scales, biases, {size}, out);"
    return CudaKernel(f"dense_{bits}_{group}", ("dense.cuh",), ("weight", "scales", "biases"), ("out",), body)


@or_ops(ops.dense)
def dense(weights: Weights) -> mx.array:
    """Quantised weights of a linear as numbers `[N, K]`, in the activations' type."""
    shape = weights.num_features, weights.num_inputs
    (out,) = _dense(weights.bits, weights.group_size)(
        weights.arrays,
        {"T": weights.activations},
        (-(-shape[0] * shape[1] // (8 * 256)), 1, 1),
        256,
        ((shape, weights.activations),),
    )
    return out


def product(x: mx.array, weights: Weights, residual: mx.array | None = None) -> mx.array:
    """`x […, K]` times the transposed weights; for many tokens quantised ones are rounded to their activations' type.

    residual: see `skinny`.
    """
    if not _is_skinny(x, weights):
        found = x @ (weights.weight if weights.scales is None else dense(weights)).T
    elif residual is None or residual.dtype == x.dtype:
        return skinny(x, weights, residual)
    else:
        found = skinny(x, weights)
    return found if residual is None else residual + found


def gated(x: mx.array, weights: Weights) -> mx.array:
    """`swiglu` of the same product, whose features are gates and then values."""
    return skinny(x, weights, is_gated=True) if _is_skinny(x, weights) else swiglu(product(x, weights))


def _is_skinny(x: mx.array, weights: Weights) -> bool:
    """Whether `skinny` computes this: few tokens, or any number if invariant, in the weights' type.

    A model's additions may have widened it. Raises ValueError for an invariant product in another type.
    """
    if weights.is_invariant and x.dtype != weights.activations:
        raise ValueError(f"invariant products need activations in {weights.activations}, not {x.dtype}")
    most = MOST_TOKENS_OF_DENSE if weights.scales is None else MOST_TOKENS
    return (weights.is_invariant or x.size // x.shape[-1] <= most) and x.dtype == weights.activations
