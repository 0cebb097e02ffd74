"""Gated delta net layers on NVIDIA GPUs: a launch for all rows of a few tokens, two for a longer chunk."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen3_5

from headrace.backend.cuda import delta, shapes
from headrace.backend.gated_delta import scan
from headrace.models.fused import FusedLinear, can_fuse
from headrace.models.mixers.fused import Feed, Held, coarse
from headrace.models.step import PackedStep, RowSpan, View
from headrace.state.recurrent import BatchRow, DeltaInputs, RecurrentState, Stash, gather

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


class CudaDeltaMixer(nn.Module):
    """Stands where a `GatedDeltaNet` of mlx-lm stood."""

    def __init__(self, inner: Any, shape: shapes.DeltaShape) -> None:
        super().__init__()
        self.inner = inner
        self._shape = shape
        self._project = FusedLinear([inner[name] for name in PROJECTIONS])
        self._out = FusedLinear([inner.out_proj])
        conv = mx.contiguous(inner.conv1d.weight[:, :, 0])
        self._weights = shapes.Weights(
            conv, inner.A_log.astype(mx.float32), inner.dt_bias, inner.norm.weight, mx.array([inner.norm.eps])
        )
        dtype, context = inner.norm.weight.dtype, inner.conv_kernel_size - 1
        self._no_state = mx.zeros((1, shape.num_v_heads, shape.head_v_dim, shape.head_k_dim), mx.float32)
        self._no_raw = mx.zeros((1, context, shape.num_channels), dtype)
        keys = mx.zeros((1, 1, shape.num_k_heads, shape.head_k_dim), dtype)
        gates = mx.zeros((1, 1, shape.num_v_heads), mx.float32)
        self._no_stash = DeltaInputs(keys, mx.zeros((1, 1, shape.num_v_heads, shape.head_v_dim), dtype), gates, gates)
        mx.eval(self._weights, self._no_state, self._no_raw, self._no_stash.arrays)

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
        states = self._states(cache)
        projected = self._project(x)
        together = [(span, state) for span, state in zip(step.spans, states, strict=True) if _is_short(span, state)]
        windowed, y = {span.lo for span, _ in together}, None
        if together:
            counts = [(span.lo, span.num_tokens, span.num_certain) for span, _ in together]
            held = self._held_of(counts, [state for _, state in together])
            feed = Feed([step.shared(table) for table in held.tables], held.arrays, held.constants)
            y, given = self._window(projected, feed)
            self._advance(counts, held.states, given)
        if y is None or len(together) < len(states):
            parts = []
            for span, state in zip(step.spans, states, strict=True):
                if y is not None and span.lo in windowed:
                    parts.append(y[span.lo : span.hi])
                else:
                    parts.append(self._chunk(span, state, projected))
            y = parts[0] if len(parts) == 1 else mx.concatenate(parts)
        return self._output(y, projected, residual)

    def held(self, view: View) -> Held | None:
        """See `FusedMixer`."""
        states, counts = self._states(view), view.step.counts
        most = max(max(num_tokens for _, num_tokens, _ in counts), max(state.num_replay for state in states))
        return self._held_of(counts, states) if most <= delta.LONGEST_WINDOW else None

    def compute(
        self, x: mx.array, positions: mx.array, feed: Feed, residual: mx.array | None = None
    ) -> tuple[mx.array, Sequence[mx.array]]:
        """See `FusedMixer`."""
        projected = self._project(x)
        y, given = self._window(projected, feed)
        return self._output(y, projected, residual), given

    def take_over(self, step: PackedStep, held: Held, given: Sequence[mx.array]) -> None:
        """See `FusedMixer`."""
        self._advance(step.counts, held.states, given)

    def _states(self, view: View) -> list[RecurrentState]:
        make = partial(RecurrentState, view.step.kernels)
        return [span.state.layer(view.layer, make) for span in view.step.spans]

    def _output(self, y: mx.array, projected: mx.array, residual: mx.array | None) -> mx.array:
        return self._out(delta.gated_norm(self._shape, self._weights, y, projected), residual)

    def _held_of(self, counts: Sequence[tuple[int, int, int]], states: Sequence[RecurrentState]) -> Held:
        """counts: of each row, see `PackedStep.counts`."""
        longest = coarse(max(num_tokens for _, num_tokens, _ in counts))
        olds, memory, raw, stash = self._united(states)
        plan = tuple(
            [(*count, state.num_replay, *old, longest) for count, state, old in zip(counts, states, olds, strict=True)]
        )
        # by what else the arrays' shapes differ while rows join and leave
        shapes = (memory.shape[0], *raw.shape[:2], *stash.k.shape[:2])
        return Held((plan,), (memory, raw, *stash.arrays), (longest, *shapes), states)

    def _window(self, projected: mx.array, feed: Feed) -> tuple[mx.array, Sequence[mx.array]]:
        """Rows of a few tokens in one launch: y `[T, Hv, Dv]`, undefined elsewhere, and the states' new arrays."""
        (plan,), (state, raw, *stash), (longest, *_) = feed.tables, feed.arrays, feed.constants
        result = delta.window(self._shape, self._weights, plan, longest, projected, raw, shapes.Stash(*stash), state)
        return result.y, (result.state, result.raw, *result.stash)

    def _united(
        self, states: Sequence[RecurrentState]
    ) -> tuple[list[tuple[int, int]], mx.array, mx.array, DeltaInputs]:
        """Where each row's context ends and which row it is in shared arrays of states, raw inputs and stashes.

        As long as rows step together, or fewer of them, the arrays are those that their last step left.
        """
        first, stash = states[0], next((state.stash for state in states if state.num_replay), None)
        if first.state is not None and first.window is not None:
            shared, raw = first.state.array, first.window.array
            if all(_lies_in(state, shared, raw, None if stash is None else stash.inputs) for state in states):
                rows = [(state.end, state.state.row) for state in states if state.state is not None]
                return rows, shared, raw, self._no_stash if stash is None else stash.inputs
        context = self._shape.kernel_size - 1
        no_state = BatchRow(self._no_state, 0)
        no_raw = BatchRow(self._no_raw, 0)
        for state in states:
            state.settle()
        raws = [one if (one := state.context(context)) is not None else no_raw for state in states]
        gathered = gather([no_state if state.state is None else state.state for state in states])
        rows = [(context, row) for row in range(len(states))]
        return rows, gathered, gather(raws), self._no_stash

    def _advance(
        self, counts: Sequence[tuple[int, int, int]], states: Sequence[RecurrentState], given: Sequence[mx.array]
    ) -> None:
        """Let the rows' states go on with what a window has left."""
        context = self._shape.kernel_size - 1
        memory, raw, *stash = given
        inputs = DeltaInputs(*stash)
        for row, ((_, num_tokens, num_certain), state) in enumerate(zip(counts, states, strict=True)):
            new_stash = Stash(inputs, row, 0, num_tokens - num_certain) if num_certain < num_tokens else None
            state.advance(BatchRow(memory, row), BatchRow(raw, row), new_stash, context + num_tokens)

    def _chunk(self, span: RowSpan, state: RecurrentState, projected: mx.array) -> mx.array:
        """One row, its scan cut at the marks; advances its state. Gives y `[n, Hv, Dv]`."""
        shape, length = self._shape, self._shape.kernel_size - 1
        state.settle()
        old = state.context(length)
        context = self._no_raw if old is None else old.alone()
        own = projected[:, span.lo : span.hi]
        prepared = delta.prepare(shape, self._weights, own, context)
        raw = mx.concatenate([context, own[..., : shape.num_channels]], axis=1)
        tokens = DeltaInputs(*(array[None] for array in prepared[1:]))
        memory = self._no_state if state.state is None else state.state.alone()
        outputs, done = [], 0
        for end in (*(mark - span.start for mark in span.state.marks), span.num_tokens):
            q, k, v, g, beta = (array[None, done:end] for array in prepared)
            is_last = end == span.num_tokens
            num_certain = span.num_certain - done if is_last else end - done
            keep = num_certain if num_certain < end - done else None
            result = scan("cuda", q, k, v, g, beta, memory, keep=keep)
            if result.kept_state is not None:
                stash = Stash(tokens, 0, span.num_certain, span.num_tokens - span.num_certain)
                state.advance(BatchRow(result.kept_state, 0), BatchRow(raw, 0), stash)
            else:
                memory = result.end_state
                state.advance(BatchRow(memory, 0), BatchRow(mx.contiguous(raw[:, end : end + length]), 0), None)
            if not is_last:
                state.note(span.start + end)
            outputs.append(result.y)
            done = end
        y = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=1)
        return y.reshape(y.shape[1:])


def _is_short(span: RowSpan, state: RecurrentState) -> bool:
    return max(span.num_tokens, state.num_replay) <= delta.LONGEST_WINDOW and not span.state.marks


def _lies_in(state: RecurrentState, shared: mx.array, raw: mx.array, stash: DeltaInputs | None) -> bool:
    """Whether the state is a row of these arrays, the same one of each."""
    if state.state is None or state.window is None or state.state.array is not shared:
        return False
    if state.window.array is not raw or state.window.row != state.state.row:
        return False
    if not state.num_replay:
        return True
    own = state.stash
    return own is not None and own.inputs is stash and own.row == state.state.row and own.first == 0
