"""Attention of short rows whose keys and values lie in one slab: one call writes them, and one reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from headrace.models.step import NO_SPANS, PackedStep, Row
from headrace.state.attention import FullAttentionState
from headrace.state.slabs import BatchSlab

LONGEST_QUERY = 8
"""Tokens of a row, at most so many, go with others of its slab: those that the library's vector kernel takes."""

_NONE = -1
"""No packed token: any may be computed here, and the result is not used."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Rows of one slab with equally many tokens, read by one call.

    start, end: the slab's rows, perhaps with some between that have no tokens in this step.
    tokens: packed tokens in the order of the slab's rows, `_NONE` where a row has none.
    last: `[end - start, n]`, the last key that each token sees. longest: keys read.
    """

    slab: BatchSlab
    start: int
    end: int
    tokens: tuple[int, ...]
    last: tuple[tuple[int, ...], ...]
    longest: int


@dataclass(frozen=True, slots=True, eq=False)
class SlabTokens:
    """Packed tokens, and the row and place in a slab that each one's key goes to."""

    slab: BatchSlab
    tokens: tuple[int, ...]
    places: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class BatchPlan:
    """How a step goes through layers of full attention.

    written_alone, read_alone: numbers of the rows that no call takes together with others.
    order: where each packed token is in the outputs of the batches and then of the rows that are read alone.
    """

    writes: tuple[SlabTokens, ...]
    batches: tuple[Batch, ...]
    written_alone: tuple[int, ...]
    read_alone: tuple[int, ...]
    order: tuple[int, ...]


def plan_batches(step: PackedStep, states: Sequence[FullAttentionState]) -> BatchPlan:
    by_slab: dict[int, list[int]] = {}
    for number, (row, state) in enumerate(zip(step.rows, states, strict=True)):
        is_plain = row.recorder is None and row.bidirectional is NO_SPANS
        if isinstance(state.slot.slab, BatchSlab) and is_plain and row.num_tokens <= LONGEST_QUERY:
            by_slab.setdefault(id(state.slot.slab), []).append(number)
    writes, batches, written, read = [], [], set[int](), set[int]()
    for numbers in by_slab.values():
        if len(numbers) > 1:
            writes.append(_slab_tokens([(step.rows[number], states[number]) for number in numbers]))
            written.update(numbers)
        for num_tokens in {step.rows[number].num_tokens for number in numbers}:
            own = [number for number in numbers if step.rows[number].num_tokens == num_tokens]
            batch = _batch([(step.rows[number], states[number]) for number in own])
            if len(own) > 1 and batch.end - batch.start <= 2 * len(own):
                batches.append(batch)
                read.update(own)
    alone = [number for number in range(len(step.rows)) if number not in read]
    computed = [token for batch in batches for token in batch.tokens]
    computed += [token for number in alone for token in range(step.rows[number].lo, step.rows[number].hi)]
    place = {token: index for index, token in enumerate(computed)}
    return BatchPlan(
        tuple(writes),
        tuple(batches),
        tuple([number for number in range(len(step.rows)) if number not in written]),
        tuple(alone),
        tuple([place[token] for token in range(step.num_tokens)]),
    )


def _slab_tokens(rows: Sequence[tuple[Row, FullAttentionState]]) -> SlabTokens:
    slab = rows[0][1].slot.slab
    assert isinstance(slab, BatchSlab)
    tokens = [token for row, _ in rows for token in range(row.lo, row.hi)]
    places = [(state.slot.row, place) for row, state in rows for place in range(row.start, row.end)]
    return SlabTokens(slab, tuple(tokens), tuple(places))


