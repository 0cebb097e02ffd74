"""Gated delta net layers on NVIDIA GPUs: a launch for rows of a few tokens, three where there are longer ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen3_5

from headrace.backend.cuda import delta, shapes
from headrace.backend.cuda.put import Part, put
from headrace.models.fused_linear import FusedLinear, can_fuse
from headrace.models.mixers.fused import KindInputs, LayerInputs, Table, is_window, padded_size, padded_stops
from headrace.models.step import PackedStep, View
from headrace.state.delta import DeltaTables, Stops, TableState, arrays_of
from headrace.state.layer import LayerKey

PROJECTIONS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
"""In the order of the fused projection."""


def shape_of(inner: Any) -> shapes.DeltaShape | None:
    """The shape of a layer that the kernels support; None for others."""
    if not isinstance(inner, qwen3_5.GatedDeltaNet) or not can_fuse(
        [inner[name] for name in (*PROJECTIONS, "out_proj")]
    ):
        return None
    num_channels = 2 * inner.key_dim + inner.value_dim
    b_at = num_channels + inner.value_dim
    shape = shapes.DeltaShape(
        inner.num_k_heads,
        inner.num_v_heads,
        inner.head_k_dim,
        inner.head_v_dim,
        inner.conv_kernel_size,
        b_at + 2 * inner.num_v_heads,
        num_channels,
        b_at,
        b_at + inner.num_v_heads,
    )
    return shape if delta.refusal(shape.head_k_dim, shape.head_v_dim) is None else None


@dataclass(frozen=True, slots=True)
class DeltaPlan:
    """The kernels' view of a step's rows, the same in all layers.

    rows, stops: the plans in backend/cuda/delta.py. stops, longest (tokens of the longest row): of chunks only.
    slots: of the rows; those to restore have `pending` records. left: at the rows' snapshot points.
    """

    slots: Sequence[TableState]
    rows: Table
    stops: Table = ()
    longest: int = 0
    left: Stops = field(default_factory=Stops)

    @property
    def tables(self) -> DeltaTables:
        return self.slots[0].tables

    def keep(self, layer: LayerKey, outputs: Sequence[mx.array]) -> None:
        """Keep what `CudaDeltaMixer.compute` gave, for the rows' snapshots."""
        if outputs:
            self.left.states[layer], self.left.contexts[layer] = outputs


def _plan(step: PackedStep, num_context: int) -> DeltaPlan:
    """Open each row's window; all layers of a step share the plan, see `PackedStep.once`."""
    slots = [span.state.recurrent(partial(TableState, span.state.pool.delta, num_context)) for span in step.spans]
    are_windows = all(is_window(span) for span in step.spans)
    if not are_windows:
        if replayed := [array for slot in slots for array in slot.settle()]:
            mx.async_eval(replayed)
        if any(span.num_tokens - span.num_certain >= shapes.LONGEST_WINDOW for span in step.spans):
            raise ValueError(f"more than {shapes.LONGEST_WINDOW - 1} draft tokens in a row of gated delta layers")
    rows: list[tuple[int, ...]] = []
    stops: list[tuple[int]] = []
    left = Stops()
    for span, slot in zip(step.spans, slots, strict=True):
        num_uncertain, points = span.num_tokens - span.num_certain, span.state.snapshot_points
        # of a chunk only the uncertain tokens' raw inputs are kept
        num_raw = span.num_tokens if are_windows else num_uncertain
        num_replay, *place = slot.advance(num_context + num_raw, num_uncertain)
        more = (num_replay, *place) if are_windows else (*place, len(stops), len(points))
        rows.append((span.lo, span.num_tokens, span.num_certain, *more))
        slot.snapshot_points = {length: (left, number) for number, length in enumerate(points, len(stops))}
        stops += [(length - span.start,) for length in points]
    if are_windows:
        return DeltaPlan(slots, tuple(rows))
    return DeltaPlan(slots, tuple(rows), tuple(stops) or ((0,),), max(span.num_tokens for span in step.spans), left)


