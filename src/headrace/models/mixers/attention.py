"""`attend`: the one place that writes keys and values and chooses how to read them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial

import mlx.core as mx
import numpy as np

from headrace.models.mixers.attention_batches import in_step_order, plan_batches, read_together, write_together
from headrace.models.step import NO_SPANS, Row, View
from headrace.state.attention import FullAttentionState, SlidingAttentionState

QUERY_BLOCK = 128
"""Queries that are folded at once: keys after a block are not touched."""
SCORE_ELEMENTS = 16 * 1024 * 1024
"""Scores held at once where queries are folded: 64 MiB in float32."""


def attend(
    view: View,
    queries: mx.array,
    new: tuple[mx.array, mx.array] | None,
    scale: float,
    sinks: mx.array | None,
    window: int | None,
) -> mx.array:
    """Causal attention of each row over its own tokens; tokens of a bidirectional run also see the later ones in it.

    queries: `[1, num_heads, T, head_dim]`.
    new: keys and values `[1, num_kv_heads, T, head_dim]` of the step's tokens; None for a layer that reads what
    another one wrote.
    window: how many positions a token sees, its own included; None for all. Where positions have gaps, it sees those
    of the window's tokens that were computed.

    Gives `[1, num_heads, T, value_dim]`.
    """
    rows = view.step.rows
    if window is None and view.step.kernels.attends_in_batches:
        return _attend_in_batches(view, queries, new, scale, sinks)
    states = states_of(view, window)
    if new is not None:
        # all writes before any read: see the in-place contract in state/slabs.py
        _write_rows(rows, states, new, range(len(rows)))
    if sinks is None and _are_decoding(view):
        return _attend_tokens(rows, states, queries, scale, window)
    outputs = [
        read_row(view, row, state, queries, scale, sinks, window) for row, state in zip(rows, states, strict=True)
    ]
    return mx.concatenate(outputs, axis=2)


def _attend_in_batches(
    view: View, queries: mx.array, new: tuple[mx.array, mx.array] | None, scale: float, sinks: mx.array | None
) -> mx.array:
    """`attend` without a window, for short rows of one slab together."""
    step, rows = view.step, view.step.rows
    states = [row.state.full_attention(view.layer) for row in rows]
    plan = step.cached(plan_batches, lambda: plan_batches(step, states))
    if new is not None:
        for one in plan.writes:
            write_together(step, one, states[0], new)
        _write_rows(rows, states, new, plan.written_alone)
    outputs = [read_together(step, batch, states[0], queries, scale, sinks) for batch in plan.batches]
    alone = [read_row(view, rows[number], states[number], queries, scale, sinks, None) for number in plan.read_alone]
    if len(rows) == 1:
        return alone[0]
    outputs += [found.swapaxes(0, 2) for found in alone]
    return in_step_order(step, plan, outputs)


def _write_rows(
    rows: Sequence[Row],
    states: Sequence[FullAttentionState | SlidingAttentionState],
    new: tuple[mx.array, mx.array],
    numbers: Sequence[int],
) -> None:
    """Write the keys and values of these rows, one by one."""
    keys, values = (_by_row(rows, array) for array in new) if numbers else ((), ())
    for number in numbers:
        states[number].write(rows[number].start, keys[number], values[number])


def _by_row(rows: Sequence[Row], array: mx.array) -> Sequence[mx.array]:
    """The parts `[1, heads, n, dim]` of an array `[1, heads, T, dim]` that belong to each row."""
    # one operation for all of them
    return list(mx.split(array, [row.lo for row in rows[1:]], axis=2)) if len(rows) > 1 else [array]


def _are_decoding(view: View) -> bool:
    """Whether each row is one token that sees all keys before it and isn't recorded."""
    step = view.step
    return (
        step.kernels.folds_query_heads
        and step.num_tokens == len(step.rows)
        and all(row.recorder is None and row.bidirectional is NO_SPANS for row in step.rows)
    )


