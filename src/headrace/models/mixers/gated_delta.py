"""Gated delta net layers of Qwen3-Next and Qwen3.5: mlx-lm's projections, our convolution, scan and rollback."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gated_delta import compute_g

from headrace.backend.cuda.shapes import DeltaHeads, Prepared, Stash
from headrace.backend.delta_rule import convolved, part, split_heads
from headrace.backend.gated_delta import replay_and_scan, scan
from headrace.backend.kernels import Kernels
from headrace.models.sharding import summed
from headrace.models.step import PackedStep, Row, View
from headrace.state.layer import LayerKey
from headrace.state.recurrent import BatchedState, LayerArrays, PastRows, RecurrentBatch, RecurrentRecord

SHORT_SPAN = 8
"""Rows of equally many tokens, at most so many, go through the layer as one batch; a longer chunk goes alone."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows of one shape: equally many tokens, of which equally many are certain.

    past, left: their states before and after the step. snapshots: of a lone row, by length and layer.
    """

    rows: Sequence[Row]
    past: PastRows
    left: RecurrentBatch
    snapshots: dict[int, dict[LayerKey, RecurrentRecord]]

    @property
    def num_tokens(self) -> int:
        return self.rows[0].num_tokens

    @property
    def is_drafted(self) -> bool:
        """Whether some of the tokens may be dropped."""
        return self.rows[0].num_certain < self.num_tokens

    def rows_of(self, packed: mx.array) -> mx.array:
        """The group's rows `[B, n, …]` of a packed array `[1, T, …]`."""
        lo, hi = self.rows[0].lo, self.rows[-1].hi
        if hi - lo != len(self.rows) * self.num_tokens:
            return mx.stack([packed[0, row.lo : row.hi] for row in self.rows])
        own = packed if hi - lo == packed.shape[1] else packed[:, lo:hi]
        return own.reshape(len(self.rows), self.num_tokens, *packed.shape[2:])


@dataclass(frozen=True, slots=True)
class _GroupPlan:
    """How a step's rows are grouped, the same in all layers.

    is_decoding: whether they are one group, of one certain token each, with nothing to replay.
    order: indices that bring the groups' tokens into the step's order; None if they are in order.
    """

    groups: Sequence[_Group]
    is_decoding: bool
    order: mx.array | None


