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
from headrace.models.padding import PaddedSize, padded_stops
from headrace.models.step import KernelInputs, PackedStep, Table, View
from headrace.state.delta import Stops, TableState
from headrace.state.layer import LayerKey

PROJECTIONS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
"""In the order of the fused projection."""


def shape_of(inner: Any) -> shapes.DeltaShape | None:
    """The shape of a layer that the kernels support; None for others."""
    if not isinstance(inner, qwen3_5.GatedDeltaNet) or not can_fuse(
        [inner[name] for name in (*PROJECTIONS, "out_proj")]
    ):
        return None
    width = 2 * inner.key_dim + 2 * inner.value_dim + 2 * inner.num_v_heads
    heads = inner.num_k_heads, inner.num_v_heads, inner.head_k_dim, inner.head_v_dim
    shape = shapes.DeltaShape(*heads, inner.conv_kernel_size, width)
    return shape if delta.refusal(shape.head_k_dim, shape.head_v_dim) is None else None


@dataclass(frozen=True, slots=True)
class _DeltaPlan:
    """The kernels' view of a step's rows, the same in all layers.

    slots: of the rows; those to restore have `pending` records. table, stops: the plans in backend/cuda/delta.py.
    stops, max_tokens (of a row): of chunks only. left: at the rows' snapshot points.
    """

    slots: Sequence[TableState]
    table: Table
    stops: Table = ()
    max_tokens: int = 0
    left: Stops = field(default_factory=Stops)


def _make_plan(step: PackedStep, num_context: int) -> _DeltaPlan:
    """Open each row's window; all layers of a step share the plan, see `PackedStep.cached`."""
    slots = [row.state.recurrent(partial(TableState, row.state.pool.delta, num_context)) for row in step.rows]
    are_short = all(row.is_short for row in step.rows)
    if not are_short:
        if replayed := [array for slot in slots for array in slot.settle()]:
            mx.async_eval(replayed)
        if any(row.num_tokens - row.num_certain >= shapes.LONGEST_WINDOW for row in step.rows):
            raise ValueError(f"more than {shapes.LONGEST_WINDOW - 1} draft tokens in a row of gated delta layers")
    table: list[tuple[int, ...]] = []
    stops: list[tuple[int]] = []
    left = Stops()
    for row, slot in zip(step.rows, slots, strict=True):
        num_uncertain, points = row.num_tokens - row.num_certain, row.state.snapshot_points
        # of a chunk only the uncertain tokens' raw inputs are kept
        num_raw = row.num_tokens if are_short else num_uncertain
        num_replay, *place = slot.advance(num_context + num_raw, num_uncertain)
        more = (num_replay, *place) if are_short else (*place, len(stops), len(points))
        table.append((row.lo, row.num_tokens, row.num_certain, *more))
        slot.snapshot_points = {length: (left, number) for number, length in enumerate(points, len(stops))}
        stops += [(length - row.start,) for length in points]
    if are_short:
        return _DeltaPlan(slots, tuple(table))
    return _DeltaPlan(slots, tuple(table), tuple(stops) or ((0,),), max(row.num_tokens for row in step.rows), left)


