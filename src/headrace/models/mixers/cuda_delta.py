"""Gated delta net layers on NVIDIA GPUs: a launch for rows of a few tokens, three where there are longer ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen3_5

from headrace.backend.cuda import delta, shapes
from headrace.backend.gated_delta import Chunk, scan_chunks
from headrace.models.fused import FusedLinear, can_fuse
from headrace.models.mixers.fused import Feed, Held, Table, padded, padded_rows
from headrace.models.step import PackedStep, RowSpan, View
from headrace.state.layer import LayerKey
from headrace.state.recurrent import BatchRow, RecurrentState, Stash

PROJECTIONS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
"""In the order in which the fused projection has them."""


def shape_of(inner: Any) -> shapes.DeltaShape | None:
    """The shape of a layer that the kernels can do; None for others."""
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


_Place = tuple[int, int, int]
"""A row's tokens to be replayed, where its raw inputs end, and which row it is of shared arrays."""


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of what a step has left; the rest is as in `_Place`."""

    left: shapes.Left
    row: int
    end: int
    num_replay: int


class CudaDeltaMixer(nn.Module):
    """Stands where a `GatedDeltaNet` of mlx-lm stood."""

    def __init__(self, inner: Any, shape: shapes.DeltaShape) -> None:
        super().__init__()
        self.inner = inner
        self._shape = shape
        self._project = FusedLinear([inner[name] for name in PROJECTIONS])
        self._out = FusedLinear([inner.out_proj])
        self.adds_residual = self._out.adds_residual
        conv = mx.contiguous(inner.conv1d.weight[:, :, 0])
        self._weights = shapes.Weights(
            conv, inner.A_log.astype(mx.float32), inner.dt_bias, inner.norm.weight, mx.array([inner.norm.eps])
        )
        dtype, self.num_context = inner.norm.weight.dtype, shape.kernel_size - 1
        self._no_state = mx.zeros((1, shape.num_v_heads, shape.head_v_dim, shape.head_k_dim), mx.float32)
        self._no_raw = mx.zeros((1, self.num_context, shape.num_channels), dtype)
        keys = mx.zeros((1, 1, shape.num_k_heads, shape.head_k_dim), dtype)
        gates = mx.zeros((1, 1, shape.num_v_heads), mx.float32)
        self.no_stash = shapes.Stash(keys, mx.zeros((1, 1, shape.num_v_heads, shape.head_v_dim), dtype), gates, gates)
        mx.eval(self._weights, self._no_state, self._no_raw, self.no_stash)

    def __call__(
        self, x: mx.array, mask: Any = None, cache: View | None = None, residual: mx.array | None = None
    ) -> mx.array:
        """x: `[1, T, hidden]`; the mask is ours and always None; residual: what is added to the output."""
        assert cache is not None
        step = cache.step
        if step.exchange is not None:
            feed = step.exchange.feeds[cache.layer]
            output, step.exchange.given[cache.layer] = self.compute(x, step.positions, feed, residual)
            return output
        states = self.states(step, cache.layer)
        projected = self._project(x)
        if all(_is_short(span, state) for span, state in zip(step.spans, states, strict=True)):
            places, left = self.united(step, states)
            arrays = [*left[:2], *left.stash]
            plan, constants = _plan(step.counts, places, arrays)
            y, given = self._window(projected, Feed([step.shared(plan)], arrays, constants))
            self._advance(step.counts, states, given)
        else:
            y = self._chunks(step, states, projected)
        return self._out(y, residual)

    @staticmethod
    def together(mixers: Mapping[LayerKey, CudaDeltaMixer], window: Any) -> DeltaLayers:
        """Mixers of one model; they have no windows."""
        return DeltaLayers(mixers)

    def compute(
        self, x: mx.array, positions: mx.array, feed: Feed, residual: mx.array | None = None
    ) -> tuple[mx.array, Sequence[mx.array]]:
        """Input `[1, T, hidden]` to output, residual added, and the arrays that the rows' states go on with."""
        projected = self._project(x)
        y, given = self._window(projected, feed)
        return self._out(y, residual), given

    def states(self, step: PackedStep, layer: LayerKey) -> list[RecurrentState]:
        """Of the rows, in this layer."""
        make = partial(RecurrentState, step.kernels)
        return [span.state.layer(layer, make) for span in step.spans]

    def _window(self, projected: mx.array, feed: Feed) -> tuple[mx.array, Sequence[mx.array]]:
        """Rows of a few tokens in one launch: `[1, T, Hv · Dv]`, undefined elsewhere, and the states' new arrays."""
        (plan,), (state, raw, *stash) = feed.tables, feed.arrays
        result = delta.window(self._shape, self._weights, plan, projected, raw, shapes.Stash(*stash), state)
        return result.out, (result.state, result.raw, *result.stash)

    def united(self, step: PackedStep, states: Sequence[RecurrentState]) -> tuple[list[_Place], shapes.Left]:
        """Where the rows are in arrays that they share.

        As long as rows step together, or fewer of them, the arrays are those that their last step left.
        """
        rows = [self._left(state) for state in states]
        found: dict[tuple[int, int], shapes.Left] = {}
        for row in rows:
            key = id(row.left.state), id(row.left.raw)
            # a row without tokens to replay may have no place in a stash
            if key not in found or row.num_replay:
                found[key] = row.left
        numbers = {key: number for number, key in enumerate(found)}
        sources = list(found.values())
        if len(sources) == 1:
            return [(row.num_replay, row.end, row.row) for row in rows], sources[0]
        places = [(numbers[id(row.left.state), id(row.left.raw)], row.row, row.end, row.num_replay) for row in rows]
        while len(sources) > delta.MOST_SOURCES:
            first = delta.MOST_SOURCES
            early = [place for place in places if place[0] < first]
            sources = [*sources[first:], self._gathered(step, early, sources[:first])]
            again = count()
            places = [
                (len(sources) - 1, next(again), *place[2:]) if place[0] < first else (place[0] - first, *place[1:])
                for place in places
            ]
        left = self._gathered(step, places, sources)
        return [(num_replay, end, row) for row, (_, _, end, num_replay) in enumerate(places)], left

    def _gathered(
        self, step: PackedStep, places: Sequence[tuple[int, ...]], sources: Sequence[shapes.Left]
    ) -> shapes.Left:
        """places: see delta_gather.cuh."""
        return delta.gather(self._shape, step.shared(padded(tuple(places))), sources)

    def _left(self, state: RecurrentState) -> _Row:
        """What the row's last step left, as it is if a window can go on from there."""
        memory, raw, stash = state.state, state.window, state.stash
        longest = self.num_context + shapes.LONGEST_WINDOW
        if memory is None or raw is None or memory.row != raw.row or state.end > longest:
            return self._settled(state)
        if not state.num_replay or stash is None:
            return _Row(shapes.Left(memory.array, raw.array, self.no_stash), memory.row, state.end, 0)
        if stash.row != memory.row or stash.first:
            return self._settled(state)
        return _Row(shapes.Left(memory.array, raw.array, stash.inputs), memory.row, state.end, state.num_replay)

    def _settled(self, state: RecurrentState) -> _Row:
        """With nothing to replay, in arrays of its own."""
        state.settle()
        context = state.context(self.num_context)
        memory = self._no_state if state.state is None else state.state.alone()
        raw = self._no_raw if context is None else context.alone()
        return _Row(shapes.Left(memory, raw, self.no_stash), 0, self.num_context, 0)

    def _advance(
        self, counts: Sequence[tuple[int, int, int]], states: Sequence[RecurrentState], given: Sequence[mx.array]
    ) -> None:
        """Let the rows' states go on with what a window has left."""
        memory, raw, *stash = given
        inputs = shapes.Stash(*stash)
        for row, ((_, num_tokens, num_certain), state) in enumerate(zip(counts, states, strict=True)):
            new_stash = Stash(inputs, row, 0, num_tokens - num_certain) if num_certain < num_tokens else None
            state.advance(BatchRow(memory, row), BatchRow(raw, row), new_stash, self.num_context + num_tokens)

    def _chunks(self, step: PackedStep, states: Sequence[RecurrentState], projected: mx.array) -> mx.array:
        """Rows of any lengths, three launches for all: from projection to `[1, T, Hv · Dv]`; advances their states."""
        for state in states:
            state.settle()
        places, left = self.united(step, states)
        rows, ends = _chunk_plan(step.spans, places)
        plan, stops = step.shared(rows), step.shared((ends,))[0]
        longest = max(span.num_tokens for span in step.spans)
        tokens, raw = delta.prepare(self._shape, self._weights, plan, stops, longest, projected, left.raw)
        y, memory = scan_chunks(rows, ends, plan, stops, tokens, left.state)
        for span, state, (_, _, end, old, stop, _) in zip(step.spans, states, rows, strict=True):
            for number, mark in enumerate(span.state.marks, start=stop):
                state.advance(BatchRow(memory, number), BatchRow(raw, number), None)
                state.note(mark)
            last, num_uncertain = BatchRow(memory, stop + len(span.state.marks)), span.num_tokens - span.num_certain
            if not num_uncertain:
                state.advance(last, BatchRow(raw, last.row), None)
                continue
            # how many of these count is known later, and with it where the raw inputs end
            context = left.raw[old : old + 1, end - self.num_context : end]
            own = mx.concatenate([context, projected[:, span.lo : span.hi, : self._shape.num_channels]], axis=1)
            uncertain = shapes.Stash(*(array[None] for array in tokens[1:]))
            state.advance(last, BatchRow(own, 0), Stash(uncertain, 0, span.lo + span.num_certain, num_uncertain))
        return delta.gated_norm(self._shape, self._weights, y, projected)


