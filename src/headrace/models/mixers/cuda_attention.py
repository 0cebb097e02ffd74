"""Full attention layers on NVIDIA GPUs: two launches between the projections, whatever rows there are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from headrace.backend.cuda import attention as kernels
from headrace.models.fused import FusedLinear
from headrace.models.mixers.attention import read_row
from headrace.models.mixers.fused import Feed, Held, Table
from headrace.models.mixers.parts import AttentionParts
from headrace.models.mrope import MropeSections
from headrace.models.step import PackedStep, RowSpan, View
from headrace.state.attention import FullAttentionState
from headrace.state.slabs import Slot

LONGEST_WINDOW = 16
"""Rows of at most so many tokens go together; a longer chunk goes through the library's attention, alone."""


@dataclass(frozen=True, slots=True)
class _Places:
    """Where a step's rows have their keys and values.

    slots: one of each slab. plans: see `_held_of`. constants: the most keys that rows of a few tokens may have (their
    slots' capacities, as lengths are others in each step) and the most tokens; none without such rows.
    all_short: whether all rows are of a few tokens.
    """

    slots: tuple[Slot, ...]
    plans: tuple[Table, ...]
    constants: tuple[int, ...]
    all_short: bool


def _places(step: PackedStep, states: Sequence[FullAttentionState]) -> _Places:
    slabs: dict[int, tuple[int, Slot]] = {}
    rows, together = [], []
    longest = most = 0
    for span, state in zip(step.spans, states, strict=True):
        slot, num_tokens = state.slot, span.num_tokens
        slab, _ = slabs.setdefault(id(slot.slab), (len(slabs), slot))
        row = (span.lo, num_tokens, span.start, slab, slot.index, slot.capacity, 0, state.first)
        rows.append(row)
        if _is_short(span):
            together.append(row)
            longest, most = max(longest, slot.capacity), max(most, num_tokens)
    plans = (tuple(rows), tuple(together)) if together else (tuple(rows),)
    slots = tuple([slot for _, slot in slabs.values()])
    return _Places(slots, plans, (longest, most) if together else (), len(together) == len(rows))


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
        mx.eval(self._frequencies, self._one_axis, self._axes, self._norms, self._scale)

    def __call__(self, x: mx.array, mask: Any = None, cache: View | None = None) -> mx.array:
        """x: `[1, T, hidden]`; the mask is ours and always None."""
        assert cache is not None
        step = cache.step
        if step.exchange is not None:
            output, step.exchange.given[cache.layer] = self.compute(x, step.positions, step.exchange.feeds[cache.layer])
            return output
        states = self._states(cache)
        held = self._held_of(cache, states)
        together = [span for span in step.spans if _is_short(span)]
        feed = Feed([step.shared(table) for table in held.tables], held.arrays, held.constants)
        projected = self._project(x)
        queries = self._turned(projected, step.positions, feed)
        for span in together:
            if span.watch is not None and span.picks:
                span.watch.note(cache.layer, queries.swapaxes(0, 1)[None], span.picks, self._parts.scale, None)
        found = self._window(queries, projected, feed) if together else None
        if found is None or len(together) < len(states):
            parts = []
            for span, state in zip(step.spans, states, strict=True):
                if found is not None and _is_short(span):
                    parts.append(found[:, span.lo : span.hi])
                else:
                    parts.append(self._chunk(cache, span, state, queries, projected))
            found = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)
        return self._out(found)

    def held(self, view: View) -> Held | None:
        """See `FusedMixer`."""
        states = self._states(view)
        return self._held_of(view, states) if view.step.once(_places, states).all_short else None

    def compute(self, x: mx.array, positions: mx.array, feed: Feed) -> tuple[mx.array, Sequence[mx.array]]:
        """See `FusedMixer`."""
        projected = self._project(x)
        queries = self._turned(projected, positions, feed)
        return self._out(self._window(queries, projected, feed)), ()

    def take_over(self, step: PackedStep, held: Held, given: Sequence[mx.array]) -> None:
        """See `FusedMixer`: keys and values are written in place."""

    def _states(self, view: View) -> list[FullAttentionState]:
        return [span.state.full_attention(view.layer) for span in view.step.spans]

    def _held_of(self, view: View, states: Sequence[FullAttentionState]) -> Held:
        """Tables: the plans of all rows, and of those that go together. Constants: see `_window`."""
        shape, layer = self._parts.shape, view.layer
        places = view.step.once(_places, states)
        arrays = []
        for slot in places.slots:
            slot.prepare(layer, shape.num_kv_heads, (shape.head_dim, shape.head_dim), self._parts.dtype)
            arrays += [slot.slab.keys[layer], slot.slab.values[layer]]
        return Held(places.plans, tuple(arrays), places.constants)

    def _turned(self, projected: mx.array, positions: mx.array, feed: Feed) -> mx.array:
        """Queries `[T, num_heads, head_dim]`; keys and values are in their slots once these are."""
        has_axes = positions.ndim == 2
        if has_axes and self._axes is None:
            raise ValueError("the model's rope has one axis, the step's positions have three")
        axes = self._axes if has_axes and self._axes is not None else self._one_axis
        parts, frequencies = self._parts, (self._frequencies, axes)
        places = positions if has_axes else positions[None]
        return kernels.rope_append(
            parts.shape, parts.layout, feed.tables[0], places, projected, frequencies, _pairs(feed), self._norms
        )

    def _window(self, queries: mx.array, projected: mx.array, feed: Feed) -> mx.array:
        """What rows of a few tokens find, `[1, T, num_heads · head_dim]`, undefined elsewhere."""
        longest, most = feed.constants
        gate = self._parts.gate
        gates = None if gate is None else (projected, gate)
        return kernels.attend(
            self._parts.shape, feed.tables[1], (longest, most), queries, _pairs(feed), self._scale, None, gates
        )

    def _chunk(
        self, view: View, span: RowSpan, state: FullAttentionState, queries: mx.array, projected: mx.array
    ) -> mx.array:
        """What one row finds, `[1, n, num_heads · head_dim]`."""
        shape, gate = self._parts.shape, self._parts.gate
        found = read_row(view, span, state, queries.swapaxes(0, 1)[None], self._parts.scale, None, None)
        found = found.swapaxes(1, 2)
        if gate is not None:
            heads = projected[:, span.lo : span.hi, : shape.num_heads * gate.stride]
            gates = heads.reshape(1, span.num_tokens, shape.num_heads, gate.stride)[..., gate.at :]
            found = found * mx.sigmoid(gates)
        return found.reshape(1, span.num_tokens, -1)


def _pairs(feed: Feed) -> list[tuple[mx.array, mx.array]]:
    """Keys and values of each slab."""
    return list(zip(feed.arrays[::2], feed.arrays[1::2], strict=True))


def _is_short(span: RowSpan) -> bool:
    return span.num_tokens <= LONGEST_WINDOW and not span.two_way.full