def _batch(rows: Sequence[tuple[Row, FullAttentionState]]) -> Batch:
    by_row = {state.slot.row: row for row, state in rows}
    slab, (row, *_) = rows[0][1].slot.slab, by_row.values()
    assert isinstance(slab, BatchSlab)
    start, end = min(by_row), max(by_row) + 1
    tokens: list[int] = []
    last: list[tuple[int, ...]] = []
    for index in range(start, end):
        own = by_row.get(index)
        tokens += (_NONE,) * row.num_tokens if own is None else range(own.lo, own.hi)
        last.append((0,) * row.num_tokens if own is None else tuple(range(own.start, own.end)))
    return Batch(slab, start, end, tuple(tokens), tuple(last), max(each.end for each in by_row.values()))


def write_together(
    step: PackedStep, one: SlabTokens, state: FullAttentionState, new: tuple[mx.array, mx.array]
) -> None:
    """Put the tokens' keys and values, of `[1, num_kv_heads, T, head_dim]`, into the slab. state: any of its rows'."""
    slab, layer, (keys, values) = one.slab, state.layer, state.stored(*new)
    num_heads = keys.shape[1]
    slab.prepare(layer, num_heads, (keys.shape[3], values.shape[3]), keys.dtype)

    def places() -> mx.array:
        starts = [(row * num_heads * slab.capacity + place) for row, place in one.places]
        rows = [[start + head * slab.capacity for head in range(num_heads)] for start in starts]
        return mx.array(rows, mx.uint32)

    at = step.cached((one, num_heads), places)
    for stored, part in ((slab.keys, keys), (slab.values, values)):
        own = _pick(step, part.swapaxes(0, 2), one.tokens).squeeze(2)
        # as one axis: otherwise indices of the heads are made and cast for each layer
        flat = stored[layer].reshape(-1, part.shape[3])
        flat[at] = own
        # the Python object stays: another one that holds the old array would make MLX copy it
        stored[layer][...] = flat.reshape(stored[layer].shape)


def read_together(
    step: PackedStep, batch: Batch, state: FullAttentionState, queries: mx.array, scale: float, sinks: mx.array | None
) -> mx.array:
    """Attention of a batch's tokens, of queries `[1, num_heads, T, head_dim]`: `[tokens, num_heads, 1, value_dim]`."""
    num_heads, head_dim = queries.shape[1], queries.shape[3]
    num_rows, num_tokens = len(batch.last), len(batch.last[0])
    own = _pick(step, queries.swapaxes(0, 2), batch.tokens)
    own = own.reshape(num_rows, num_tokens, num_heads, head_dim).swapaxes(1, 2)
    place = slice(batch.start, batch.end), slice(None), slice(0, batch.longest)
    slab, layer = batch.slab, state.layer
    keys, values = state.dequantized(slab.keys[layer][place], slab.values[layer][place])

    def mask() -> mx.array:
        places, last = mx.arange(batch.longest), mx.array(batch.last)[:, None, :, None]
        visible = places <= last if not state.first else (places <= last) & (places >= state.first)
        # for all heads: the library would copy a mask of one head anew in each layer
        return mx.contiguous(mx.broadcast_to(visible, (num_rows, num_heads, num_tokens, batch.longest)))

    found = mx.fast.scaled_dot_product_attention(
        own, keys, values, scale=scale, mask=step.cached((batch, num_heads, state.first), mask), sinks=sinks
    )
    return found.swapaxes(1, 2).reshape(num_rows * num_tokens, num_heads, 1, -1)


def in_step_order(step: PackedStep, plan: BatchPlan, outputs: Sequence[mx.array]) -> mx.array:
    """`[1, num_heads, T, value_dim]` of outputs `[tokens, num_heads, 1, value_dim]` as in the plan's `order`."""
    joined = mx.concatenate(list(outputs))
    return _pick(step, joined, plan.order).swapaxes(0, 2)


def _pick(step: PackedStep, by_token: mx.array, tokens: tuple[int, ...]) -> mx.array:
    """Tokens of `[T, …]`; the array itself if these are all of them, in order."""
    if tokens == tuple(range(by_token.shape[0])):
        return by_token
    return mx.take(by_token, step.cached((_pick, tokens), lambda: mx.array(tokens, mx.int32)), axis=0)
