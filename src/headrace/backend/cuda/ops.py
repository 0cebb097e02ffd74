"""What each kernel computes, in MLX's operations: for machines without CUDA, and to read.

Arguments and results are those of the kernels' own functions, which come here where there is no such GPU. All is
computed in float32 and rounded where the kernels round. Nothing here is made to be fast.

What a kernel leaves unwritten is NaN here, so that a reader notices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import mlx.core as mx

from headrace.backend.cuda.shapes import HeadShape, ProjectedHeads, Projection
from headrace.backend.rope import rotated

if TYPE_CHECKING:
    from headrace.backend.cuda import matmul, moe
    from headrace.backend.cuda.put import Part

Rows = list[list[int]]
"""A plan as Python reads it."""


def swiglu(projected: mx.array) -> mx.array:
    gate, value = mx.split(projected.astype(mx.float32), 2, axis=-1)
    return _gated(gate, value, projected.dtype).astype(projected.dtype)


def _gated(gate: mx.array, value: mx.array, dtype: mx.Dtype) -> mx.array:
    """silu(gate) · value, each rounded to the type, in float32."""
    return rounded(rounded(silu(gate), dtype) * value, dtype)


def sum_norm(x: mx.array, y: mx.array, weight: mx.array, eps: mx.array) -> tuple[mx.array, mx.array]:
    total = x + y
    one = mx.ones(total.shape[-1])
    scaled = normed(total.astype(mx.float32), one, eps, total.dtype) * weight.astype(mx.float32)
    return total, scaled.astype(total.dtype)


def most_likely(logits: mx.array, otherwise: int) -> mx.array:
    """The first highest, if that is finite and there is no NaN: not every device's argmax finds one."""
    ids = mx.argmax(logits, axis=-1, keepdims=True)
    highest = mx.take_along_axis(logits, ids, axis=-1)
    num_nan = mx.sum(logits != logits, axis=-1, keepdims=True)
    # a comparison, because `isfinite` is several operations
    is_fit = (mx.abs(highest) < mx.inf) & (num_nan == 0)
    return mx.where(is_fit, ids.astype(mx.int32), otherwise).squeeze(-1)


def put(parts: Sequence[Part], numbers: Sequence[int]) -> mx.array:
    """Changes the tables' Python objects, so that every reference to them has the new numbers."""
    tables: list[mx.array] = []
    for part, number in zip(parts, numbers, strict=True):
        shape = list(part.tables[0].shape)
        shape[part.axis] = number
        values = part.values.reshape(len(part.tables), *shape)
        for table, own in zip(part.tables, values, strict=True):
            # what fills a table whole would become the table
            own = own * mx.array(1, own.dtype) if own.shape == table.shape else own
            table[(slice(None),) * part.axis + (slice(part.at, part.at + number),)] = own
        tables += part.tables
    # computed after the writes, and no view that would keep a table's memory
    return mx.stack([table.reshape(-1)[0] != 0 for table in tables]).any().astype(mx.int32)


def collect(arrays: Sequence[mx.array], outer: int, inner: int, at: int, number: int) -> mx.array:
    """Parts, stacked; one alone times 1, because a view of a whole array would be that array."""
    parts = [array.reshape(outer, -1, inner)[:, at : at + number] for array in arrays]
    return mx.stack(parts) if len(parts) > 1 else parts[0][None] * mx.array(1, parts[0].dtype)


# Products


def product(
    x: mx.array, weights: matmul.Weights, residual: mx.array | None = None, *, is_gated: bool = False
) -> mx.array:
    """With the transposed weights."""
    found = (x.astype(mx.float32) @ _numbers(weights).T).astype(x.dtype)
    found = swiglu(found) if is_gated else found
    return found if residual is None else residual + found


def dense(weights: matmul.Weights) -> mx.array:
    return _numbers(weights).astype(weights.activations)


def _numbers(weights: matmul.Weights) -> mx.array:
    if weights.scales is None or weights.biases is None:
        return weights.weight.astype(mx.float32)
    scales, biases = weights.scales.astype(mx.float32), weights.biases.astype(mx.float32)
    return mx.dequantize(weights.weight, scales, biases, weights.group_size, weights.bits)


# Mixtures of experts


def mix(
    routing: moe.Routing,
    experts: moe.Experts,
    shared: moe.Experts | None,
    x: mx.array,
    logits: mx.array,
    residual: mx.array | None = None,
    num_tokens: mx.array | None = None,
) -> mx.array:
    """Each token's likeliest experts by their share, then the one that all have; no number for padding."""
    routed = logits[:, : routing.num_experts].astype(mx.float32)
    shares, chosen = mx.softmax(routed, axis=-1), mx.argsort(-routed, axis=-1)[:, : routing.per_token]
    weights = mx.take_along_axis(shares, chosen, axis=-1)
    if routing.normed:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    y = sum((weights[:, j, None] * _expert(experts, x, chosen[:, j]) for j in range(routing.per_token)), mx.array(0.0))
    if shared is not None:
        y = y + mx.sigmoid(logits[:, routing.num_experts :].astype(mx.float32)) * _expert(shared, x, None)
    if num_tokens is not None:
        y = mx.where(mx.arange(x.shape[0])[:, None] < num_tokens, y, mx.nan)
    y = y.astype(x.dtype)
    return y if residual is None else residual.reshape(y.shape) + y


