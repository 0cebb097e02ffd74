"""What the kernels of gated delta layers compute, in MLX's operations; see ops.py."""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.gated_delta import compute_g

from headrace.backend.cuda.ops import Rows, normed, rounded, silu, undefined
from headrace.backend.cuda.shapes import (
    DeltaShape,
    DeltaTable,
    DeltaWeights,
    Prepared,
    Stash,
)
from headrace.backend.delta_rule import chunked, convolved, fused_step, sequential


def step(shape: DeltaShape, weights: DeltaWeights, plan: mx.array, projected: mx.array, table: DeltaTable) -> mx.array:
    """Row by row: the replayed tokens of the stash, then the row's own, through the recurrence; then the norm."""
    rows: Rows = plan.tolist()  # type: ignore[assignment]
    y = undefined((projected.shape[1], shape.num_v_heads, shape.head_v_dim), projected.dtype)
    for lo, num_tokens, num_certain, num_replay, end, slot, old, new in rows:
        if not num_tokens:
            continue
        own, context = projected[:, lo : lo + num_tokens], _context(shape, table.raw, end, old)
        found = _prepared(shape, weights, own, context)
        tokens = Stash(*found[1:])
        if num_replay:
            pairs = zip(table.stash, tokens, strict=True)
            tokens = Stash(*(mx.concatenate([held[old, :num_replay], array]) for held, array in pairs))
        # the output of a replayed token is not used: its key stands in for its query
        queries = mx.concatenate([tokens.k[:num_replay], found.q])
        own_tokens = Prepared(queries, *tokens).map(lambda x: x[None])
        own_y, _, kept = sequential(fused_step, own_tokens, _state(table.state, slot, old), num_replay + num_certain)
        assert kept is not None
        y[lo : lo + num_tokens] = own_y[0, num_replay:].astype(y.dtype)
        table.state[slot] = kept[0]
        _leave(table, new, mx.concatenate([context, own[..., : shape.num_channels]], axis=1)[0], found, num_certain, 0)
    return gated_norm(shape, weights, y, projected)


def prepare_chunks(
    shape: DeltaShape,
    weights: DeltaWeights,
    plan: mx.array,
    stops: mx.array,
    longest: int,
    projected: mx.array,
    table: DeltaTable,
) -> tuple[Prepared, mx.array]:
    rows: Rows = plan.tolist()  # type: ignore[assignment]
    num_context, num_tokens = shape.kernel_size - 1, projected.shape[1]
    ends: list[int] = stops.tolist()  # type: ignore[assignment]
    key, value = (shape.num_k_heads, shape.head_k_dim), (shape.num_v_heads, shape.head_v_dim)
    sizes = (*((key, projected.dtype),) * 2, (value, projected.dtype), *((value[:1], mx.float32),) * 2)
    packed = Prepared(*(undefined((num_tokens, *size), dtype) for size, dtype in sizes))
    raw = undefined((stops.size, num_context, shape.num_channels), projected.dtype)
    for lo, count, num_certain, end, _, old, new, first_stop, num_stops in rows:
        if not count and not num_stops:
            continue
        own, context = projected[:, lo : lo + count], _context(shape, table.raw, end, old)
        inputs = mx.concatenate([context, own[..., : shape.num_channels]], axis=1)[0]
        for stop in range(first_stop, first_stop + num_stops):
            raw[stop] = inputs[ends[stop] : ends[stop] + num_context]
        if not count:
            continue
        found = _prepared(shape, weights, own, context)
        for array, numbers in zip(packed, found, strict=True):
            array[lo : lo + count] = numbers
        if new >= 0:
            _leave(table, new, inputs, found, num_certain, num_certain)
    return packed, raw


