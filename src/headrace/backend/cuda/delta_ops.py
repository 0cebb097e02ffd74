"""What the kernels of gated delta layers compute, in MLX's operations; see ops.py."""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.gated_delta import compute_g

from headrace.backend.cuda.ops import Rows, normed, rounded, silu, undefined
from headrace.backend.cuda.shapes import DeltaShape, DeltaTable, DeltaWeights, Prepared
from headrace.backend.delta_rule import chunked, convolved, split_heads


def step(shape: DeltaShape, weights: DeltaWeights, plan: mx.array, projected: mx.array, table: DeltaTable) -> mx.array:
    """Replay of the stash, then as chunks, but that the raw inputs of all tokens are left; then the norm."""
    rows: Rows = plan.tolist()  # type: ignore[assignment]
    replays: Rows = []
    chunks: Rows = []
    for lo, num_tokens, num_certain, num_replay, end, slot, old, new in rows:
        replays.append([old * table.k.shape[1], num_replay, num_replay, 0, slot, old, -1, 0, 0])
        chunks.append([lo, num_tokens, num_certain, end, slot, old, new, 0, 0])
    k, *others = (array.reshape(-1, *array.shape[2:]) for array in table.stash)
    # the output of a replayed token is not used: its key stands in for its query
    _scan(replays, [], Prepared(k, k, *others), table.state)
    tokens, _ = _prepare(shape, weights, chunks, [], projected, table, skips_certain=False)
    return gated_norm(shape, weights, _scan(chunks, [], tokens, table.state)[0], projected)


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
    ends: list[int] = stops.tolist()  # type: ignore[assignment]
    return _prepare(shape, weights, rows, ends, projected, table, skips_certain=True)


def _prepare(
    shape: DeltaShape,
    weights: DeltaWeights,
    rows: Rows,
    ends: list[int],
    projected: mx.array,
    table: DeltaTable,
    *,
    skips_certain: bool,
) -> tuple[Prepared, mx.array]:
    """skips_certain: whether of certain tokens only the context of the next one is left."""
    num_context, num_tokens = shape.kernel_size - 1, projected.shape[1]
    key, value = (shape.num_k_heads, shape.head_k_dim), (shape.num_v_heads, shape.head_v_dim)
    sizes = (*((key, projected.dtype),) * 2, (value, projected.dtype), *((value[:1], mx.float32),) * 2)
    packed = Prepared(*(undefined((num_tokens, *size), dtype) for size, dtype in sizes))
    raw = undefined((len(ends), num_context, shape.num_channels), projected.dtype)
    for lo, count, num_certain, end, _, old, new, first_stop, num_stops in rows:
        if not count and not num_stops:
            continue
        own, context = projected[:, lo : lo + count], _context(shape, table.raw, end, old)
        inputs = mx.concatenate([context, own[..., : shape.num_channels]], axis=1)
        for stop in range(first_stop, first_stop + num_stops):
            raw[stop] = inputs[0, ends[stop] : ends[stop] + num_context]
        if not count:
            continue
        found = _prepared(shape, weights, own, inputs)
        for array, numbers in zip(packed, found, strict=True):
            array[lo : lo + count] = numbers
        if new >= 0:
            skip = num_certain if skips_certain else 0
            table.raw[new] = _padded(inputs[0, skip:], table.raw.shape[1])
            for held, array in zip(table.stash, found[1:], strict=True):
                held[new] = _padded(array[num_certain:], held.shape[1])
    return packed, raw


def scan_chunks(
    plan: mx.array, stops: mx.array, tokens: Prepared, state: mx.array, *, in_blocks: bool = False, least: int = 0
) -> tuple[mx.array, mx.array]:
    rows: Rows = plan.tolist()  # type: ignore[assignment]
    ends: list[int] = stops.tolist()  # type: ignore[assignment]
    return _scan(rows, ends, tokens, state)


def _scan(rows: Rows, ends: list[int], tokens: Prepared, state: mx.array) -> tuple[mx.array, mx.array]:
    y = undefined(tokens.v.shape, tokens.q.dtype)
    states = undefined((len(ends), *state.shape[1:]), mx.float32)
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


def _prepared(shape: DeltaShape, weights: DeltaWeights, projected: mx.array, inputs: mx.array) -> Prepared:
    """What one row's tokens feed into the scan. inputs: of the convolution, context first."""
    dtype, own = projected.dtype, projected[0].astype(mx.float32)
    mixed = convolved(inputs, weights.conv.astype(mx.float32).T[None])
    heads = split_heads(shape, rounded(silu(mixed.astype(mx.float32)), dtype))
    a, b = (own[:, at : at + shape.num_v_heads] for at in (shape.a_at, shape.b_at))
    decay = compute_g(weights.a_log, a, weights.dt_bias.astype(mx.float32))
    q, k, v = (array[0].astype(dtype) for array in heads)
    return Prepared(q, k, v, decay, rounded(mx.sigmoid(b), dtype))


def gated_norm(shape: DeltaShape, weights: DeltaWeights, y: mx.array, projected: mx.array) -> mx.array:
    gates = projected[:, :, shape.z_at : shape.b_at].astype(mx.float32).reshape(y.shape)
    found = silu(gates) * normed(y.astype(mx.float32), weights.norm, weights.eps, y.dtype)
    return found.reshape(1, y.shape[0], shape.value_dim).astype(y.dtype)


def _padded(tokens: mx.array, length: int) -> mx.array:
    """`[n, …]` to `[length, …]`, undefined behind them."""
    return mx.concatenate([tokens, undefined((length - tokens.shape[0], *tokens.shape[1:]), tokens.dtype)])
