"""`attend`: the one place that writes keys and values and chooses how to read them."""

from __future__ import annotations

from functools import partial

import mlx.core as mx

from headrace.models.step import RowSpan, View
from headrace.state.attention import FullAttentionState, SlidingAttentionState

QUERY_BLOCK = 128
"""Queries that the folded form scores at once: keys behind a block are not touched."""
SCORE_ELEMENTS = 16 * 1024 * 1024
"""Scores held at once by the folded form (64 MiB in float32), so that long contexts don't need memory by the square."""


def attend(
    view: View,
    queries: mx.array,
    new: tuple[mx.array, mx.array] | None,
    scale: float,
    sinks: mx.array | None,
    window: int | None,
) -> mx.array:
    """Causal attention of each row over its own tokens.

    queries: `[1, num_heads, T, head_dim]`.
    new: keys and values `[1, num_kv_heads, T, head_dim]` of the step's tokens; None for a layer that reads what
    another one wrote.
    window: how many tokens a token sees, itself included; None for all.

    Gives `[1, num_heads, T, value_dim]`.
    """
    spans = view.step.spans
    states = [_state(view, span, window) for span in spans]
    if new is not None:
        # all writes before any read: see the in-place contract in state/slabs.py
        keys, values = new
        for span, state in zip(spans, states, strict=True):
            state.write(span.start, keys[:, :, span.lo : span.hi], values[:, :, span.lo : span.hi])
            for mark in span.state.marks:
                state.note(mark)
    kernels = view.step.kernels
    fold = kernels.folds_query_heads and sinks is None
    outputs = []
    for span, state in zip(spans, states, strict=True):
        for lo, hi in _parts(span, window is not None and kernels.goes_token_by_token):
            start, end = span.start + lo - span.lo, span.start + hi - span.lo
            read = state.read(max(0, start - window + 1) if window else 0, end)
            part = queries[:, :, lo:hi]
            outputs.append(_folded(part, *read, scale, window) if fold else _fused(part, *read, scale, window, sinks))
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=2)


def _parts(span: RowSpan, token_by_token: bool) -> list[tuple[int, int]]:
    """The row's tokens whole, or one by one: a window's sums then run over the same keys as in decoding."""
    return [(token, token + 1) for token in range(span.lo, span.hi)] if token_by_token else [(span.lo, span.hi)]


def _state(view: View, span: RowSpan, window: int | None) -> FullAttentionState | SlidingAttentionState:
    if window is None:
        return span.state.full_attention(view.layer)
    return span.state.layer(view.layer, partial(SlidingAttentionState, window))


def _visible(num_queries: int, num_keys: int, window: int | None) -> mx.array:
    """`[num_queries, num_keys]`: which keys a query sees; the last query stands at the last key."""
    query = mx.arange(num_keys - num_queries, num_keys)[:, None]
    key = mx.arange(num_keys)[None]
    visible = key <= query
    return visible if window is None else visible & (key > query - window)


def _fused(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    window: int | None,
    sinks: mx.array | None,
) -> mx.array:
    """The library's own attention."""
    num_queries, num_keys = queries.shape[2], keys.shape[2]
    mask: mx.array | str | None = None if num_queries == 1 else "causal"
    if window is not None and num_queries > 1 and num_keys > window:
        mask = _visible(num_queries, num_keys, window)
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)


def _folded(queries: mx.array, keys: mx.array, values: mx.array, scale: float, window: int | None) -> mx.array:
    """The query heads of a key head as rows of one matmul, queries in blocks that bound the scores' memory."""
    _, num_heads, num_queries, _ = queries.shape
    num_keys = keys.shape[2]
    block = max(1, min(QUERY_BLOCK, SCORE_ELEMENTS // (num_heads * num_keys)))
    outputs = []
    for lo in range(0, num_queries, block):
        hi = min(lo + block, num_queries)
        end = num_keys - num_queries + hi  # keys after the block's last query are invisible to all of it
        start = 0 if window is None else max(0, end - (hi - lo) - window + 1)
        part = queries[:, :, lo:hi]
        outputs.append(_folded_block(part, keys[:, :, start:end], values[:, :, start:end], scale, window))
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=2)


def _folded_block(queries: mx.array, keys: mx.array, values: mx.array, scale: float, window: int | None) -> mx.array:
    _, num_heads, num_queries, head_dim = queries.shape
    num_kv_heads, num_keys = keys.shape[1], keys.shape[2]
    group = num_heads // num_kv_heads
    scores = (queries * scale).reshape(1, num_kv_heads, group * num_queries, head_dim) @ keys.swapaxes(-1, -2)
    if num_queries > 1:
        visible = mx.concatenate([_visible(num_queries, num_keys, window)] * group)
        scores = mx.where(visible, scores, mx.array(-mx.inf, scores.dtype))
    weights = mx.softmax(scores, axis=-1, precise=True)
    return (weights @ values).reshape(1, num_heads, num_queries, values.shape[-1])
