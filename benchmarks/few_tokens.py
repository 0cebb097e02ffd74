"""The kernels of what works on packed tokens, whatever their rows; without CUDA, what stands for them.

Weights are so many, and taken in turn, that a GPU's cache serves none of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import mlx.core as mx
import numpy as np

from benchmarks import references as right
from benchmarks.cases import (
    Case,
    Chain,
    LayerSizes,
    Step,
    case_of,
    error_of_all,
    error_of_first,
    normal,
    num_bytes,
    num_copies,
    sizes_of,
)
from benchmarks.references import Float64, double
from headrace.backend.cuda import matmul, moe, row_kernels
from headrace.backend.device import DeviceKind

_GROUP = 64
_CHECKED_FEATURES = 1024
"""Of a product, the first ones."""
_NUM_LOGITS = 16


def few_tokens(kind: DeviceKind) -> Iterator[Case]:
    """Activations, sums with their norms, products beside MLX's own, experts, and greedy draws; the kernel of products
    on CUDA alone."""
    sizes = sizes_of(kind)
    for num_tokens in sizes.num_tokens:
        yield _swiglu(sizes, num_tokens)
        yield _sum_norm(sizes, num_tokens)
    for num_out, num_in in sizes.products:
        for bits in (16, 4):
            yield from _products(sizes, num_out, num_in, bits)
    for bits in (16, 4):
        yield from _experts(sizes, bits)
    for num_tokens in sizes.num_tokens:
        yield _most_likely(sizes, num_tokens)


def _swiglu(sizes: LayerSizes, num_tokens: int) -> Case:
    x = normal(sizes, 1, num_tokens, 2 * sizes.inner_width)
    mx.eval(x)
    gate, value = np.split(double(x), 2, axis=-1)
    wanted = right.silu(gate) * value
    return case_of(
        "activations.swiglu",
        f"{num_tokens} × {sizes.inner_width}",
        3 * x.nbytes // 2,
        Chain(x, lambda given, _: [row_kernels.swiglu(given)]),
        error_of_first(wanted),
    )


def _sum_norm(sizes: LayerSizes, num_tokens: int) -> Case:
    x, y = (normal(sizes, 1, num_tokens, sizes.products[0][1]) for _ in range(2))
    weight, eps = 1 + normal(sizes, x.shape[-1], scale=0.1), mx.array([1e-6])
    mx.eval(x, y, weight, eps)
    total = double(x + y)
    wanted = total, right.rms_norm(total, double(weight), 1e-6)
    return case_of(
        "norm.sum_norm",
        f"{num_tokens} × {x.shape[-1]}",
        4 * x.nbytes,
        Chain(x, lambda given, _: list(row_kernels.sum_norm(given, y, weight, eps))),
        error_of_all(wanted),
    )


def _products(sizes: LayerSizes, num_out: int, num_in: int, bits: int) -> Iterator[Case]:
    held = _cycled_weights(sizes, (num_out, num_in), bits)
    dense, weight_bytes = _dense(held[0], slice(_CHECKED_FEATURES)), num_bytes(held[0].arrays)

    def skinny(x: mx.array, i: int) -> list[mx.array]:
        return [matmul.skinny(x, held[i % len(held)])]

    def library(x: mx.array, i: int) -> list[mx.array]:
        weights = held[i % len(held)]
        if weights.scales is None:
            return [x @ weights.weight.T]
        stored = weights.weight, weights.scales, weights.biases
        return [mx.quantized_matmul(x, *stored, transpose=True, group_size=_GROUP, bits=bits)]

    forms: dict[str, Step] = {"MLX": library}
    if mx.cuda.is_available():
        forms = {"kernel": skinny, **forms}
    stored = "dense" if bits == 16 else f"{bits}-bit"
    for num_tokens in sizes.num_tokens:
        x = normal(sizes, 1, num_tokens, num_in)
        mx.eval(x)
        moved = weight_bytes + x.nbytes + x.itemsize * num_tokens * num_out
        error = error_of_first(double(x) @ dense.T, lambda y: y[..., :_CHECKED_FEATURES])
        for form, step in forms.items():
            shape = f"{num_tokens} × {num_in} to {num_out}, {stored}"
            yield case_of("matmul.skinny", shape, moved, Chain(x, step), error, form)


def _cycled_weights(sizes: LayerSizes, shape: tuple[int, ...], bits: int) -> list[matmul.Weights]:
    first = _weights(sizes, shape, bits)
    return [first, *(_weights(sizes, shape, bits) for _ in range(num_copies(sizes, num_bytes(first.arrays)) - 1))]


def _weights(sizes: LayerSizes, shape: tuple[int, ...], bits: int) -> matmul.Weights:
    dense = normal(sizes, *shape, scale=shape[-1] ** -0.5)
    weights = matmul.Weights(dense)
    if bits < 16:
        weights = matmul.Weights(*mx.quantize(dense, group_size=_GROUP, bits=bits), bits, _GROUP)
    mx.eval(weights.arrays)
    return weights


def _dense(weights: matmul.Weights, part: int | slice) -> Float64:
    """An expert's matrix, or the first features of one."""
    if weights.scales is None or weights.biases is None:
        return double(weights.weight[part])
    stored = weights.weight[part], weights.scales[part], weights.biases[part]
    return double(mx.dequantize(*stored, group_size=weights.group_size, bits=weights.bits))