class DeltaLayers:
    """All such layers of a model in steps of few tokens.

    Rows that step together are in the same place in all of them, so a step's work for them is not by layers and rows.
    """

    def __init__(self, mixers: Mapping[LayerKey, CudaDeltaMixer]) -> None:
        self._mixers = mixers
        self._first = next(iter(mixers.values()))

    def held(self, step: PackedStep) -> Held | None:
        """What they read in this step."""
        places, arrays = self._joint(step) or self._gathered(step)
        plan, constants = _plan(step.counts, places, arrays)
        return Held((plan,), arrays, constants)

    def _joint(self, step: PackedStep) -> tuple[list[_Place], list[mx.array]] | None:
        """Where a step has left the rows, in all layers; None for rows of several steps."""
        rows = [span.state.joint for span in step.spans]
        left = None if rows[0] is None else rows[0].left
        places = [(row.num_replay, row.end, row.row) for row in rows if row is not None and row.left is left]
        if left is None or len(places) < len(rows):
            return None
        return places, [array for of_layer in left.values() for array in of_layer]

    def _gathered(self, step: PackedStep) -> tuple[list[_Place], list[mx.array]]:
        arrays: list[mx.array] = []
        places: list[_Place] = []
        for layer, mixer in self._mixers.items():
            places, left = mixer.united(step, mixer.states(step, layer))
            arrays += [*left[:2], *left.stash]
        return places, arrays

    def take_over(self, step: PackedStep, given: Sequence[Sequence[mx.array]]) -> None:
        """Put what the layers have given into the rows' states."""
        left, num_context = dict(zip(self._mixers, given, strict=True)), self._first.num_context
        for row, (span, (_, num_tokens, num_certain)) in enumerate(zip(step.spans, step.counts, strict=True)):
            span.state.join(left).advance(left, row, num_context + num_tokens, num_tokens - num_certain)


