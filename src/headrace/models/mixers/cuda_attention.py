"""Attention layers on NVIDIA GPUs: a launch between the projections, two where prompts' chunks are among the rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from headrace.backend.cuda import attention as kernels
from headrace.backend.cuda.shapes import ProjectedHeads
from headrace.models.fused_linear import FusedLinear
from headrace.models.mixers.attention import reach, read_row, states_of
from headrace.models.mixers.fused import (
    MOST_TOKENS,
    KindInputs,
    LayerInputs,
    Table,
    next_power_of_two,
    padded_row_tokens,
    padded_size,
)
from headrace.models.mixers.parts import AttentionParts
from headrace.models.positions import MropeSections
from headrace.models.step import PackedStep, RowSpan, View, WindowMask
from headrace.state.attention import FullAttentionState, SlidingAttentionState
from headrace.state.layer import LayerKey
from headrace.state.slabs import Slab

SHORT_ROW_TOKENS = 80
"""Rows of at most so many tokens go through our kernel together, longer ones as `Kernels.attention_pairs` says. A
prediction head leaves fewer unread (speculate/speculator.py), of which the library took 40 ms and more for each row."""


@dataclass(frozen=True, slots=True)
class _Places:
    """Where a step's rows have their keys and values.

    slabs: the last one repeated up to a power of two, so that there are fewer compiled variants; none in layers with a
    window. plans: of all rows, and of those that the kernel takes together. most: the most tokens of such a row, 0
    without such rows. all_together: whether all rows are such.
    """

    slabs: tuple[Slab, ...]
    plans: tuple[Table, ...]
    most: int
    all_together: bool


def _in_slots(step: PackedStep, states: Sequence[FullAttentionState]) -> _Places:
    """Places in full-attention layers: a row's tokens begin where its slot does in the slab."""
    slabs = list({id(state.slot.slab): state.slot.slab for state in states}.values())
    numbers = {id(slab): number for number, slab in enumerate(slabs)}
    rows = []
    for span, state in zip(step.spans, states, strict=True):
        slot = state.slot
        place = (numbers[id(slot.slab)], 0, slot.slab.capacity, 0, slot.start + state.first)
        rows.append((span.lo, span.hi - span.lo, slot.start + span.start, *place))
    together = [row for row, span in zip(rows, step.spans, strict=True) if _goes_together(step, span, None)]
    slabs += slabs[-1:] * (next_power_of_two(len(slabs)) - len(slabs))
    return _places(step, rows, together, tuple(slabs))


def _in_buffers(step: PackedStep, states: Sequence[SlidingAttentionState], window: int) -> _Places:
    """Places in layers with a window: for the kernels a row's buffer is a slab, whose first token is the base."""
    rows = [
        (span.lo, span.num_tokens, span.start - state.base, slab, 0, state.capacity, window, 0)
        for slab, (span, state) in enumerate(zip(step.spans, states, strict=True))
    ]
    together = [row for row, span in zip(rows, step.spans, strict=True) if _goes_together(step, span, window)]
    return _places(step, rows, together, ())


def _places(
    step: PackedStep, rows: Sequence[tuple[int, ...]], together: Sequence[tuple[int, ...]], slabs: tuple[Slab, ...]
) -> _Places:
    plan = tuple(rows)
    if not together:
        return _Places(slabs, (plan,), 0, False)
    most = padded_row_tokens(max([num_tokens for _, num_tokens, *_ in together]))
    if len(together) < len(rows):
        return _Places(slabs, (plan, tuple(together)), most, False)
    size = padded_size(step.spans)
    if most > MOST_TOKENS:  # the most that there may be: prompts of all lengths share few variants
        most = size.num_tokens
    plan = size.padded(plan)
    return _Places(slabs, (plan, plan), most, True)