def _experts(sizes: LayerSizes, bits: int) -> Iterator[Case]:
    """Routing, experts and a shared one; which experts are read follows from the logits, which are taken in turn."""
    routing, (width, inner) = sizes.routing, sizes.experts
    shapes = ((inner, width), (inner, width), (width, inner))
    every = moe.Experts(*(_weights(sizes, (routing.num_experts, *shape), bits) for shape in shapes))
    each = sum(num_bytes(weights.arrays) for weights in every.all) // routing.num_experts
    shared = [moe.Experts(*(_weights(sizes, s, bits) for s in shapes)) for _ in range(num_copies(sizes, each))]
    own = tuple(_dense(weights, slice(None)) for weights in shared[0].all)
    for num_tokens in sizes.num_tokens:
        x = normal(sizes, num_tokens, width)
        logits = [normal(sizes, num_tokens, routing.num_experts + 1, scale=2.0) for _ in range(_NUM_LOGITS)]
        mx.eval(x, logits)
        wanted = right.mixture(
            double(x)[0],
            double(logits[0])[0],
            lambda e: (_dense(every.gate, e), _dense(every.up, e), _dense(every.down, e)),
            (own[0], own[1], own[2]),
            routing.per_token,
            routing.normed,
        )
        yield case_of(
            "moe.route, mix",
            f"{num_tokens} × {width}, {routing.num_experts} of {inner}, {'dense' if bits == 16 else f'{bits}-bit'}",
            round((_num_read(routing, logits) + 1) * each) + 2 * x.nbytes,
            Chain(x, _mix(routing, every, shared, logits)),
            error_of_first(wanted, lambda y: y[0]),
        )


def _mix(routing: moe.Routing, every: moe.Experts, shared: list[moe.Experts], logits: list[mx.array]) -> Step:
    return lambda x, i: [moe.mix(routing, every, shared[i % len(shared)], x, logits[i % len(logits)])]


def _num_read(routing: moe.Routing, logits: Sequence[mx.array]) -> float:
    """Experts that a call reads on average."""
    chosen = [np.argsort(-double(each)[:, : routing.num_experts], axis=-1)[:, : routing.per_token] for each in logits]
    return float(np.mean([len(np.unique(each)) for each in chosen]))


def _most_likely(sizes: LayerSizes, num_rows: int) -> Case:
    num_tokens = sizes.products[-1][0]
    logits = normal(sizes, num_rows, num_tokens)
    mx.eval(logits)
    wanted = double(logits).argmax(axis=-1).astype(np.float64)
    return case_of(
        "greedy.most_likely",
        f"{num_rows} × {num_tokens}",
        logits.nbytes,
        Chain(logits, lambda given, _: [row_kernels.most_likely(given, -1)]),
        error_of_first(wanted),
    )