class CudaDeltaMixer(nn.Module):
    """Replaces a `GatedDeltaNet` of mlx-lm."""

    def __init__(self, inner: Any, shape: shapes.DeltaShape, *, is_invariant: bool = False) -> None:
        """is_invariant: see `Kernels`."""
        super().__init__()
        self.inner = inner
        self._shape = shape
        self._project = FusedLinear([inner[name] for name in PROJECTIONS], is_invariant=is_invariant)
        self._out = FusedLinear([inner.out_proj], inner.sharding_group, is_invariant=is_invariant)
        self._scans_in_blocks = not is_invariant
        self.adds_residual = self._out.adds_residual
        conv = mx.contiguous(inner.conv1d.weight[:, :, 0])
        self._weights = shapes.DeltaWeights(
            conv, inner.A_log.astype(mx.float32), inner.dt_bias, inner.norm.weight, mx.array([inner.norm.eps])
        )
        self._dtype, self._num_context = inner.norm.weight.dtype, shape.kernel_size - 1
        mx.eval(self._weights)

    def __call__(
        self, x: mx.array, mask: Any = None, cache: View | None = None, residual: mx.array | None = None
    ) -> mx.array:
        """x: `[1, T, hidden]`; the mask is ours and always None; residual: what is added to the output."""
        assert cache is not None
        step, layer = cache.step, cache.layer
        if step.compiled is not None:
            output, step.compiled.outputs[layer] = self.compute(x, step.compiled.inputs[layer], residual)
            return output
        plan = self._plan(step)
        restore(plan.slots, {layer: self})
        tables = [step.shared(table) for table in (plan.table, plan.stops) if table]
        inputs = KernelInputs(tables, self.table(plan.slots, layer), plan.max_tokens)
        output, outputs = self.compute(x, inputs, residual)
        if outputs:
            self.keep(step, layer, outputs)
        return output

    def compute(
        self, x: mx.array, inputs: KernelInputs[mx.array], residual: mx.array | None = None
    ) -> tuple[mx.array, Sequence[mx.array]]:
        """Input `[1, T, hidden]` to output, residual added, and states and raw inputs at the stops of chunks.

        The input arrays are a table's, which is written in place.
        """
        projected = self._project(x)
        table = shapes.DeltaTable(*inputs.arrays)
        if len(inputs.tables) == 1:
            return self._out(delta.step(self._shape, self._weights, inputs.tables[0], projected, table), residual), ()
        plan, stops = inputs.tables[0], inputs.tables[1].reshape(-1)
        tokens, contexts = delta.prepare_chunks(
            self._shape, self._weights, plan, stops, inputs.max_tokens, projected, table
        )
        y, states = delta.scan_chunks(plan, stops, tokens, table.state, in_blocks=self._scans_in_blocks)
        y = delta.gated_norm(self._shape, self._weights, y, projected)
        return self._out(y, residual), (states, contexts)

    @staticmethod
    def kind_inputs(
        step: PackedStep, mixers: Mapping[LayerKey, CudaDeltaMixer], window: Any, size: PaddedSize
    ) -> KernelInputs[Table]:
        """Of all such layers in a compiled step."""
        plan = next(iter(mixers.values()))._plan(step)
        restore(plan.slots, mixers)
        arrays = [array for layer, mixer in mixers.items() for array in mixer.table(plan.slots, layer)]
        table = size.padded(plan.table)
        if not plan.stops:
            return KernelInputs((table,), arrays)
        num_stops = padded_stops(sum(len(row.state.snapshot_points) for row in step.rows), size.num_rows)
        stops = (*plan.stops, *[(0,)] * (num_stops - len(plan.stops)))
        return KernelInputs((table, stops), arrays, size.num_tokens)

    def keep(self, step: PackedStep, layer: LayerKey, outputs: Sequence[mx.array]) -> None:
        """outputs: states and raw inputs at the stops, which the rows' snapshots are taken from."""
        left = self._plan(step).left
        left.states[layer], left.contexts[layer] = outputs

    def _plan(self, step: PackedStep) -> _DeltaPlan:
        return step.cached(_DeltaPlan, lambda: _make_plan(step, self._num_context))

    def table(self, slots: Sequence[TableState], layer: LayerKey) -> shapes.DeltaTable:
        return slots[0].tables.prepare(layer, self._shape, self._dtype)


def restore(slots: Sequence[TableState], mixers: Mapping[LayerKey, CudaDeltaMixer]) -> None:
    """Write restored records into the layers' tables, before a step reads them."""
    parts: list[Part] = []
    for slot in (slot for slot in slots if slot.pending):
        for layer, mixer in mixers.items():
            mixer.table(slots, layer)
            parts += slot.parts(layer)
    if parts:
        mx.async_eval(put(parts))