def _plan(
    counts: Sequence[tuple[int, int, int]], places: Sequence[_Place], arrays: Sequence[mx.array]
) -> tuple[Table, tuple[int, ...]]:
    """What the kernel reads of each row, and what its launch depends on. counts: see `PackedStep.counts`.

    There is room for the longest window whatever the rows have, and for rows that are added, see `padded_rows`, so that
    the next step finds arrays of one shape. The arrays begin with a layer's own; while rows join and leave their shapes
    differ by what is told of them here.
    """
    plan = tuple([(*count, *place) for count, place in zip(counts, places, strict=True)])
    memory, raw, keys, *_ = arrays
    return padded(plan), (memory.shape[0], *raw.shape[:2], *keys.shape[:2])


def _chunk_plan(spans: Sequence[RowSpan], places: Sequence[_Place]) -> tuple[tuple[Chunk, ...], tuple[int, ...]]:
    """Rows and stops as chunks.cuh has them: a row's stops are its marks, and the end of its certain tokens.

    Behind them are stops of no row, so that what is left has one of few sizes.
    """
    rows: list[Chunk] = []
    ends: list[int] = []
    for span, (_, end, old) in zip(spans, places, strict=True):
        own = [*(mark - span.start for mark in span.state.marks), span.num_certain]
        rows.append((span.lo, span.num_tokens, end, old, len(ends), len(own)))
        ends += own
    return tuple(rows), (*ends, *[0] * (padded_rows(len(ends)) - len(ends)))


def _is_short(span: RowSpan, state: RecurrentState) -> bool:
    return max(span.num_tokens, state.num_replay + 1) <= shapes.LONGEST_WINDOW and not span.state.marks