def scan_chunks(plan: mx.array, stops: mx.array, tokens: Prepared, state: mx.array) -> tuple[mx.array, mx.array]:
    rows: Rows = plan.tolist()  # type: ignore[assignment]
    ends: list[int] = stops.tolist()  # type: ignore[assignment]
    y = undefined(tokens.v.shape, tokens.q.dtype)
    states = undefined((stops.size, *state.shape[1:]), mx.float32)
    for lo, count, num_certain, _, slot, old, _, first_stop, num_stops in rows:
        own, done = _state(state, slot, old), 0
        cuts = (*ends[first_stop : first_stop + num_stops], num_certain, count)
        for place, end in enumerate(cuts):
            if end > done:
                part = Prepared(*(array[None, lo + done : lo + end] for array in tokens))
                y[lo + done : lo + end], own, _ = chunked(part, own, None, 0)
                done = end
            if place < num_stops:
                states[first_stop + place] = own[0]
            elif place == num_stops and count and slot >= 0:
                state[slot] = own[0]
    return y, states


def _context(shape: DeltaShape, raw: mx.array, end: int, old: int) -> mx.array:
    """The raw inputs `[1, kernel_size - 1, channels]` before a row's own; zeros for a row without tokens so far."""
    num_context = shape.kernel_size - 1
    if old < 0:
        return mx.zeros((1, num_context, shape.num_channels), raw.dtype)
    return raw[old : old + 1, end - num_context : end]


def _state(state: mx.array, slot: int, old: int) -> mx.array:
    """`[1, Hv, Dv, Dk]` that a row begins with."""
    return mx.zeros((1, *state.shape[1:])) if slot < 0 or old < 0 else state[slot : slot + 1]


def _leave(table: DeltaTable, new: int, inputs: mx.array, found: Prepared, num_certain: int, skip: int) -> None:
    """Write a row's raw inputs, without the first `skip`, and its uncertain tokens into its new row of the table."""
    table.raw[new] = _padded(inputs[skip:], table.raw.shape[1])
    for held, array in zip(table.stash, found[1:], strict=True):
        held[new] = _padded(array[num_certain:], held.shape[1])


def _prepared(shape: DeltaShape, weights: DeltaWeights, projected: mx.array, context: mx.array) -> Prepared:
    """Convolution, activation, unit keys and queries, gates of one row's tokens."""
    dtype, own = projected.dtype, projected[0].astype(mx.float32)
    num_tokens, taps = own.shape[0], weights.conv.astype(mx.float32).T[None]
    mixed = convolved(mx.concatenate([context, projected[..., : shape.num_channels]], axis=1), taps)[0]
    channels = rounded(silu(mixed.astype(mx.float32)), dtype)
    key_dim = shape.num_k_heads * shape.head_k_dim
    q, k, v = mx.split(channels, [key_dim, 2 * key_dim], axis=-1)
    q, k = (_unit(x.reshape(num_tokens, shape.num_k_heads, shape.head_k_dim)) for x in (q, k))
    a, b = (own[:, at : at + shape.num_v_heads] for at in (shape.a_at, shape.b_at))
    return Prepared(
        (q * shape.head_k_dim**-0.5).astype(dtype),
        k.astype(dtype),
        v.reshape(num_tokens, shape.num_v_heads, shape.head_v_dim).astype(dtype),
        compute_g(weights.a_log, a, weights.dt_bias.astype(mx.float32)),
        rounded(mx.sigmoid(b), dtype),
    )


def gated_norm(shape: DeltaShape, weights: DeltaWeights, y: mx.array, projected: mx.array) -> mx.array:
    """RMS norm by head, times silu of the gate."""
    value_dim = shape.num_v_heads * shape.head_v_dim
    gates = projected[:, :, shape.z_at : shape.z_at + value_dim].astype(mx.float32).reshape(y.shape)
    found = silu(gates) * normed(y.astype(mx.float32), weights.norm, weights.eps, y.dtype)
    return found.reshape(1, y.shape[0], value_dim).astype(y.dtype)


def _unit(x: mx.array) -> mx.array:
    return x * mx.rsqrt((x * x).sum(axis=-1, keepdims=True) + 1e-6)


def _padded(tokens: mx.array, length: int) -> mx.array:
    """`[n, …]` to `[length, …]`, undefined behind them."""
    return mx.concatenate([tokens, undefined((length - tokens.shape[0], *tokens.shape[1:]), tokens.dtype)])