class CudaAttentionMixer(nn.Module):
    """Replaces an attention module of mlx-lm."""

    def __init__(self, inner: Any, parts: AttentionParts, sections: MropeSections | None) -> None:
        """sections: how channels go by several axes; None for a rope over one."""
        super().__init__()
        self.inner = inner
        self._parts = parts
        self._project = FusedLinear(parts.inputs)
        self._out = FusedLinear([parts.output])
        self.adds_residual = self._out.adds_residual
        self._frequencies = mx.array(parts.frequencies.astype(np.float32))
        num_pairs = len(parts.frequencies)
        self._one_axis = mx.zeros(num_pairs, mx.int32)
        self._axes = None if sections is None else mx.array(sections.axes()[:num_pairs], mx.int32)
        self._norms = parts.norms
        self._scale = mx.array([parts.scale])
        self._like = parts.shape.num_kv_heads, (parts.shape.head_dim, parts.shape.head_dim), parts.dtype
        mx.eval(self._frequencies, self._one_axis, self._axes, self._norms, self._scale, parts.sinks)

    def __call__(self, x: mx.array, *given: Any, residual: mx.array | None = None, **named: Any) -> mx.array:
        """x: `[1, T, hidden]`; residual: what is added to the output; the rest as in `Names.arguments`.

        The mask holds no more than the cache's window.
        """
        arguments = {**dict(zip(self._parts.arguments, given, strict=False)), **named}
        mask, factor = arguments.get("mask"), arguments.get("attn_scale")
        cache: View = arguments["cache"]
        if isinstance(mask, WindowMask) and mask.window != cache.window:
            raise ValueError(f"a mask of {mask.window} tokens at a layer whose window is {cache.window}")
        step = cache.step
        if step.layer_io is not None:
            inputs = step.layer_io.inputs[cache.layer]
            output, step.layer_io.outputs[cache.layer] = self.compute(x, step.positions, inputs, residual, factor)
            return output
        states: Sequence[Any] = states_of(cache, cache.window)
        if cache.window is None:
            places = step.once(_in_slots, states)
            arrays = self.stored(cache.layer, places.slabs)
        else:
            arrays = self.buffers(step, states)
            places = _in_buffers(step, states, cache.window)
        together = [span for span in step.spans if _goes_together(step, span, cache.window)]
        inputs = LayerInputs([step.shared(table) for table in places.plans], arrays, (places.most,))
        projected = self._project(x)
        queries = self._rotated(self._heads(projected, step.positions), inputs, factor)
        for span, state in zip(step.spans, states, strict=True):
            for length in span.state.snapshot_points:
                state.take_snapshot(length)
        for span in together:
            if span.recorder is not None and span.picks and cache.window is None:
                span.recorder.record(cache.layer, queries.swapaxes(0, 1)[None], span.picks, self._parts.scale, None)
        found = self._window(queries, projected, inputs) if together else None
        if found is None or len(together) < len(states):
            parts = []
            for span, state in zip(step.spans, states, strict=True):
                if found is not None and _goes_together(step, span, cache.window):
                    parts.append(found[:, span.lo : span.hi])
                else:
                    parts.append(self._chunk(cache, span, state, queries, projected))
            found = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)
        return self._out(found, residual)

    @staticmethod
    def together(mixers: Mapping[LayerKey, CudaAttentionMixer], window: Any) -> AttentionLayers:
        return AttentionLayers(mixers, window)

    def compute(
        self,
        x: mx.array,
        positions: mx.array,
        inputs: LayerInputs,
        residual: mx.array | None = None,
        factor: mx.array | None = None,
    ) -> tuple[mx.array, Sequence[mx.array]]:
        """Input `[1, T, hidden]` to output, residual added, and no array: keys and values are written in place.

        factor: on queries, `[T, 1]`.
        """
        projected = self._project(x)
        heads = self._heads(projected, positions)
        # Of windows one kernel rotates the heads and attends. Of chunks it would rotate each key again for every tile
        # of queries that sees it: 19 ms a layer for 2,048 tokens.
        is_one_kernel = factor is None and inputs.constants[0] <= MOST_TOKENS
        queries = heads if is_one_kernel else self._rotated(heads, inputs, factor)
        return self._out(self._window(queries, projected, inputs), residual), ()

    def stored(self, layer: LayerKey, slabs: Sequence[Slab]) -> list[mx.array]:
        """Keys and values of the slabs, made where no row has written the layer."""
        for slab in slabs:
            slab.prepare(layer, *self._like)
        return [stored[layer] for slab in slabs for stored in (slab.keys, slab.values)]

    def buffers(self, step: PackedStep, states: Sequence[SlidingAttentionState]) -> list[mx.array]:
        """Keys and values of rows in a layer with a window, with room for the step's tokens."""
        arrays: list[mx.array] = []
        for span, state in zip(step.spans, states, strict=True):
            state.prepare(span.start, span.num_tokens, *self._like)
            arrays += state.arrays()
        return arrays

    def _heads(self, projected: mx.array, positions: mx.array) -> ProjectedHeads:
        has_axes = positions.ndim == 2
        if has_axes and self._axes is None:
            raise ValueError("the model's rope has one axis, the step's positions have three")
        axes = self._axes if has_axes and self._axes is not None else self._one_axis
        places = positions if has_axes else positions[None]
        return ProjectedHeads(self._parts.layout, projected, places, (self._frequencies, axes), self._norms)

    def _rotated(self, heads: ProjectedHeads, inputs: LayerInputs, factor: mx.array | None) -> mx.array:
        """Queries `[T, num_heads, head_dim]`; keys and values are in their slots once these are."""
        queries = kernels.rope_append(self._parts.shape, inputs.tables[0], heads, _pairs(inputs))
        return queries if factor is None else queries * factor[..., None]

    def _window(self, queries: mx.array | ProjectedHeads, projected: mx.array, inputs: LayerInputs) -> mx.array:
        """Attention of rows of few tokens, `[1, T, num_heads · head_dim]`, undefined elsewhere."""
        (most,) = inputs.constants
        gate = self._parts.gate
        gates = None if gate is None else (projected, gate)
        return kernels.attend(
            self._parts.shape, inputs.tables[1], most, queries, _pairs(inputs), self._scale, self._parts.sinks, gates
        )

    def _chunk(
        self,
        view: View,
        span: RowSpan,
        state: FullAttentionState | SlidingAttentionState,
        queries: mx.array,
        projected: mx.array,
    ) -> mx.array:
        """Attention of one row, `[1, n, num_heads · head_dim]`."""
        shape, gate = self._parts.shape, self._parts.gate
        parts = self._parts
        found = read_row(view, span, state, queries.swapaxes(0, 1)[None], parts.scale, parts.sinks, view.window)
        found = found.swapaxes(1, 2)
        if gate is not None:
            heads = projected[:, span.lo : span.hi, : shape.num_heads * gate.stride]
            gates = heads.reshape(1, span.num_tokens, shape.num_heads, gate.stride)[..., gate.at :]
            found = found * mx.sigmoid(gates)
        return found.reshape(1, span.num_tokens, -1)