class GatedDeltaMixer(nn.Module):
    """Replaces a `GatedDeltaNet` of mlx-lm.

    The module's projections are found by their names: one fused `in_proj_qkvz` and `in_proj_ba` (Qwen3-Next), or
    `in_proj_qkv`, `in_proj_z`, `in_proj_b`, `in_proj_a` (Qwen3.5).
    """

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        self.num_context = inner.conv_kernel_size - 1
        self._heads = DeltaHeads.of(inner)
        weight: mx.array = inner.conv1d.weight
        self._taps = mx.contiguous(weight[..., 0].T[None].astype(mx.float32))
        """The convolution's weights `[1, kernel, channels]`."""
        self._one_token = mx.compile(self._token)

    def __call__(self, x: mx.array, mask: Any = None, cache: View | None = None) -> mx.array:
        """x: `[1, T, hidden]`; the mask is ours and always None."""
        assert cache is not None
        step, layer = cache.step, cache.layer
        qkv, z, b, a = self._project(x)
        plan = step.cached(_plan, lambda: _plan(step, self, qkv.dtype))
        if plan.is_decoding:
            y = self._decode(plan.groups[0], layer, qkv, z, b, a)
        else:
            y = self._mix(step.kernels, plan, layer, qkv, z, b, a)
        return summed(self.inner.out_proj(y), self.inner)

    def before_any_token(self, dtype: mx.Dtype) -> RecurrentBatch:
        """The states of a new sequence, in every layer."""
        inner = self.inner
        state = mx.zeros((1, inner.num_v_heads, inner.head_v_dim, inner.head_k_dim))
        window = mx.zeros((1, self.num_context, self._taps.shape[2]), dtype)
        return RecurrentBatch(1, defaultdict(lambda: LayerArrays(state, window)))

    def _decode(self, group: _Group, layer: LayerKey, qkv: mx.array, z: mx.array, b: mx.array, a: mx.array) -> mx.array:
        """`_mix` for rows of one token each with nothing to replay."""
        context, state = group.past.contexts(layer), group.past.states(layer)
        normed, context, state = self._one_token(context, state, qkv, z, b, a)
        group.left.layers[layer] = LayerArrays(state, context)
        return normed

    def _token(
        self, context: mx.array, state: mx.array, qkv: mx.array, z: mx.array, b: mx.array, a: mx.array
    ) -> tuple[mx.array, mx.array, mx.array]:
        """The normalised outputs of one token of each of B rows `[1, B, channels]`, and contexts and states after it.

        Run compiled: on a CPU the host takes longer to build these operations one by one than they take.
        """
        windows = mx.concatenate([context, qkv.swapaxes(0, 1)], axis=1)
        decay, beta = (gate.swapaxes(0, 1) for gate in self._gates(b, a))
        q, k, v = split_heads(self._heads, nn.silu(convolved(windows, self._taps)))
        scanned = scan("fused", q, k, v, decay, beta, state)
        return self._normed(scanned.y, z), mx.contiguous(windows[:, 1:]), scanned.end_state

    def _mix(
        self, kernels: Kernels, plan: _GroupPlan, layer: LayerKey, qkv: mx.array, z: mx.array, b: mx.array, a: mx.array
    ) -> mx.array:
        """The normalised outputs `[1, T, channels]` before the last projection."""
        inner = self.inner
        decay, beta = self._gates(b, a)
        outputs = []
        for group in plan.groups:
            windows = mx.concatenate([group.past.contexts(layer), group.rows_of(qkv)], axis=1)
            mixed = inner.conv1d(windows) if kernels.convolves_by_library else convolved(windows, self._taps)
            q, k, v = split_heads(self._heads, nn.silu(mixed))
            tokens = Prepared(q, k, v, group.rows_of(decay), group.rows_of(beta))
            y = self._scan(kernels, group, layer, tokens, windows)
            outputs.append(y.reshape(-1, inner.num_v_heads, inner.head_v_dim))
        y = mx.concatenate(outputs)
        return self._normed(y if plan.order is None else y[plan.order], z)

    def _scan(self, kernels: Kernels, group: _Group, layer: LayerKey, tokens: Prepared, windows: mx.array) -> mx.array:
        """Replay what is pending, then run the new tokens: `[B, n, num_v_heads, head_v_dim]`.

        Fills the group's `left` and `snapshots`.
        """
        past, form = group.past, kernels.gated_delta
        # the grid of the chunked form stands at absolute positions
        start = group.rows[0].start if len(group.rows) == 1 else 0
        outputs, done, after = [], 0, past.states(layer)
        for end in (*(length - start for length in group.snapshots), group.num_tokens):
            own = part(tokens, done, end) if group.snapshots else tokens
            if done or past.are_settled:
                before = after
                found = scan(form(end - done), *own, before, start=start + done)
            else:
                pending = past.pending(layer, own)
                found, before = replay_and_scan(form(pending.k.shape[1] + end), pending, own, after)
            outputs.append(found.y)
            after = found.end_state
            if end < group.num_tokens:
                context = mx.contiguous(windows[:, end : end + self.num_context])
                group.snapshots[start + end][layer] = RecurrentRecord(after, context)
                done = end
        if group.is_drafted:
            left = LayerArrays(before, windows[:, done:] if done else windows, after, Stash(*own[1:]))
        else:
            # nothing to roll back: only the context of the next token stays
            left = LayerArrays(after, mx.contiguous(windows[:, group.num_tokens :]))
        group.left.layers[layer] = left
        return mx.concatenate(outputs, axis=1)

    def _gates(self, b: mx.array, a: mx.array) -> tuple[mx.array, mx.array]:
        """Decay and step size of each token and value head, shaped as a and b."""
        return compute_g(self.inner.A_log, a, self.inner.dt_bias), mx.sigmoid(b)

    def _normed(self, y: mx.array, z: mx.array) -> mx.array:
        """y, shaped as z but for its leading axes, normalised and gated: `[1, T, channels]`."""
        normed: mx.array = self.inner.norm(y.reshape(z.shape).astype(z.dtype), z)
        return normed.reshape(1, z.shape[1], -1)

    def _project(self, x: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """qkv `[1, T, channels]`, z `[1, T, num_v_heads, head_v_dim]`, b and a `[1, T, num_v_heads]`."""
        inner, (_, num_tokens, _) = self.inner, x.shape
        if "in_proj_qkvz" in inner:
            q, k, v, z, b, a = inner.fix_query_key_value_ordering(inner.in_proj_qkvz(x), inner.in_proj_ba(x))
            qkv = mx.concatenate([part.reshape(1, num_tokens, -1) for part in (q, k, v)], axis=-1)
            return qkv, z, b, a
        z = inner.in_proj_z(x).reshape(1, num_tokens, inner.num_v_heads, inner.head_v_dim)
        return inner.in_proj_qkv(x), z, inner.in_proj_b(x), inner.in_proj_a(x)


def _plan(step: PackedStep, mixer: GatedDeltaMixer, dtype: mx.Dtype) -> _GroupPlan:
    """Group the rows and open their windows. mixer: of any layer. dtype: of raw inputs."""
    states = [row.state.recurrent(partial(BatchedState, step.kernels)) for row in step.rows]
    for state in states:
        if not state.batch.num_rows:
            state.advance(mixer.before_any_token(dtype), 0, mixer.num_context)
    pasts = [copy(state) for state in states]
    is_decoding = (
        step.num_tokens == len(step.rows)
        and step.kernels.gated_delta(1) == "fused"
        and all(row.num_certain for row in step.rows)
        and all(state.is_settled for state in states)
    )
    together: dict[Any, list[int]] = {}
    for number, row in enumerate(step.rows):
        # short rows by their shape; long chunks, and rows that leave snapshots on the way, alone
        is_short = is_decoding or (row.num_tokens <= SHORT_SPAN and not row.state.snapshot_points)
        together.setdefault((row.num_tokens, row.num_certain) if is_short else (number,), []).append(number)
    groups = []
    for numbers in together.values():
        group = _Group(
            [step.rows[number] for number in numbers],
            PastRows([pasts[number] for number in numbers], mixer.num_context),
            RecurrentBatch(len(numbers)),
            {length: {} for length in step.rows[numbers[0]].state.snapshot_points},
        )
        for index, number in enumerate(numbers):
            first = max((length - group.rows[0].start for length in group.snapshots), default=0)
            num_uncertain = group.num_tokens - first if group.is_drafted else 0
            states[number].advance(group.left, index, mixer.num_context + num_uncertain, num_uncertain)
            states[number].snapshots = group.snapshots
        groups.append(group)
    order = [token for group in groups for row in group.rows for token in range(row.lo, row.hi)]
    is_ordered = order == list(range(len(order)))
    back = None if is_ordered else mx.array(sorted(range(len(order)), key=order.__getitem__))
    return _GroupPlan(groups, is_decoding, back)
