"""Attention layers on NVIDIA GPUs: a launch between the projections, three where prompts' chunks are among the rows."""

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
from headrace.backend.cuda.shapes import LONGEST_WINDOW, ProjectedHeads
from headrace.models.fused_linear import FusedLinear
from headrace.models.mixers.attention import reach, read_row, states_of
from headrace.models.mixers.parts import AttentionParts
from headrace.models.padding import PaddedSize, next_power_of_two, padded_row_tokens, padded_size
from headrace.models.positions import MropeSections
from headrace.models.step import KernelInputs, PackedStep, Row, Table, View, WindowMask
from headrace.state.attention import FullAttentionState, SlidingAttentionState
from headrace.state.layer import LayerKey
from headrace.state.slabs import Slab

SHORT_ROW_TOKENS = 80
"""Rows of at most this many tokens are short: our kernel computes them together, and longer ones as
`Kernels.attention_pairs` says. The windows of a prediction head are shorter (speculate/speculator.py), because the
library took 40 ms and more for each of their rows."""
_LIBRARY_HEAD_DIM = 128
"""Of wider heads the library's attention holds all scores in memory, so our kernel takes rows of all lengths."""


@dataclass(frozen=True, slots=True)
class _AttentionPlan:
    """Which keys and values a step's rows read, see rows.cuh.

    tables: of all rows, and of those that the kernel takes if these are fewer. is_fused: by row, whether it is such.
    max_tokens: of such a row, padded. slabs: of full attention, the last one repeated up to a power of two, so that
    there are fewer compiled variants.
    """

    tables: tuple[Table, ...]
    is_fused: Sequence[bool]
    max_tokens: int
    slabs: Sequence[Slab] = ()


def _plan_slots(step: PackedStep, states: Sequence[FullAttentionState], head_dim: int) -> _AttentionPlan:
    """Of full attention: a row's tokens begin where its slot does in the slab."""
    slabs = list({id(state.slot.slab): state.slot.slab for state in states}.values())
    numbers = {id(slab): number for number, slab in enumerate(slabs)}
    table = []
    for row, state in zip(step.rows, states, strict=True):
        slot = state.slot
        place = (numbers[id(slot.slab)], 0, slot.slab.capacity, 0, slot.start + state.first)
        table.append((row.lo, row.hi - row.lo, slot.start + row.start, *place))
    slabs += slabs[-1:] * (next_power_of_two(len(slabs)) - len(slabs))
    return _plan(step, table, None, head_dim, slabs)


def _plan_buffers(
    step: PackedStep, states: Sequence[SlidingAttentionState], window: int, head_dim: int
) -> _AttentionPlan:
    """Of layers with a window: for the kernels a row's buffer is a slab, whose first token is the base."""
    table = [
        (row.lo, row.hi - row.lo, row.start - state.base, slab, 0, state.capacity, window, 0)
        for slab, (row, state) in enumerate(zip(step.rows, states, strict=True))
    ]
    return _plan(step, table, window, head_dim)


def _plan(
    step: PackedStep,
    table: Sequence[tuple[int, ...]],
    window: int | None,
    head_dim: int,
    slabs: Sequence[Slab] = (),
) -> _AttentionPlan:
    is_fused = [_is_fused(step, row, window, head_dim) for row in step.rows]
    fused = [numbers for numbers, each in zip(table, is_fused, strict=True) if each]
    if not fused:
        return _AttentionPlan((tuple(table),), is_fused, 0, slabs)
    size = padded_size(step.rows)
    if all(row.is_short for row in step.rows):
        max_tokens = padded_row_tokens(max([num_tokens for _, num_tokens, *_ in fused]))
    else:  # the most that there may be: prompts of all lengths share few variants
        max_tokens = size.num_tokens
    if len(fused) < len(table):
        return _AttentionPlan((tuple(table), tuple(fused)), is_fused, max_tokens, slabs)
    return _AttentionPlan((size.padded(tuple(table)),), is_fused, max_tokens, slabs)


