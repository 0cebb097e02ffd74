"""Scores the importance of each prompt token by a draft model's attention.

SpecPrefill (arXiv 2502.02789, section 3): for every query token (the prompt's last one and those of a short greedy
continuation) and every head the attention over the prompt, smoothed along it; then the maximum over layers and heads,
and the mean over the query tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from headrace.models.packed import PackedModel
from headrace.models.step import LayerQueries, QueryRecorder, Row
from headrace.state.sequence import SequenceState
from headrace.state.slabs import StatePool

POOL = 13
"""Tokens over which an attention weight is averaged, centred on it; fewer near the ends."""
BLOCK_BYTES = 16 * 1024 * 1024
"""Size of the largest arrays that scoring makes at once: a few of them at a time."""


def num_scoring_layers(model: PackedModel) -> int:
    """How many of a model's layers provide queries: those with full attention and their own keys."""
    state, recorder = SequenceState(StatePool()), QueryRecorder()
    state.begin(1)
    model.forward([Row(state, (0,), recorder=recorder)], (0,))
    state.rollback(0)
    return len(recorder.layers())


def importance(state: SequenceState, recorder: QueryRecorder, length: int) -> npt.NDArray[np.float32]:
    """Importance of a prompt's tokens, `[length]`, computed layer by layer and a few heads at a time.

    state: the draft model's, after the prompt's tokens or later; no window is open. recorder: the recorded queries.
    """
    best: mx.array | None = None
    for layer in recorder.layers():
        for smooth in _attention(state, layer, length):
            best = smooth if best is None else mx.maximum(best, smooth)
            mx.eval(best)
    if best is None:
        raise ValueError("no layer has recorded queries of the tokens")
    return np.array(best.mean(axis=0))


def _attention(state: SequenceState, layer: LayerQueries, length: int) -> Iterator[mx.array]:
    """Smoothed attention `[n, length]` of the query tokens, the maximum of a few heads each time; not evaluated."""
    keys, _ = state.full_attention(layer.layer).read(0, length)
    num_heads, num_queries, _ = layer.queries.shape
    group = num_heads // keys.shape[1]
    most = max(1, BLOCK_BYTES // (4 * num_queries * length))
    for lo in range(0, num_heads, group):
        for first in range(lo, lo + group, most):
            heads = slice(first, min(first + most, lo + group))
            sinks = None if layer.sinks is None else layer.sinks[heads]
            scores = _scores(layer.queries[heads].astype(mx.float32) * layer.scale, keys[0, lo // group])
            yield _smooth(_softmax(scores, sinks)).max(axis=0)


def _scores(queries: mx.array, keys: mx.array) -> mx.array:
    """Scores of queries `[num_heads, n, head_dim]` in float32 and keys `[M, head_dim]` of any precision, a block at
    a time."""
    num_keys, head_dim = keys.shape
    block = max(1, BLOCK_BYTES // (4 * head_dim))
    parts = []
    for lo in range(0, num_keys, block):
        parts.append(queries @ keys[lo : lo + block].astype(mx.float32).T)
        mx.eval(parts[-1])
    return mx.concatenate(parts, axis=-1)


def _softmax(scores: mx.array, sinks: mx.array | None) -> mx.array:
    """Over the last axis of `[num_heads, n, M]`; a head's sink takes its share and is dropped."""
    if sinks is None:
        return mx.softmax(scores, axis=-1)
    sink = sinks.astype(mx.float32)[:, None, None]
    largest = mx.maximum(scores.max(axis=-1, keepdims=True), sink)
    weights = mx.exp(scores - largest)
    return weights / (weights.sum(axis=-1, keepdims=True) + mx.exp(sink - largest))


def _smooth(weights: mx.array) -> mx.array:
    """The mean over POOL neighbours along the last axis, fewer near the ends."""
    num_tokens, reach = weights.shape[-1], POOL // 2
    sums = mx.pad(weights, [(0, 0)] * (weights.ndim - 1) + [(reach, reach)])
    total: mx.array = mx.zeros_like(weights)
    size, begin = 1, 0
    while size <= POOL:  # sums of 1, 2, 4… neighbours, combined to POOL
        if POOL & size:
            total = total + sums[..., begin : begin + num_tokens]
            begin += size
        sums = sums[..., :-size] + sums[..., size:]
        size *= 2
    places = mx.arange(num_tokens)
    counts = mx.minimum(places, reach) + mx.minimum(num_tokens - 1 - places, reach) + 1
    return total / counts
