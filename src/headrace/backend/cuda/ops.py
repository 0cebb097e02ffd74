"""What each kernel computes, in MLX's operations: for machines without CUDA, and to read.

Arguments and results are those of the kernels' own functions, which come here where there is no such GPU. All is
computed in float32 and rounded where the kernels round. Nothing here is made to be fast.

What a kernel leaves as it was in memory is no number here, so that whoever reads it sees it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import mlx.core as mx

from headrace.backend.cuda.shapes import (
    LONGEST_WINDOW,
    DeltaShape,
    Gate,
    HeadShape,
    Left,
    Prepared,
    ProjectedHeads,
    Stash,
    Weights,
    Windowed,
)

if TYPE_CHECKING:
    from headrace.backend.cuda import matmul, moe

Rows = list[list[int]]
"""A plan as Python reads it."""


def swiglu(projected: mx.array) -> mx.array:
    """silu(gate) · value."""
    gate, value = mx.split(projected.astype(mx.float32), 2, axis=-1)
    return (_rounded(_silu(gate), projected.dtype) * value).astype(projected.dtype)


def sum_norm(x: mx.array, y: mx.array, weight: mx.array, eps: mx.array) -> tuple[mx.array, mx.array]:
    """The sum, and its RMS norm."""
    total = x + y
    one = mx.ones(total.shape[-1])
    normed = _normed(total.astype(mx.float32), one, eps, total.dtype) * weight.astype(mx.float32)
    return total, normed.astype(total.dtype)


def most_likely(logits: mx.array, otherwise: int) -> mx.array:
    """The first highest, if that is finite and there is no NaN: not every device's argmax finds one."""
    ids = mx.argmax(logits, axis=-1, keepdims=True)
    highest = mx.take_along_axis(logits, ids, axis=-1)
    num_nan = mx.sum(logits != logits, axis=-1, keepdims=True)
    # a comparison, because `isfinite` is several operations
    is_fit = (mx.abs(highest) < mx.inf) & (num_nan == 0)
    return mx.where(is_fit, ids.astype(mx.int32), otherwise).squeeze(-1)


# Products


def product(
    x: mx.array, weights: matmul.Weights, residual: mx.array | None = None, *, is_gated: bool = False
) -> mx.array:
    """With the transposed weights."""
    found = (x.astype(mx.float32) @ _numbers(weights).T).astype(x.dtype)
    found = swiglu(found) if is_gated else found
    return found if residual is None else residual + found


def dense(weights: matmul.Weights) -> mx.array:
    """Quantised weights as numbers."""
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
    gates, values = (_rounded(weights @ column, x.dtype) for weights in (gate, up))
    hidden = _rounded(_rounded(_silu(gates), x.dtype) * values, x.dtype)
    return (down @ hidden)[..., 0]


# Gated delta layers


def prepare(
    shape: DeltaShape,
    weights: Weights,
    plan: mx.array,
    stops: mx.array,
    longest: int,
    projected: mx.array,
    old_raw: mx.array,
) -> tuple[Prepared, mx.array]:
    """Row by row."""
    rows: Rows = plan.tolist()  # type: ignore[assignment]
    num_context, ends, num_tokens = shape.kernel_size - 1, stops.tolist(), projected.shape[1]
    key, value = (shape.num_k_heads, shape.head_k_dim), (shape.num_v_heads, shape.head_v_dim)
    sizes = (*((key, projected.dtype),) * 2, (value, projected.dtype), *((value[:1], mx.float32),) * 2)
    packed = Prepared(*(_undefined((num_tokens, *size), dtype) for size, dtype in sizes))
    raw = _undefined((stops.size, num_context, shape.num_channels), projected.dtype)
    for lo, count, end, old, first_stop, num_stops in rows:
        own, context = projected[:, lo : lo + count], old_raw[old : old + 1, end - num_context : end]
        for array, found in zip(packed, _prepared(shape, weights, own, context), strict=True):
            array[lo : lo + count] = found
        inputs = mx.concatenate([context, own[..., : shape.num_channels]], axis=1)[0]
        for stop in range(first_stop, first_stop + num_stops):
            raw[stop] = inputs[ends[stop] : ends[stop] + num_context]  # type: ignore[index, operator]
    return packed, raw


def _prepared(shape: DeltaShape, weights: Weights, projected: mx.array, context: mx.array) -> Prepared:
    """Convolution, activation, unit keys and queries, gates of one row's tokens."""
    dtype, own = projected.dtype, projected[0].astype(mx.float32)
    num_tokens, taps = own.shape[0], weights.conv.astype(mx.float32)
    raw = mx.concatenate([context[0].astype(mx.float32), own[:, : shape.num_channels]])
    mixed = sum((raw[j : j + num_tokens] * taps[:, j] for j in range(shape.kernel_size)), mx.array(0.0))
    channels = _rounded(_silu(_rounded(mixed, dtype)), dtype)
    key_dim = shape.num_k_heads * shape.head_k_dim
    q, k, v = mx.split(channels, [key_dim, 2 * key_dim], axis=-1)
    q, k = (_unit(x.reshape(num_tokens, shape.num_k_heads, shape.head_k_dim)) for x in (q, k))
    a, b = (own[:, at : at + shape.num_v_heads] for at in (shape.a_at, shape.b_at))
    decay = mx.exp(-mx.exp(weights.a_log) * mx.logaddexp(a + weights.dt_bias.astype(mx.float32), mx.array(0.0)))
    return Prepared(
        (q * shape.head_k_dim**-0.5).astype(dtype),
        k.astype(dtype),
        v.reshape(num_tokens, shape.num_v_heads, shape.head_v_dim).astype(dtype),
        decay,
        _rounded(mx.sigmoid(b), dtype),
    )


