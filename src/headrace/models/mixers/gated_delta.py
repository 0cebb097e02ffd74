"""Gated delta net layers of Qwen3-Next and Qwen3.5: mlx-lm's projections, our convolution, scan and rollback."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gated_delta import compute_g

from headrace.backend.cuda import shapes
from headrace.backend.delta_rule import convolved
from headrace.backend.gated_delta import scan, scan_behind
from headrace.models.sharding import summed
from headrace.models.step import PackedStep, RowSpan, View
from headrace.state.recurrent import BatchRow, RecurrentState, WindowTokens, gather, shared_array

SHORT_SPAN = 8
"""Rows of equally many tokens, at most so many, go through the layer as one batch; a longer chunk goes alone."""

L2_EPSILON = 1e-6
"""Added to the sum of squares when q and k are normalised, as in the reference implementation."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows of one shape: equally many tokens, of which equally many are certain."""

    spans: tuple[RowSpan, ...]
    states: tuple[RecurrentState, ...]

    @property
    def num_tokens(self) -> int:
        return self.spans[0].num_tokens

    @property
    def num_certain(self) -> int:
        return self.spans[0].num_certain

    @property
    def is_drafted(self) -> bool:
        """Whether some of the tokens may be dropped."""
        return self.num_certain < self.num_tokens

    def rows_of(self, packed: mx.array) -> mx.array:
        """The group's rows `[B, n, …]` of a packed array `[1, T, …]`."""
        lo, hi = self.spans[0].lo, self.spans[-1].hi
        if hi - lo != len(self.spans) * self.num_tokens:
            return mx.stack([packed[0, span.lo : span.hi] for span in self.spans])
        own = packed if hi - lo == packed.shape[1] else packed[:, lo:hi]
        return own.reshape(len(self.spans), self.num_tokens, *packed.shape[2:])