class CudaDeltaMixer(nn.Module):
    """Replaces a `GatedDeltaNet` of mlx-lm."""

    def __init__(self, inner: Any, shape: shapes.DeltaShape) -> None:
        super().__init__()
        self.inner = inner
        self._shape = shape
        self._project = FusedLinear([inner[name] for name in PROJECTIONS])
        self._out = FusedLinear([inner.out_proj], inner.sharding_group)
        self.adds_residual = self._out.adds_residual
        conv = mx.contiguous(inner.conv1d.weight[:, :, 0])
        self._weights = shapes.DeltaWeights(
            conv, inner.A_log.astype(mx.float32), inner.dt_bias, inner.norm.weight, mx.array([inner.norm.eps])
        )
        self._dtype, self.num_context = inner.norm.weight.dtype, shape.kernel_size - 1
        mx.eval(self._weights)

    def __call__(
        self, x: mx.array, mask: Any = None, cache: View | None = None, residual: mx.array | None = None
    ) -> mx.array:
        """x: `[1, T, hidden]`; the mask is ours and always None; residual: what is added to the output."""
        assert cache is not None
        step, layer = cache.step, cache.layer
        if step.layer_io is not None:
            output, step.layer_io.outputs[layer] = self.compute(
                x, step.positions, step.layer_io.inputs[layer], residual
            )
            return output
        plan = step.once(_plan, self.num_context)
        tables = [step.shared(plan.rows)] + ([step.shared(plan.stops)] if plan.stops else [])
        restore(plan.slots, {layer: self})
        inputs = LayerInputs(tables, arrays_of(self.table(plan.tables, layer)), (plan.longest,))
        output, outputs = self.compute(x, step.positions, inputs, residual)
        plan.keep(layer, outputs)
        return output

    @staticmethod
    def together(mixers: Mapping[LayerKey, CudaDeltaMixer], window: Any) -> DeltaLayers:
        return DeltaLayers(mixers)

    def compute(
        self, x: mx.array, positions: mx.array, inputs: LayerInputs, residual: mx.array | None = None
    ) -> tuple[mx.array, Sequence[mx.array]]:
        """Input `[1, T, hidden]` to output, residual added, and states and raw inputs at the stops of chunks.

        The input arrays are a table's, which is written in place.
        """
        projected = self._project(x)
        state, raw, *stash = inputs.arrays
        table = shapes.DeltaTable(state, raw, shapes.Stash(*stash))
        if len(inputs.tables) == 1:
            return self._out(delta.step(self._shape, self._weights, inputs.tables[0], projected, table), residual), ()
        plan, stops, (longest,) = inputs.tables[0], inputs.tables[1].reshape(-1), inputs.constants
        tokens, contexts = delta.prepare_chunks(self._shape, self._weights, plan, stops, longest, projected, table)
        y, states = delta.scan_chunks(plan, stops, tokens, state)
        y = delta.gated_norm(self._shape, self._weights, y, projected)
        return self._out(y, residual), (states, contexts)

    def table(self, tables: DeltaTables, layer: LayerKey) -> shapes.DeltaTable:
        return tables.prepare(layer, self._shape, self._dtype)


def restore(slots: Sequence[TableState], mixers: Mapping[LayerKey, CudaDeltaMixer]) -> None:
    """Write restored records into the layers' tables, before a step reads them."""
    parts: list[Part] = []
    for slot in (slot for slot in slots if slot.pending):
        for layer, mixer in mixers.items():
            mixer.table(slot.tables, layer)
            parts += slot.parts(layer)
    if parts:
        mx.async_eval(put(parts))


class DeltaLayers:
    """All such layers of a model in compiled steps."""

    def __init__(self, mixers: Mapping[LayerKey, CudaDeltaMixer]) -> None:
        self._mixers = mixers
        self._num_context = next(iter(mixers.values())).num_context

    def inputs(self, step: PackedStep) -> KindInputs | None:
        plan = step.once(_plan, self._num_context)
        restore(plan.slots, self._mixers)
        of_layers = [mixer.table(plan.tables, layer) for layer, mixer in self._mixers.items()]
        arrays = [array for table in of_layers for array in arrays_of(table)]
        size = padded_size(step.spans)
        rows = size.padded(plan.rows)
        if not plan.stops:
            return KindInputs((rows,), arrays, ())
        num_stops = padded_stops(sum(len(span.state.snapshot_points) for span in step.spans), size.num_rows)
        stops = (*plan.stops, *[(0,)] * (num_stops - len(plan.stops)))
        return KindInputs((rows, stops), arrays, (size.num_tokens,))

    def keep_outputs(self, step: PackedStep, outputs: Sequence[Sequence[mx.array]]) -> None:
        """Keep what the layers have left at snapshot points; all else is written in place."""
        plan = step.once(_plan, self._num_context)
        for layer, own in zip(self._mixers, outputs, strict=True):
            plan.keep(layer, own)
