"""What layers should compute, in float64, one number after the other where that is clearer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from headrace.backend.cuda.shapes import DeltaShape, DeltaWeights, HeadShape, Projection, Stash

Float64 = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def double(array: mx.array) -> Float64:
    """The array's own values; every type here fits float32."""
    return np.array(array.astype(mx.float32)).astype(np.float64)


def largest_error(found: mx.array, right: Float64) -> float:
    """The largest difference, over the largest right value."""
    return float(np.abs(double(found) - right).max() / np.abs(right).max())


Slabs = Sequence[tuple[mx.array, mx.array]]
Matrices = tuple[Float64, Float64, Float64]
"""Of an expert: gate and up `[I, K]`, down `[K, I]`."""


def sigmoid(x: Float64) -> Float64:
    found: Float64 = 1 / (1 + np.exp(-x))
    return found


def silu(x: Float64) -> Float64:
    return x * sigmoid(x)


def rms_norm(x: Float64, weight: Float64, eps: float) -> Float64:
    found: Float64 = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight
    return found


def unit(x: Float64) -> Float64:
    """Of length 1 over the last axis, but for a small number under the root."""
    found: Float64 = x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)
    return found


def scan(
    q: Float64, k: Float64, v: Float64, g: Float64, beta: Float64, state: Float64, keep: int | None
) -> tuple[Float64, Float64, Float64]:
    """The gated delta rule for one row, token first: y, the end state, and the state after `keep` tokens."""
    num_tokens, num_heads, _ = v.shape
    group = num_heads // k.shape[1]
    state, y, kept = state.copy(), np.zeros(v.shape), state.copy()
    for t in range(num_tokens):
        for h in range(num_heads):
            key, query = k[t, h // group], q[t, h // group]
            decayed = g[t, h] * state[h]
            state[h] = decayed + beta[t, h] * np.outer(v[t, h] - decayed @ key, key)
            y[t, h] = state[h] @ query
        if t + 1 == keep:
            kept = state.copy()
    return y, state, kept


def prepare(shape: DeltaShape, weights: DeltaWeights, projected: Float64, context: Float64) -> tuple[Float64, ...]:
    """q, k, v, g, beta of one row's tokens, and its raw inputs with those before them."""
    num_tokens, num_k_heads, num_v_heads = len(projected), shape.num_k_heads, shape.num_v_heads
    raw = np.concatenate([context, projected[:, : shape.num_channels]])
    taps = double(weights.conv)
    mixed = np.zeros((num_tokens, shape.num_channels))
    for t in range(num_tokens):
        for j in range(shape.kernel_size):
            mixed[t] += raw[t + j] * taps[:, j]
    channels, key_dim = silu(mixed), num_k_heads * shape.head_k_dim
    q = unit(channels[:, :key_dim].reshape(num_tokens, num_k_heads, -1)) / np.sqrt(shape.head_k_dim)
    k = unit(channels[:, key_dim : 2 * key_dim].reshape(num_tokens, num_k_heads, -1))
    v = channels[:, 2 * key_dim :].reshape(num_tokens, num_v_heads, -1)
    a = projected[:, shape.a_at : shape.a_at + num_v_heads] + double(weights.dt_bias)
    g = np.exp(-np.exp(double(weights.a_log)) * np.log1p(np.exp(a)))
    return q, k, v, g, sigmoid(projected[:, shape.b_at : shape.b_at + num_v_heads]), raw


def window(
    shape: DeltaShape,
    weights: DeltaWeights,
    row: Sequence[int],
    projected: Float64,
    old_raw: Float64,
    old_stash: Stash,
    state: Float64,
) -> tuple[Float64, ...]:
    """One row of a plan: y, the state after its certain tokens, its raw inputs, and k, v, g, beta of the others."""
    lo, num_tokens, num_certain, num_replay, end, old = row
    context = old_raw[old, end - shape.kernel_size + 1 : end]
    q, *news, raw = prepare(shape, weights, projected[lo : lo + num_tokens], context)
    olds = [double(array)[old, :num_replay] if num_replay else np.zeros((0, *array.shape[2:])) for array in old_stash]
    k, v, g, beta = (np.concatenate([first, then]) for first, then in zip(olds, news, strict=True))
    queries = np.concatenate([np.zeros((num_replay, *q.shape[1:])), q])
    y, _, kept = scan(queries, k, v, g, beta, state[old], num_replay + num_certain)
    return y[num_replay:], kept, raw, *(array[num_certain:] for array in news)


def gated_norm(shape: DeltaShape, weights: DeltaWeights, y: Float64, projected: Float64) -> Float64:
    """`[1, T, Hv · Dv]`."""
    value_dim = shape.num_v_heads * shape.head_v_dim
    gates = projected[:, shape.z_at : shape.z_at + value_dim].reshape(y.shape)
    return (rms_norm(y, double(weights.norm), float(double(weights.eps)[0])) * silu(gates)).reshape(
        1, len(y), value_dim
    )


def attend(
    shape: HeadShape,
    plan: Sequence[Sequence[int]],
    queries: Float64,
    slabs: Slabs,
    scale: float,
    sinks: Float64 | None,
    gates: Float64 | None,
) -> Float64:
    """`[1, T, num_heads · head_dim]`, token by token and head by head; gates: `[T, num_heads, head_dim]`."""
    held = [(double(keys), double(values)) for keys, values in slabs]
    out = np.zeros(queries.shape)
    for lo, num_tokens, start, slab, slot, _, window, first in plan:
        for token in range(num_tokens):
            last = start + token
            begin = max(first, last - window + 1) if window else first
            for head in range(shape.num_heads):
                of = head // (shape.num_heads // shape.num_kv_heads)
                keys, values = (array[slot, of, begin : last + 1] for array in held[slab])
                scores = keys @ queries[lo + token, head] * scale
                sink = -np.inf if sinks is None else sinks[head]
                largest = max(scores.max(), sink)
                weights = np.exp(scores - largest)
                out[lo + token, head] = weights @ values / (weights.sum() + np.exp(sink - largest))
    if gates is not None:
        out *= sigmoid(gates)
    return out.reshape(1, len(queries), -1)


def rope_append(
    shape: HeadShape,
    layout: Projection,
    positions: Float64,
    projected: Float64,
    turns: Float64,
    axes: NDArray[np.int32],
    norms: tuple[Float64, Float64, float] | None,
) -> tuple[Float64, Float64, Float64]:
    """Queries, keys and values `[T, heads, head_dim]`."""
    num_tokens, half = len(projected), layout.rotary // 2

    def heads(at: int, number: int, stride: int, weight: Float64 | None) -> Float64:
        found = np.stack([projected[:, at + h * stride : at + h * stride + shape.head_dim] for h in range(number)], 1)
        return found if weight is None or norms is None else rms_norm(found, weight, norms[2])

    def turned(x: Float64) -> Float64:
        y = x.copy()
        for t in range(num_tokens):
            for channel in range(half):
                angle = positions[axes[channel], t] * turns[channel]
                pair = x[t, :, channel] + 1j * x[t, :, channel + half]
                pair = pair * np.exp(1j * angle)
                y[t, :, channel], y[t, :, channel + half] = pair.real, pair.imag
        return y

    of_queries, of_keys = (None, None) if norms is None else norms[:2]
    queries = turned(heads(0, shape.num_heads, layout.q_stride, of_queries))
    keys = turned(heads(layout.k_at, shape.num_kv_heads, shape.head_dim, of_keys))
    return queries, keys, heads(layout.v_at, shape.num_kv_heads, shape.head_dim, None)


def mixture(
    token: Float64,
    logits: Float64,
    expert: Callable[[int], Matrices],
    own: Matrices | None,
    per_token: int,
    normed: bool,
) -> Float64:
    """`[K]`: what the likeliest experts make of one token `[K]`, and the shared one, whose logit is the last."""
    experts = logits if own is None else logits[:-1]
    chances = np.exp(experts - experts.max())
    chances /= chances.sum()
    best = [int(e) for e in np.argsort(-chances, kind="stable")[:per_token]]
    total = chances[best].sum() if normed else 1.0

    def made(matrices: Matrices) -> Float64:
        gate, up, down = matrices
        found: Float64 = down @ (silu(gate @ token) * (up @ token))
        return found

    found = sum((chances[e] / total * made(expert(e)) for e in best), np.zeros_like(token))
    return found if own is None else found + made(own) * sigmoid(logits[-1])