def _attend_tokens(
    rows: Sequence[Row],
    states: Sequence[FullAttentionState | SlidingAttentionState],
    queries: mx.array,
    scale: float,
    window: int | None,
) -> mx.array:
    """`attend` for rows of one token each, folded: operations that need no keys are done for all rows at once."""
    _, num_heads, num_rows, head_dim = queries.shape
    scaled = queries * scale
    by_token = scaled if num_rows == 1 else scaled.swapaxes(1, 2)
    outputs: list[mx.array] = []
    folded: Sequence[mx.array] = []
    for number, (row, state) in enumerate(zip(rows, states, strict=True)):
        first, _ = reach(row, row.start, row.end, window)
        keys, values = state.read(first, row.end)
        if not folded:
            by_head = by_token.reshape(num_rows, keys.shape[1], -1, head_dim)
            folded = list(mx.split(by_head, num_rows)) if num_rows > 1 else [by_head]
        weights = mx.softmax(folded[number] @ keys.swapaxes(-1, -2), axis=-1, precise=True)
        outputs.append(weights @ values)
    joined = mx.concatenate(outputs) if num_rows > 1 else outputs[0]
    return (
        joined.reshape(1, num_heads, 1, -1)
        if num_rows == 1
        else joined.reshape(1, num_rows, num_heads, -1).swapaxes(1, 2)
    )


def read_row(
    view: View,
    row: Row,
    state: FullAttentionState | SlidingAttentionState,
    queries: mx.array,
    scale: float,
    sinks: mx.array | None,
    window: int | None,
) -> mx.array:
    """`attend` for one row, whose keys and values are written: `[1, num_heads, n, value_dim]`."""
    kernels = view.step.kernels
    folds = kernels.folds_query_heads and sinks is None
    if row.recorder is not None and row.picks and window is None:
        row.recorder.record(view.layer, queries, row.picks, scale, sinks)
    outputs = []
    for lo, hi, bidirectional in _parts(row, window is not None, kernels.goes_token_by_token):
        start, end = row.start + lo - row.lo, row.start + hi - row.lo
        first, positions = reach(row, start, end, window)
        found = _attention(
            queries[:, :, lo:hi],
            *state.read(first, end),
            scale,
            window,
            positions,
            sinks,
            folds=folds,
            bidirectional=bidirectional,
            score_bytes=None if folds else kernels.score_bytes(queries.shape[3], hi - lo),
            cached=view.step.cached,
        )
        outputs.append(found)
    return mx.concatenate(outputs, axis=2)


def _parts(row: Row, has_window: bool, token_by_token: bool) -> list[tuple[int, int, bool]]:
    """The row's tokens, split at bidirectional runs, and whether a part is one.

    The rest in one part or, under a window, one by one: its sums then run over the same keys as in decoding.
    """
    parts: list[tuple[int, int, bool]] = []
    done = row.lo
    runs = row.bidirectional.windowed if has_window else row.bidirectional.full
    for lo, hi in (*((row.lo + lo, row.lo + hi) for lo, hi in runs), (row.hi, row.hi)):
        if has_window and token_by_token:
            parts += [(token, token + 1, False) for token in range(done, lo)]
        elif lo > done:
            parts.append((done, lo, False))
        if hi > lo:
            parts.append((lo, hi, True))
        done = hi
    return parts


def reach(row: Row, start: int, end: int, window: int | None) -> tuple[int, mx.array | None]:
    """The first token visible to any of the tokens `start` to `end`, and positions from there on if they have gaps."""
    if window is None:
        return 0, None
    first = max(0, start - window + 1)
    if row.positions is None:
        return first, None
    positions = row.positions.at(first, end)
    if positions[-1] - positions[0] == end - first - 1:
        return first, None
    hidden = int(np.searchsorted(positions, positions[start - first] - window, side="right"))
    return first + hidden, mx.array(positions[hidden:])


def states_of(view: View, window: int | None) -> Sequence[FullAttentionState | SlidingAttentionState]:
    layer, rows = view.layer, view.step.rows
    if window is None:
        return [row.state.full_attention(layer) for row in rows]
    make = partial(SlidingAttentionState, window)
    return [row.state.layer(layer, make) for row in rows]