def _is_fused(step: PackedStep, row: Row, window: int | None, head_dim: int) -> bool:
    """Whether the kernel takes this row: its windows count indices, so positions with gaps don't fit."""
    is_long = row.num_tokens > max(SHORT_ROW_TOKENS, step.kernels.attention_pairs // row.end)
    if is_long and head_dim <= _LIBRARY_HEAD_DIM and not step.kernels.is_invariant:
        return False
    if window is None:
        return not row.bidirectional.full
    return not row.bidirectional.windowed and reach(row, row.start, row.end, window)[1] is None


class CudaAttentionMixer(nn.Module):
    """Replaces an attention module of mlx-lm."""

    def __init__(
        self, inner: Any, parts: AttentionParts, sections: MropeSections | None, *, is_invariant: bool = False
    ) -> None:
        """sections: how channels go by several axes; None for a rope over one. is_invariant: see `Kernels`."""
        super().__init__()
        self.inner = inner
        self._parts = parts
        self._project = FusedLinear(parts.inputs, is_invariant=is_invariant)
        self._out = FusedLinear([parts.output], is_invariant=is_invariant)
        self._is_invariant = is_invariant
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
        if step.compiled is not None:
            return self.compute(x, step.positions, step.compiled.inputs[cache.layer], residual, factor)
        states: Sequence[Any] = states_of(cache, cache.window)
        if cache.window is None:
            plan = step.cached(_plan_slots, lambda: _plan_slots(step, states, self._parts.shape.head_dim))
            arrays = self._stored(cache.layer, plan.slabs)
        else:
            arrays = self._buffers(step, states)
            plan = _plan_buffers(step, states, cache.window, self._parts.shape.head_dim)
        inputs = KernelInputs([step.shared(table) for table in plan.tables], arrays, plan.max_tokens)
        projected = self._project(x)
        queries = self._rotated(self._heads(projected, step.positions), inputs, factor)
        for row, is_fused in zip(step.rows, plan.is_fused, strict=True):
            if is_fused and row.recorder is not None and row.picks and cache.window is None:
                row.recorder.record(cache.layer, queries.swapaxes(0, 1)[None], row.picks, self._parts.scale, None)
        found = self._attend(queries, projected, inputs) if plan.max_tokens else None
        if found is not None and all(plan.is_fused):
            return self._out(found, residual)
        parts = [
            self._chunk(cache, row, state, queries, projected)
            if found is None or not is_fused
            else found[:, row.lo : row.hi]
            for row, state, is_fused in zip(step.rows, states, plan.is_fused, strict=True)
        ]
        return self._out(mx.concatenate(parts, axis=1), residual)

    def compute(
        self,
        x: mx.array,
        positions: mx.array,
        inputs: KernelInputs[mx.array],
        residual: mx.array | None = None,
        factor: mx.array | None = None,
    ) -> mx.array:
        """Input `[1, T, hidden]` to output, residual added; factor: on queries, `[T, 1]`."""
        projected = self._project(x)
        heads = self._heads(projected, positions)
        # Of windows one kernel rotates the heads and attends. Of chunks it would rotate each key again for every tile
        # of queries that sees it: 19 ms a layer for 2,048 tokens.
        is_one_kernel = factor is None and inputs.max_tokens <= LONGEST_WINDOW and not self._is_invariant
        queries = heads if is_one_kernel else self._rotated(heads, inputs, factor)
        return self._out(self._attend(queries, projected, inputs), residual)

    @staticmethod
    def kind_inputs(
        step: PackedStep, mixers: Mapping[LayerKey, CudaAttentionMixer], window: Any, size: PaddedSize
    ) -> KernelInputs[Table] | None:
        """Of all layers with this window in a compiled step; None if the kernel doesn't take some row."""
        arrays: list[mx.array] = []
        last = list(mixers)[-1]
        head_dim = mixers[last]._parts.shape.head_dim
        if window is None:
            new = [row.state for row in step.rows if not row.state.has_layer(last)]
            if new:
                with new[0].pool.together():  # what layers are restored from
                    for state, layer in product(new, mixers):
                        state.full_attention(layer)
            plan = _plan_slots(step, [row.state.full_attention(last) for row in step.rows], head_dim)
            for layer, mixer in mixers.items():
                arrays += mixer._stored(layer, plan.slabs)
        else:
            make = partial(SlidingAttentionState, window)
            for layer, mixer in mixers.items():
                states = [row.state.layer(layer, make) for row in step.rows]
                own = mixer._buffers(step, states)
                arrays += own + own[-2:] * (size.num_rows - len(step.rows))
            plan = _plan_buffers(step, states, window, head_dim)
        return KernelInputs(plan.tables, arrays, plan.max_tokens) if all(plan.is_fused) else None

    def _stored(self, layer: LayerKey, slabs: Sequence[Slab]) -> list[mx.array]:
        """Keys and values of the slabs, made where no row has written the layer."""
        for slab in slabs:
            slab.prepare(layer, *self._like)
        return [stored[layer] for slab in slabs for stored in (slab.keys, slab.values)]

    def _buffers(self, step: PackedStep, states: Sequence[SlidingAttentionState]) -> list[mx.array]:
        """Keys and values of rows in a layer with a window, with room for the step's tokens."""
        arrays: list[mx.array] = []
        for row, state in zip(step.rows, states, strict=True):
            state.prepare(row.start, row.num_tokens, *self._like)
            arrays += state.arrays()
        return arrays

    def _heads(self, projected: mx.array, positions: mx.array) -> ProjectedHeads:
        has_axes = positions.ndim == 2
        if has_axes and self._axes is None:
            raise ValueError("the model's rope has one axis, the step's positions have three")
        axes = self._axes if has_axes and self._axes is not None else self._one_axis
        places = positions if has_axes else positions[None]
        return ProjectedHeads(self._parts.layout, projected, places, (self._frequencies, axes), self._norms)

    def _rotated(self, heads: ProjectedHeads, inputs: KernelInputs[mx.array], factor: mx.array | None) -> mx.array:
        """Queries `[T, num_heads, head_dim]`; keys and values are in their slots once these are."""
        queries = kernels.rope_append(self._parts.shape, inputs.tables[0], heads, _pairs(inputs))
        return queries if factor is None else queries * factor[..., None]

    def _attend(
        self, queries: mx.array | ProjectedHeads, projected: mx.array, inputs: KernelInputs[mx.array]
    ) -> mx.array:
        """`[1, T, num_heads · head_dim]`, undefined in rows that the last table doesn't have."""
        parts, slabs = self._parts, _pairs(inputs)
        gates = (projected, parts.layout) if parts.is_gated else None
        given = inputs.tables[-1], inputs.max_tokens, queries, slabs, self._scale, parts.sinks, gates
        return kernels.attend(parts.shape, *given, fixed_parts=self._is_invariant)

    def _chunk(
        self,
        view: View,
        row: Row,
        state: FullAttentionState | SlidingAttentionState,
        queries: mx.array,
        projected: mx.array,
    ) -> mx.array:
        """Attention of one row by the library, `[1, n, num_heads · head_dim]`."""
        parts, stride = self._parts, self._parts.layout.q_stride
        found = read_row(view, row, state, queries.swapaxes(0, 1)[None], parts.scale, parts.sinks, view.window)
        found = found.swapaxes(1, 2)
        if parts.is_gated:
            heads = projected[:, row.lo : row.hi, : parts.shape.num_heads * stride]
            gates = heads.reshape(1, row.num_tokens, parts.shape.num_heads, stride)[..., parts.shape.head_dim :]
            found = found * mx.sigmoid(gates)
        return found.reshape(1, row.num_tokens, -1)


def _pairs(inputs: KernelInputs[mx.array]) -> list[tuple[mx.array, mx.array]]:
    return list(zip(inputs.arrays[::2], inputs.arrays[1::2], strict=True))