def _expert(experts: moe.Experts, x: mx.array, chosen: mx.array | None) -> mx.array:
    """What each token's expert makes of it, `[T, K]` float32; all have the same if none is chosen."""
    gate, up, down = (_numbers(weights) if chosen is None else _numbers(weights)[chosen] for weights in experts.all)
    column = x.astype(mx.float32)[..., None]
    gates, values = (rounded(weights @ column, x.dtype) for weights in (gate, up))
    return (down @ _gated(gates, values, x.dtype))[..., 0]


# Attention


def rope_append(
    shape: HeadShape, plan: mx.array, heads: ProjectedHeads, slabs: Sequence[tuple[mx.array, mx.array]]
) -> mx.array:
    """Norm, rotate, write. The slabs' array objects are changed, so that every reference has the new numbers."""
    layout, projected, positions, (frequencies, axes), norms = heads
    own, head_dim = projected[0].astype(mx.float32), shape.head_dim
    kv_dim = shape.num_kv_heads * head_dim
    queries = own[:, : shape.num_heads * layout.q_stride].reshape(-1, shape.num_heads, layout.q_stride)[..., :head_dim]
    keys, values = (
        own[:, at : at + kv_dim].reshape(-1, shape.num_kv_heads, head_dim) for at in (layout.k_at, layout.v_at)
    )
    if norms is not None:
        of_queries, of_keys, eps = norms
        queries = normed(queries, of_queries, eps, projected.dtype)
        keys = normed(keys, of_keys, eps, projected.dtype)
    angles = (positions[axes].T * frequencies)[:, None]
    queries, keys = (rotated(x, mx.cos(angles), mx.sin(angles)).astype(projected.dtype) for x in (queries, keys))
    rows: Rows = plan.tolist()  # type: ignore[assignment]
    for lo, num_tokens, start, slab, slot, *_ in rows:
        if not num_tokens:
            continue
        for held, new in zip(slabs[slab], (keys, values.astype(projected.dtype)), strict=True):
            held[slot, :, start : start + num_tokens] = new[lo : lo + num_tokens].swapaxes(0, 1)
    return queries


def attend(
    shape: HeadShape,
    plan: mx.array,
    most: int,
    queries: mx.array | ProjectedHeads,
    slabs: Sequence[tuple[mx.array, mx.array]],
    scale: mx.array,
    sinks: mx.array | None = None,
    gates: tuple[mx.array, Projection] | None = None,
    many_tokens: int = 0,
    fixed_parts: bool = False,
) -> mx.array:
    """Row by row: softmax over the keys that each token sees, and its sink."""
    if isinstance(queries, ProjectedHeads):
        queries = rope_append(shape, plan, queries, slabs)
    out = undefined(queries.shape, queries.dtype)
    rows: Rows = plan.tolist()  # type: ignore[assignment]
    for lo, num_tokens, start, slab, slot, _, window, first in rows:
        if not num_tokens:
            continue
        end = start + num_tokens
        keys, values = (held[slot, :, first:end].astype(mx.float32)[None] for held in slabs[slab])
        own = (queries[lo : lo + num_tokens].astype(mx.float32) * scale).swapaxes(0, 1)[None]
        keys_at, last = mx.arange(first, end), mx.arange(start, end)[:, None]
        visible = keys_at <= last if not window else (keys_at <= last) & (keys_at > last - window)
        sink = None if sinks is None else sinks.astype(mx.float32)
        found = mx.fast.scaled_dot_product_attention(own, keys, values, scale=1.0, mask=visible, sinks=sink)
        out[lo : lo + num_tokens] = found[0].swapaxes(0, 1).astype(out.dtype)
    if gates is not None:
        projected, layout = gates
        heads = mx.arange(shape.num_heads)[:, None] * layout.q_stride + mx.arange(shape.head_dim) + shape.head_dim
        gate = mx.sigmoid(projected.reshape(-1, layout.width)[:, heads].astype(mx.float32))
        out = (out.astype(mx.float32) * rounded(gate, out.dtype)).astype(out.dtype)
    return out.reshape(1, queries.shape[0], -1)


def rounded(x: mx.array, dtype: mx.Dtype) -> mx.array:
    """To what the type can hold, still in float32."""
    return x.astype(dtype).astype(mx.float32)


def silu(x: mx.array) -> mx.array:
    return x * mx.sigmoid(x)


def normed(x: mx.array, weight: mx.array, eps: mx.array, dtype: mx.Dtype) -> mx.array:
    scale = mx.rsqrt((x * x).mean(axis=-1, keepdims=True) + eps)
    return rounded(x * scale * weight.astype(mx.float32), dtype)


def undefined(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """NaN everywhere: memory that a kernel leaves unwritten."""
    return mx.full(shape, mx.nan, dtype)