def _visible(num_queries: int, num_keys: int, window: int | None, positions: mx.array | None) -> mx.array:
    """`[num_queries, num_keys]`: which keys a query sees; the last query stands at the last key.

    positions: of the keys, `[num_keys]`; None if they have no gaps.
    """
    places = mx.arange(num_keys) if positions is None else positions
    query, key = places[num_keys - num_queries :, None], places[None]
    visible = key <= query
    return visible if window is None else visible & (key > query - window)


def _within_window(num_queries: int, num_keys: int, window: int | None, num_behind: int) -> mx.array | None:
    """As `_visible`, for queries that also see all later keys; None if they see all earlier ones as well.

    The last query stands `num_behind` keys before the last.
    """
    if window is None or num_keys <= window:
        return None
    last = num_keys - num_behind
    return mx.arange(num_keys)[None] > mx.arange(last - num_queries, last)[:, None] - window


def _attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    window: int | None,
    positions: mx.array | None = None,
    sinks: mx.array | None = None,
    *,
    folds: bool,
    bidirectional: bool = False,
    score_bytes: int | None = None,
    cached: Callable[[Hashable, Callable[[], mx.array]], mx.array] = lambda key, make: make(),
) -> mx.array:
    """Attention of the queries of the last keys, in blocks that bound the scores' memory.

    folds: whether by our matmuls, see `Kernels.folds_query_heads`, or by the library's attention, whose scores take
    at most `score_bytes`. positions: of the keys, if they have gaps. cached: see `PackedStep.cached`.
    """
    _, num_heads, num_queries, _ = queries.shape
    num_keys, block = keys.shape[2], num_queries
    if folds:
        block = min(QUERY_BLOCK, SCORE_ELEMENTS // (num_heads * num_keys))
    elif score_bytes is not None:
        block = score_bytes // (num_heads * num_keys * queries.dtype.size)
    outputs = []
    for own, seen, num_behind in _blocks(num_queries, num_keys, max(1, block), window, bidirectional=bidirectional):
        num_own, num_seen = own.stop - own.start, seen.stop - seen.start
        mask: mx.array | str | None = None
        if bidirectional:
            mask = _within_window(num_own, num_seen, window, num_behind)
        elif num_queries == 1:
            pass  # it sees all keys that were read for it
        elif folds or positions is not None:
            mask = _visible(num_own, num_seen, window, None if positions is None else positions[seen])
        elif window is not None and num_own > 1 and num_seen > window:
            make = partial(_visible, num_own, num_seen, window, None)
            mask = cached((_visible, num_own, num_seen, window), make)
        elif num_own > 1:
            mask = "causal"
        part = queries[:, :, own], keys[:, :, seen], values[:, :, seen]
        if folds:
            assert not isinstance(mask, str)
            outputs.append(_folded(*part, scale, mask))
        else:
            outputs.append(mx.fast.scaled_dot_product_attention(*part, scale=scale, mask=mask, sinks=sinks))
    return mx.concatenate(outputs, axis=2)


def _blocks(
    num_queries: int, num_keys: int, size: int, window: int | None, *, bidirectional: bool
) -> Iterator[tuple[slice, slice, int]]:
    """Blocks of at most `size` queries, the keys that any of a block sees, and how many of those follow its last query.

    The last query stands at the last key.
    """
    for lo in range(0, num_queries, size):
        hi = min(lo + size, num_queries)
        last = num_keys - num_queries + hi
        end = num_keys if bidirectional else last
        start = 0 if window is None else max(0, last - (hi - lo) - window + 1)
        yield slice(lo, hi), slice(start, end), end - last


def _folded(queries: mx.array, keys: mx.array, values: mx.array, scale: float, visible: mx.array | None) -> mx.array:
    """The query heads of a key head as rows of one matmul."""
    _, num_heads, num_queries, head_dim = queries.shape
    num_kv_heads = keys.shape[1]
    group = num_heads // num_kv_heads
    scores = (queries * scale).reshape(1, num_kv_heads, group * num_queries, head_dim) @ keys.swapaxes(-1, -2)
    if visible is not None:
        scores = mx.where(mx.concatenate([visible] * group), scores, mx.array(-mx.inf, scores.dtype))
    weights = mx.softmax(scores, axis=-1, precise=True)
    return (weights @ values).reshape(1, num_heads, num_queries, values.shape[-1])