def window(
    shape: DeltaShape,
    weights: Weights,
    plan: mx.array,
    projected: mx.array,
    old_raw: mx.array,
    old_stash: Stash,
    state: mx.array,
) -> Windowed:
    """Row by row: the replayed tokens of the old stash, then the row's own, through the recurrence; then the norm."""
    context, longest, num_stashed = shape.kernel_size - 1, LONGEST_WINDOW, LONGEST_WINDOW - 1
    rows: Rows = plan.tolist()  # type: ignore[assignment]
    y = _undefined((projected.shape[1], shape.num_v_heads, shape.head_v_dim), projected.dtype)
    states, raws, stashes = [], [], []
    for lo, num_tokens, num_certain, num_replay, end, old in rows:
        if not num_tokens:
            states.append(_undefined(state.shape[1:], state.dtype))
            raws.append(_undefined((context + longest, shape.num_channels), projected.dtype))
            stashes.append([_undefined((num_stashed, *array.shape[2:]), array.dtype) for array in old_stash])
            continue
        own, before = projected[:, lo : lo + num_tokens], old_raw[old : old + 1, end - context : end]
        new = _prepared(shape, weights, own, before)
        # a row without tokens to replay may have no place in the old stash
        replayed = Stash(*(array[old if num_replay else 0, :num_replay] for array in old_stash))
        tokens = Stash(*(mx.concatenate([first, then]) for first, then in zip(replayed, new[1:], strict=True)))
        # what a replayed token would say is not asked for: its key stands in for its query
        found, kept = _recur(mx.concatenate([replayed.k, new.q]), tokens, state[old], num_replay + num_certain)
        y[lo : lo + num_tokens] = found[num_replay:].astype(y.dtype)
        states.append(kept)
        raws.append(_padded(mx.concatenate([before, own[..., : shape.num_channels]], axis=1)[0], context + longest))
        stashes.append([_padded(array[num_certain:], num_stashed) for array in new[1:]])
    stash = Stash(*(mx.stack(list(arrays)) for arrays in zip(*stashes, strict=True)))
    return Windowed(gated_norm(shape, weights, y, projected), mx.stack(states), mx.stack(raws), stash)


def gather(shape: DeltaShape, plan: mx.array, sources: Sequence[Left]) -> Left:
    """Row by row."""
    most = LONGEST_WINDOW
    rows: Rows = plan.tolist()  # type: ignore[assignment]
    (first_state, first_raw, first_stash), num_rows = sources[0], len(rows)
    state = _undefined((num_rows, *first_state.shape[1:]), first_state.dtype)
    raw = _undefined((num_rows, shape.kernel_size - 1 + most, shape.num_channels), first_raw.dtype)
    stash = Stash(*(_undefined((num_rows, most - 1, *array.shape[2:]), array.dtype) for array in first_stash))
    for to, (source, row, end, num_replay) in enumerate(rows):
        if not end:
            continue
        of = sources[source]
        state[to] = of.state[row]
        raw[to, :end] = of.raw[row, :end]
        if num_replay:
            for array, held in zip(stash, of.stash, strict=True):
                array[to, :num_replay] = held[row, :num_replay]
    return Left(state, raw, stash)


def _recur(q: mx.array, tokens: Stash, state: mx.array, keep: int) -> tuple[mx.array, mx.array]:
    """The gated delta rule, see backend/gated_delta.py: y `[n, Hv, Dv]`, and the state after `keep` tokens."""
    kept, outputs = state, []
    repeats = tokens.v.shape[1] // tokens.k.shape[1]
    q, k = (mx.repeat(x.astype(mx.float32), repeats, axis=1) for x in (q, tokens.k))
    for t in range(tokens.v.shape[0]):
        state = tokens.g[t, :, None, None] * state
        delta = tokens.beta[t, :, None] * (tokens.v[t].astype(mx.float32) - (state @ k[t, :, :, None])[..., 0])
        state = state + delta[..., None] * k[t, :, None]
        outputs.append((state @ q[t, :, :, None])[..., 0])
        kept = state if t + 1 == keep else kept
    return mx.stack(outputs), kept


def gated_norm(shape: DeltaShape, weights: Weights, y: mx.array, projected: mx.array) -> mx.array:
    """RMS norm by head, times silu of the gate."""
    value_dim = shape.num_v_heads * shape.head_v_dim
    gates = projected[:, :, shape.z_at : shape.z_at + value_dim].astype(mx.float32).reshape(y.shape)
    found = _silu(gates) * _normed(y.astype(mx.float32), weights.norm, weights.eps, y.dtype)
    return found.reshape(1, y.shape[0], value_dim).astype(y.dtype)


