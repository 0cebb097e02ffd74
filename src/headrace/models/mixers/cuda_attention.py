"""Attention layers on NVIDIA GPUs: two launches between the projections, whatever rows there are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from headrace.backend.cuda import attention as kernels
from headrace.models.fused import FusedLinear
from headrace.models.mixers.attention import reach, read_row, states_of
from headrace.models.mixers.fused import Feed, Held, Table, coarse
from headrace.models.mixers.parts import AttentionParts
from headrace.models.mrope import MropeSections
from headrace.models.step import PackedStep, RowSpan, View, WindowMask
from headrace.state.attention import FullAttentionState, SlidingAttentionState
from headrace.state.slabs import Slot

LONGEST_WINDOW = 80
"""Rows of at most so many tokens go together; a longer chunk goes through the library's attention, alone. A prediction
head leaves fewer unread (speculate/speculator.py), of which the library took 40 ms and more for each row."""


@dataclass(frozen=True, slots=True)
class _Places:
    """Where a step's rows have their keys and values.

    slots: one of each slab, by capacity, so that fewer forms of a step differ; none in layers with a window. plans: see
    `_held_of`. constants: the most keys that tokens of short rows may see (their slots' capacities, as lengths are
    others in each step), the most tokens of such a row, and all capacities, by which a form's arrays differ; none
    without such rows. all_short: whether all rows are of a few tokens.
    """

    slots: tuple[Slot, ...]
    plans: tuple[Table, ...]
    constants: tuple[int, ...]
    all_short: bool


def _places(step: PackedStep, states: Sequence[FullAttentionState]) -> _Places:
    slots = sorted({id(state.slot.slab): state.slot for state in states}.values(), key=lambda slot: slot.capacity)
    slabs = {id(slot.slab): number for number, slot in enumerate(slots)}
    rows, together = [], []
    longest = most = 0
    for span, state in zip(step.spans, states, strict=True):
        slot, num_tokens = state.slot, span.num_tokens
        row = (span.lo, num_tokens, span.start, slabs[id(slot.slab)], slot.index, slot.capacity, 0, state.first)
        rows.append(row)
        if _is_short(span, None):
            together.append(row)
            longest, most = max(longest, slot.capacity), max(most, num_tokens)
    plans = (tuple(rows), tuple(together)) if together else (tuple(rows),)
    constants = (longest, coarse(most), *[slot.capacity for slot in slots]) if together else ()
    return _Places(tuple(slots), plans, constants, len(together) == len(rows))


@dataclass(frozen=True, slots=True)
class _Buffers:
    """Where rows have their keys and values in a layer with a window: the base and capacity of each row's own buffer.

    To the kernels it is a slab with one slot, whose first token is the base. Called, it gives the step's places.
    """

    window: int
    of_rows: tuple[tuple[int, int], ...]

    def __call__(self, step: PackedStep, _: None) -> _Places:
        rows, together = [], []
        for slab, (span, (base, capacity)) in enumerate(zip(step.spans, self.of_rows, strict=True)):
            row = (span.lo, span.num_tokens, span.start - base, slab, 0, capacity, self.window, 0)
            rows.append(row)
            if _is_short(span, self.window):
                together.append(row)
        most = coarse(max([row[1] for row in together], default=1))
        plans = (tuple(rows), tuple(together)) if together else (tuple(rows),)
        constants = (self.window + most, most, *[capacity for _, capacity in self.of_rows]) if together else ()
        return _Places((), plans, constants, len(together) == len(rows))


class CudaAttentionMixer(nn.Module):
    """Stands where an attention module of mlx-lm stood."""

    def __init__(self, inner: Any, parts: AttentionParts, sections: MropeSections | None) -> None:
        """sections: how channels go by several axes; None for a rope over one."""
        super().__init__()
        self.inner = inner
        self._parts = parts
        self._project = FusedLinear(parts.inputs)
        self._out = FusedLinear([parts.output])
        self._frequencies = mx.array(parts.frequencies.astype(np.float32))
        num_pairs = len(parts.frequencies)
        self._one_axis = mx.zeros(num_pairs, mx.int32)
        self._axes = None if sections is None else mx.array(sections.axes()[:num_pairs], mx.int32)
        self._norms = parts.norms
        self._scale = mx.array([parts.scale])
        mx.eval(self._frequencies, self._one_axis, self._axes, self._norms, self._scale, parts.sinks)

    def __call__(self, x: mx.array, *given: Any, residual: mx.array | None = None, **named: Any) -> mx.array:
        """x: `[1, T, hidden]`; residual: what is added to the output; the rest as in `Names.arguments`.

        The mask tells no more than the cache's window.
        """
        arguments = {**dict(zip(self._parts.arguments, given, strict=False)), **named}
        mask, factor = arguments.get("mask"), arguments.get("attn_scale")
        cache: View = arguments["cache"]
        if isinstance(mask, WindowMask) and mask.window != cache.window:
            raise ValueError(f"a mask of {mask.window} tokens at a layer whose window is {cache.window}")
        step = cache.step
        if step.exchange is not None:
            feed = step.exchange.feeds[cache.layer]
            output, step.exchange.given[cache.layer] = self.compute(x, step.positions, feed, residual, factor)
            return output
        states = self._states(cache)
        held, _ = self._held_of(cache, states)
        together = [span for span in step.spans if _is_short(span, cache.window)]
        feed = Feed([step.shared(table) for table in held.tables], held.arrays, held.constants)
        projected = self._project(x)
        queries = self._turned(projected, step.positions, feed, factor)
        for span, state in zip(step.spans, states, strict=True):
            for mark in span.state.marks:
                state.note(mark)
        for span in together:
            if span.watch is not None and span.picks and cache.window is None:
                span.watch.note(cache.layer, queries.swapaxes(0, 1)[None], span.picks, self._parts.scale, None)
        found = self._window(queries, projected, feed) if together else None
        if found is None or len(together) < len(states):
            parts = []
            for span, state in zip(step.spans, states, strict=True):
                if found is not None and _is_short(span, cache.window):
                    parts.append(found[:, span.lo : span.hi])
                else:
                    parts.append(self._chunk(cache, span, state, queries, projected))
            found = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)
        return self._out(found, residual)

    def held(self, view: View) -> Held | None:
        """See `FusedMixer`."""
        held, all_short = self._held_of(view, self._states(view))
        return held if all_short else None

    def compute(
        self,
        x: mx.array,
        positions: mx.array,
        feed: Feed,
        residual: mx.array | None = None,
        factor: mx.array | None = None,
    ) -> tuple[mx.array, Sequence[mx.array]]:
        """See `FusedMixer`. factor: on queries, `[T, 1]`."""
        projected = self._project(x)
        queries = self._turned(projected, positions, feed, factor)
        return self._out(self._window(queries, projected, feed), residual), ()

    def take_over(self, step: PackedStep, held: Held, given: Sequence[mx.array]) -> None:
        """See `FusedMixer`: keys and values are written in place."""

    def _states(self, view: View) -> Sequence[Any]:
        return states_of(view, view.window)

    def _held_of(self, view: View, states: Sequence[Any]) -> tuple[Held, bool]:
        """Tables: the plans of all rows, and of those that go together. Constants: see `_window`.

        And whether all rows are of a few tokens.
        """
        parts, layer, arrays = self._parts, view.layer, []
        like = parts.shape.num_kv_heads, (parts.shape.head_dim, parts.shape.head_dim), parts.dtype
        if view.window is None:
            places = view.step.once(_places, states)
            for slot in places.slots:
                slot.prepare(layer, *like)
                arrays += [slot.slab.keys[layer], slot.slab.values[layer]]
        else:
            for span, state in zip(view.step.spans, states, strict=True):
                state.prepare(span.start, span.num_tokens, *like)
                arrays += state.keys, state.values
            buffers = _Buffers(view.window, tuple([(state.base, state.capacity) for state in states]))
            places = view.step.once(buffers, None)
        return Held(places.plans, tuple(arrays), places.constants), places.all_short

    def _turned(self, projected: mx.array, positions: mx.array, feed: Feed, factor: mx.array | None) -> mx.array:
        """Queries `[T, num_heads, head_dim]`; keys and values are in their slots once these are."""
        has_axes = positions.ndim == 2
        if has_axes and self._axes is None:
            raise ValueError("the model's rope has one axis, the step's positions have three")
        axes = self._axes if has_axes and self._axes is not None else self._one_axis
        parts, frequencies = self._parts, (self._frequencies, axes)
        places = positions if has_axes else positions[None]
        queries = kernels.rope_append(
            parts.shape, parts.layout, feed.tables[0], places, projected, frequencies, _pairs(feed), self._norms
        )
        return queries if factor is None else queries * factor[..., None]

    def _window(self, queries: mx.array, projected: mx.array, feed: Feed) -> mx.array:
        """What rows of a few tokens find, `[1, T, num_heads · head_dim]`, undefined elsewhere."""
        longest, most, *_ = feed.constants
        gate = self._parts.gate
        gates = None if gate is None else (projected, gate)
        return kernels.attend(
            self._parts.shape,
            feed.tables[1],
            (longest, most),
            queries,
            _pairs(feed),
            self._scale,
            self._parts.sinks,
            gates,
        )

    def _chunk(
        self,
        view: View,
        span: RowSpan,
        state: FullAttentionState | SlidingAttentionState,
        queries: mx.array,
        projected: mx.array,
    ) -> mx.array:
        """What one row finds, `[1, n, num_heads · head_dim]`."""
        shape, gate = self._parts.shape, self._parts.gate
        parts = self._parts
        found = read_row(view, span, state, queries.swapaxes(0, 1)[None], parts.scale, parts.sinks, view.window)
        found = found.swapaxes(1, 2)
        if gate is not None:
            heads = projected[:, span.lo : span.hi, : shape.num_heads * gate.stride]
            gates = heads.reshape(1, span.num_tokens, shape.num_heads, gate.stride)[..., gate.at :]
            found = found * mx.sigmoid(gates)
        return found.reshape(1, span.num_tokens, -1)


def _pairs(feed: Feed) -> list[tuple[mx.array, mx.array]]:
    """Keys and values of each slab."""
    return list(zip(feed.arrays[::2], feed.arrays[1::2], strict=True))


def _is_short(span: RowSpan, window: int | None) -> bool:
    """Whether the kernels can do it: a window of theirs goes by places, which positions with gaps are not."""
    if window is None:
        return span.num_tokens <= LONGEST_WINDOW and not span.two_way.full
    is_short = span.num_tokens <= LONGEST_WINDOW and not span.two_way.windowed
    return is_short and reach(span, span.start, span.end, window)[1] is None