class AttentionLayers:
    """All such layers of a model with the same window in steps of few tokens."""

    def __init__(self, mixers: Mapping[LayerKey, CudaAttentionMixer], window: int | None) -> None:
        self._mixers = mixers
        self._window = window
        self._last = list(mixers)[-1]

    def inputs(self, step: PackedStep) -> KindInputs | None:
        """Their inputs in this step; None if some row can't be compiled."""
        places, arrays = self._in_slots(step) if self._window is None else self._in_buffers(step, self._window)
        return KindInputs(places.plans, arrays, (places.most,)) if places.all_together else None

    def _in_slots(self, step: PackedStep) -> tuple[_Places, list[mx.array]]:
        new = [span.state for span in step.spans if not span.state.has_layer(self._last)]
        if new:
            with new[0].pool.together():  # what layers are restored from
                for state, layer in product(new, self._mixers):
                    state.full_attention(layer)
        states = [span.state.full_attention(self._last) for span in step.spans]
        places = _in_slots(step, states)
        return places, [one for layer, mixer in self._mixers.items() for one in mixer.stored(layer, places.slabs)]

    def _in_buffers(self, step: PackedStep, window: int) -> tuple[_Places, list[mx.array]]:
        arrays: list[mx.array] = []
        make = partial(SlidingAttentionState, window)
        num_added = padded_size(step.spans).num_rows - len(step.spans)
        for layer, mixer in self._mixers.items():
            states = [span.state.layer(layer, make) for span in step.spans]
            own = mixer.buffers(step, states)
            arrays += own + own[-2:] * num_added
        return _in_buffers(step, states, window), arrays

    def keep_outputs(self, step: PackedStep, outputs: Sequence[Sequence[mx.array]]) -> None:
        """Take snapshots; keys and values are written in place."""
        for span in step.spans:
            for length in span.state.snapshot_points:
                for layer in self._mixers:
                    span.state.layer(layer, partial(SlidingAttentionState, self._window or 0)).take_snapshot(length)


def _pairs(inputs: LayerInputs) -> list[tuple[mx.array, mx.array]]:
    return list(zip(inputs.arrays[::2], inputs.arrays[1::2], strict=True))


def _goes_together(step: PackedStep, span: RowSpan, window: int | None) -> bool:
    """Whether the kernel takes this row: its windows count indices, so positions with gaps don't fit."""
    if span.num_tokens > max(SHORT_ROW_TOKENS, step.kernels.attention_pairs // span.end):
        return False
    if window is None:
        return not span.bidirectional.full
    return not span.bidirectional.windowed and reach(span, span.start, span.end, window)[1] is None