# Attention


def rope_append(
    shape: HeadShape, plan: mx.array, heads: ProjectedHeads, slabs: Sequence[tuple[mx.array, mx.array]]
) -> mx.array:
    """Norm, turn, write. The slabs' arrays are changed as objects, so that whoever holds them has the new ones."""
    layout, projected, positions, (turns, axes), norms = heads
    own, head_dim = projected[0].astype(mx.float32), shape.head_dim
    kv_dim = shape.num_kv_heads * head_dim
    queries = own[:, : shape.num_heads * layout.q_stride].reshape(-1, shape.num_heads, layout.q_stride)[..., :head_dim]
    keys, values = (
        own[:, at : at + kv_dim].reshape(-1, shape.num_kv_heads, head_dim) for at in (layout.k_at, layout.v_at)
    )
    if norms is not None:
        of_queries, of_keys, eps = norms
        queries = _normed(queries, of_queries, eps, projected.dtype)
        keys = _normed(keys, of_keys, eps, projected.dtype)
    angles = (positions[axes].T * turns)[:, None]
    queries, keys = (_turned(x, angles, layout.rotary).astype(projected.dtype) for x in (queries, keys))
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
    longest: tuple[int, int],
    queries: mx.array | ProjectedHeads,
    slabs: Sequence[tuple[mx.array, mx.array]],
    scale: mx.array,
    sinks: mx.array | None = None,
    gates: tuple[mx.array, Gate] | None = None,
) -> mx.array:
    """Row by row: softmax over the keys that each token sees, and its sink."""
    if isinstance(queries, ProjectedHeads):
        queries = rope_append(shape, plan, queries, slabs)
    out = _undefined(queries.shape, queries.dtype)
    rows: Rows = plan.tolist()  # type: ignore[assignment]
    group = shape.num_heads // shape.num_kv_heads
    for lo, num_tokens, start, slab, slot, _, window, first in rows:
        if not num_tokens:
            continue
        end = start + num_tokens
        keys, values = (mx.repeat(held[slot, :, first:end].astype(mx.float32), group, axis=0) for held in slabs[slab])
        own = queries[lo : lo + num_tokens].astype(mx.float32).swapaxes(0, 1)
        places, last = mx.arange(first, end), mx.arange(start, end)[:, None]
        seen = places <= last if not window else (places <= last) & (places > last - window)
        scores = mx.where(seen, own @ keys.swapaxes(1, 2) * scale, -mx.inf)
        if sinks is not None:
            sink = mx.broadcast_to(sinks.astype(mx.float32)[:, None, None], (shape.num_heads, num_tokens, 1))
            scores = mx.concatenate([scores, sink], axis=-1)
        weights = mx.softmax(scores, axis=-1)[..., : end - first]
        out[lo : lo + num_tokens] = (weights @ values).swapaxes(0, 1).astype(out.dtype)
    if gates is not None:
        projected, place = gates
        heads = mx.arange(shape.num_heads)[:, None] * place.stride + mx.arange(shape.head_dim) + place.at
        gate = mx.sigmoid(projected.reshape(-1, place.width)[:, heads].astype(mx.float32))
        out = (out.astype(mx.float32) * _rounded(gate, out.dtype)).astype(out.dtype)
    return out.reshape(1, queries.shape[0], -1)


def _rounded(x: mx.array, dtype: mx.Dtype) -> mx.array:
    """To what the type can hold, still in float32."""
    return x.astype(dtype).astype(mx.float32)


def _silu(x: mx.array) -> mx.array:
    return x * mx.sigmoid(x)


def _unit(x: mx.array) -> mx.array:
    return x * mx.rsqrt((x * x).sum(axis=-1, keepdims=True) + 1e-6)


def _normed(x: mx.array, weight: mx.array, eps: mx.array, dtype: mx.Dtype) -> mx.array:
    """RMS norm over the last axis."""
    scale = mx.rsqrt((x * x).mean(axis=-1, keepdims=True) + eps)
    return _rounded(x * scale * weight.astype(mx.float32), dtype)


def _turned(x: mx.array, angles: mx.array, rotary: int) -> mx.array:
    """The leading `rotary` channels of x `[T, heads, head_dim]`, the first half of them with the second."""
    first, second, rest = mx.split(x, [rotary // 2, rotary], axis=-1)
    cosine, sine = mx.cos(angles), mx.sin(angles)
    return mx.concatenate([first * cosine - second * sine, first * sine + second * cosine, rest], axis=-1)


def _padded(tokens: mx.array, length: int) -> mx.array:
    """`[n, …]` to `[length, …]`, undefined behind them."""
    return mx.concatenate([tokens, _undefined((length - tokens.shape[0], *tokens.shape[1:]), tokens.dtype)])


def _undefined(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    return mx.full(shape, mx.nan, dtype)