class GatedDeltaMixer(nn.Module):
    """Replaces a `GatedDeltaNet` of mlx-lm.

    The module's projections are found by their names: one fused `in_proj_qkvz` and `in_proj_ba` (Qwen3-Next), or
    `in_proj_qkv`, `in_proj_z`, `in_proj_b`, `in_proj_a` (Qwen3.5).
    """

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        self._scales = mx.array([[[inner.head_k_dim**-1.0]], [[inner.head_k_dim**-0.5]]])
        """Of normalised queries, which the scan's read is scaled by once more, and of keys."""
        weight: mx.array = inner.conv1d.weight
        self._taps = mx.contiguous(weight[..., 0].T[None].astype(mx.float32))
        """The convolution's weights `[1, kernel, channels]`."""
        self._one_token = mx.compile(self._token)

    def __call__(self, x: mx.array, mask: Any = None, cache: View | None = None) -> mx.array:
        """x: `[1, T, hidden]`; the mask is ours and always None."""
        assert cache is not None
        step = cache.step
        states = [span.state.layer(cache.layer, partial(RecurrentState, step.kernels)) for span in step.spans]
        mix = self._decode if _are_decoding(step, states) else self._mix
        return summed(self.inner.out_proj(mix(step, states, *self._project(x))), self.inner)

    def _decode(
        self, step: PackedStep, states: Sequence[RecurrentState], qkv: mx.array, z: mx.array, b: mx.array, a: mx.array
    ) -> mx.array:
        """What `_mix` gives, for rows of one token each with nothing to replay."""
        group = _Group(step.spans, tuple(states))
        context, state = self._contexts(step, group, qkv), self._settled(group)
        normed, context, state = self._one_token(context, state, qkv, z, b, a)
        for row, one in enumerate(states):
            one.advance(BatchRow(state, row), BatchRow(context, row))
        return normed

    def _token(
        self, context: mx.array, state: mx.array, qkv: mx.array, z: mx.array, b: mx.array, a: mx.array
    ) -> tuple[mx.array, mx.array, mx.array]:
        """The normalised outputs of one token of each of B rows `[1, B, channels]`, and contexts and states behind it.

        Run compiled: on a CPU the host takes longer to build these operations one by one than they take.
        """
        windows = mx.concatenate([context, qkv.swapaxes(0, 1)], axis=1)
        decay, beta = (gate.swapaxes(0, 1) for gate in self._gates(b, a))
        scanned = scan("fused", *self._heads(nn.silu(convolved(windows, self._taps))), decay, beta, state)
        return self._normed(scanned.y, z), mx.contiguous(windows[:, 1:]), scanned.end_state

    def _mix(
        self, step: PackedStep, states: Sequence[RecurrentState], qkv: mx.array, z: mx.array, b: mx.array, a: mx.array
    ) -> mx.array:
        """The normalised outputs `[1, T, channels]` before the last projection; advances the states."""
        inner = self.inner
        decay, beta = self._gates(b, a)
        groups = _groups(step.spans, states)
        outputs = []
        for group in groups:
            windows = mx.concatenate([self._contexts(step, group, qkv), group.rows_of(qkv)], axis=1)
            by_library = step.kernels.convolves_by_library
            mixed = inner.conv1d(windows) if by_library else convolved(windows, self._taps)
            q, k, v = self._heads(nn.silu(mixed))
            tokens = shapes.Prepared(q, k, v, group.rows_of(decay), group.rows_of(beta))
            scan_group = self._scan_with_snapshots if group.spans[0].state.snapshot_points else self._scan
            y = scan_group(step, group, tokens, windows)
            outputs.append(y.reshape(-1, inner.num_v_heads, inner.head_v_dim))
        return self._normed(_in_step_order(groups, outputs), z)

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

    def _contexts(self, step: PackedStep, group: _Group, qkv: mx.array) -> mx.array:
        """The raw inputs before each row's tokens, `[B, kernel - 1, channels]`."""
        length = self.inner.conv_kernel_size - 1
        shared = shared_array([state.window for state in group.states])
        if shared is None:
            empty = BatchRow(mx.zeros((1, length, qkv.shape[-1]), qkv.dtype), 0)
            contexts = [state.context(length) for state in group.states]
            return gather([empty if one is None else one for one in contexts])
        ends = [state.end for state in group.states]
        if min(ends) == max(ends):
            return shared[:, ends[0] - length : ends[0]]
        places = step.shared(tuple([tuple(range(end - length, end)) for end in ends]))
        return mx.take_along_axis(shared, places[..., None], axis=1)

    def _heads(self, mixed: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Queries, keys `[B, n, num_k_heads, head_k_dim]`, values `[B, n, num_v_heads, head_v_dim]`."""
        inner, (num_rows, num_tokens, _) = self.inner, mixed.shape
        shape = (num_rows, num_tokens, -1, inner.num_k_heads, inner.head_k_dim)
        q_and_k, v = mx.split(mixed, [2 * inner.key_dim], axis=-1)
        normed = mx.fast.rms_norm(q_and_k.reshape(shape), None, L2_EPSILON / inner.head_k_dim)
        normed = normed * self._scales.astype(normed.dtype)
        return normed[:, :, 0], normed[:, :, 1], v.reshape(num_rows, num_tokens, inner.num_v_heads, inner.head_v_dim)

    def _scan_with_snapshots(
        self, step: PackedStep, group: _Group, tokens: shapes.Prepared, windows: mx.array
    ) -> mx.array:
        (span,), (state,) = group.spans, group.states
        context = self.inner.conv_kernel_size - 1
        outputs, done = [], 0
        for end in (*(length - span.start for length in span.state.snapshot_points), span.num_tokens):
            is_last = end == span.num_tokens
            num_certain = span.num_certain - done if is_last else end - done
            piece = replace(span, lo=done, hi=end, start=span.start + done, num_certain=num_certain)
            part = _Group((piece,), (state,))
            own = shapes.Prepared(*(array[:, done:end] for array in tokens))
            outputs.append(self._scan(step, part, own, windows[:, done : end + context]))
            if not is_last:
                state.take_snapshot(span.start + end)
            done = end
        return mx.concatenate(outputs, axis=1)

    def _scan(self, step: PackedStep, group: _Group, tokens: shapes.Prepared, windows: mx.array) -> mx.array:
        """Replay what is pending, then run the new tokens; advances the states.

        Gives `[B, n, num_v_heads, head_v_dim]`.
        """
        states, form = group.states, step.kernels.gated_delta
        if all(state.is_settled for state in states):
            # the grid of the chunked form stands at absolute positions
            start = group.spans[0].start if len(states) == 1 else 0
            before = self._settled(group)
            result = scan(form(group.num_tokens), *tokens, before, start=start)
        else:
            pending = _pending(step, states, tokens)
            result = scan_behind(form(pending.k.shape[1] + group.num_tokens), pending, tokens, self._states(group))
            assert result.kept_state is not None
            before = result.kept_state
        if group.is_drafted:
            stash = shapes.Stash(*tokens[1:])
            for row, state in enumerate(states):
                window, after = BatchRow(windows, row), BatchRow(result.end_state, row)
                state.advance(BatchRow(before, row), window, after, WindowTokens(stash, row))
        else:
            # nothing to roll back: only the context of the next token stays
            context = mx.contiguous(windows[:, group.num_tokens :])
            for row, state in enumerate(states):
                state.advance(BatchRow(result.end_state, row), BatchRow(context, row))
        return result.y

    def _settled(self, group: _Group) -> mx.array:
        """The rows' states after all committed tokens."""
        return self._gathered([state.settled for state in group.states])

    def _states(self, group: _Group) -> mx.array:
        """The rows' states before what is pending."""
        return self._gathered([state.state for state in group.states])

    def _gathered(self, rows: Sequence[BatchRow | None]) -> mx.array:
        inner = self.inner
        empty = BatchRow(mx.zeros((1, inner.num_v_heads, inner.head_v_dim, inner.head_k_dim), mx.float32), 0)
        return gather([empty if one is None else one for one in rows])


def _are_decoding(step: PackedStep, states: Sequence[RecurrentState]) -> bool:
    return (
        step.num_tokens == len(step.spans)
        and step.kernels.gated_delta(1) == "fused"
        and all(span.num_certain for span in step.spans)
        and all(state.is_settled for state in states)
    )


def _groups(spans: Sequence[RowSpan], states: Sequence[RecurrentState]) -> list[_Group]:
    """Short rows together by their shape; long chunks, and rows that leave snapshots on the way, alone."""
    together: dict[Any, list[tuple[RowSpan, RecurrentState]]] = {}
    for span, state in zip(spans, states, strict=True):
        is_short = span.num_tokens <= SHORT_SPAN and not span.state.snapshot_points
        shape = (span.num_tokens, span.num_certain) if is_short else (span.lo,) * 3
        together.setdefault(shape, []).append((span, state))
    return [_Group(tuple(span for span, _ in rows), tuple(state for _, state in rows)) for rows in together.values()]


def _in_step_order(groups: Sequence[_Group], outputs: Sequence[mx.array]) -> mx.array:
    """The groups' outputs `[B · n, …]` as the step's tokens stand, `[T, …]`."""
    order = [token for group in groups for span in group.spans for token in range(span.lo, span.hi)]
    joined = outputs[0] if len(outputs) == 1 else mx.concatenate(list(outputs))
    if order == list(range(len(order))):
        return joined
    return joined[mx.array(sorted(range(len(order)), key=order.__getitem__))]


def _pending(step: PackedStep, states: Sequence[RecurrentState], tokens: shapes.Prepared) -> shapes.Stash:
    """The rows' pending tokens `[B, n, …]`; rows with fewer are filled up with no-ops: k = 0, g = 1, beta = 0."""
    counts = tuple([state.num_replay for state in states])
    longest, stash = max(counts), _shared_stash(states)
    if stash is None:
        rows = [state.pending() for state in states]
        return shapes.Stash(
            *(
                _padded([None if one is None else one[place] for one in rows], longest, new, fill)
                for place, (new, fill) in enumerate(zip(tokens[1:], (0.0, 0.0, 1.0, 0.0), strict=True))
            )
        )
    k, v, g, beta = (array[:, :longest] for array in stash)
    if min(counts) < longest:
        counted = step.cached((_pending, counts), lambda: mx.arange(longest) < mx.array(counts)[:, None])
        k = mx.where(counted[..., None, None], k, 0)
        g, beta = mx.where(counted[..., None], g, 1), mx.where(counted[..., None], beta, 0)
    return shapes.Stash(k, v, g, beta)


def _shared_stash(states: Sequence[RecurrentState]) -> shapes.Stash | None:
    """The stash that holds the window of all of these rows, in order; None if there is none."""
    first = states[0].stash
    if first is None or len(states) != first.inputs.k.shape[0]:
        return None
    stashes = [state.stash for state in states]
    is_shared = all(one is not None and one.inputs is first.inputs and one.row == i for i, one in enumerate(stashes))
    return first.inputs if is_shared else None


def _padded(rows: Sequence[mx.array | None], length: int, like: mx.array, fill: float) -> mx.array:
    """Rows of at most `length` tokens each, padded in front: `[B, length, …]`."""
    padded = []
    for row in rows:
        tokens = mx.zeros((0, *like.shape[2:]), like.dtype) if row is None else row
        widths = [(length - tokens.shape[0], 0)] + [(0, 0)] * (tokens.ndim - 1)
        padded.append(mx.pad(tokens, widths, constant_values=fill))
    return mx.stack(padded)
