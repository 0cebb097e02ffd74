"""What kernels should give, in float64 and straight from the definitions."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

Float64 = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def double(array: mx.array) -> Float64:
    """The array's own values; every type here fits float32."""
    return np.array(array.astype(mx.float32)).astype(np.float64)


def largest_error(found: mx.array, right: Float64) -> float:
    """The largest difference, over the largest right value."""
    return float(np.abs(double(found) - right).max() / np.abs(right).max())


def delta_rule(tokens: Sequence[mx.array], state: mx.array, head: int) -> tuple[Float64, Float64]:
    """One value head of one row of the gated delta rule: y `[T, Dv]` and the state `[Dv, Dk]` after all tokens.

    tokens: q, k `[T, Hk, Dk]`, v `[T, Hv, Dv]`, g, beta `[T, Hv]`. state: `[Hv, Dv, Dk]`. See `backend/gated_delta.py`.
    """
    q, k, v, g, beta = tokens
    key_head = head * k.shape[1] // v.shape[1]
    queries, keys, values = double(q[:, key_head]), double(k[:, key_head]), double(v[:, head])
    gates, steps, now = double(g[:, head]), double(beta[:, head]), double(state[head])
    outputs = []
    for t in range(len(values)):
        now = gates[t] * now
        now = now + np.outer(steps[t] * (values[t] - now @ keys[t]), keys[t])
        outputs.append(now @ queries[t])
    return np.stack(outputs), now


def causal_attention(q: mx.array, keys: mx.array, values: mx.array) -> Float64:
    """The last tokens' attention over all: q `[H, n, D]`, keys and values `[Hkv, L, D]` give `[H, n, D]`."""
    group = q.shape[0] // keys.shape[0]
    scores = double(q) @ np.repeat(double(keys), group, axis=0).swapaxes(-1, -2) * q.shape[-1] ** -0.5
    scores += np.triu(np.full(scores.shape[1:], -np.inf), scores.shape[2] - scores.shape[1] + 1)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    attended: Float64 = (weights / weights.sum(axis=-1, keepdims=True)) @ np.repeat(double(values), group, axis=0)
    return attended
