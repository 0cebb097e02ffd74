"""Gated delta net layers of Qwen3-Next and Qwen3.5: mlx-lm's projections, our convolution, scan and rollback."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gated_delta import compute_g, normalize_qk

from headrace.backend.gated_delta import scan
from headrace.backend.kernels import Kernels
from headrace.models.step import RowSpan, View
from headrace.state.recurrent import DeltaInputs, RecurrentState

SHORT_SPAN = 8
"""Rows of at most so many tokens share one padded scan; a longer chunk is scanned alone."""

L2_EPSILON = 1e-6
"""Added to the sum of squares when q and k are normalised, as in the reference implementation."""


@dataclass(frozen=True, slots=True)
class _Job:
    """One row's part of the scan."""

    span: RowSpan
    state: RecurrentState
    queries: mx.array
    new: DeltaInputs
    pending: DeltaInputs | None

    @property
    def num_pending(self) -> int:
        return 0 if self.pending is None else self.pending.num_tokens


class GatedDeltaMixer(nn.Module):
    """Stands where a `GatedDeltaNet` of mlx-lm stood.

    The module's projections are found by their names: one fused `in_proj_qkvz` and `in_proj_ba` (Qwen3-Next), or
    `in_proj_qkv`, `in_proj_z`, `in_proj_b`, `in_proj_a` (Qwen3.5).
    """

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def __call__(self, x: mx.array, mask: Any = None, cache: View | None = None) -> mx.array:
        """x: `[1, T, hidden]`; the mask is ours and always None."""
        assert cache is not None
        inner, step = self.inner, cache.step
        states = [span.state.layer(cache.layer, partial(RecurrentState, step.kernels)) for span in step.spans]
        qkv, z, b, a = self._project(x)
        mixed, windows = self._convolve(qkv, step.spans, states)
        queries, keys, values = self._heads(mixed)
        decay, beta = compute_g(inner.A_log, a, inner.dt_bias)[0], mx.sigmoid(b)[0]
        jobs = []
        for span, state in zip(step.spans, states, strict=True):
            new = DeltaInputs(keys, values, decay, beta).part(span.lo, span.hi)
            jobs.append(_Job(span, state, queries[span.lo : span.hi], new, state.pending()))
        outputs: dict[int, mx.array] = {}
        for group in _groups(jobs):
            if group[0].span.state.marks:
                outputs[group[0].span.lo] = self._scan_with_marks(group[0], windows, step.kernels)
                continue
            for job, output in zip(group, self._scan(group, windows, step.kernels), strict=True):
                outputs[job.span.lo] = output
        packed = mx.concatenate([outputs[span.lo] for span in step.spans])[None]
        normed = inner.norm(packed.astype(x.dtype), z)
        mixed_out: mx.array = inner.out_proj(normed.reshape(1, step.num_tokens, -1))
        return mixed_out

    def _project(self, x: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """qkv `[1, T, channels]`, z `[1, T, num_v_heads, head_v_dim]`, b and a `[1, T, num_v_heads]`."""
        inner, (_, num_tokens, _) = self.inner, x.shape
        if "in_proj_qkvz" in inner:
            q, k, v, z, b, a = inner.fix_query_key_value_ordering(inner.in_proj_qkvz(x), inner.in_proj_ba(x))
            qkv = mx.concatenate([part.reshape(1, num_tokens, -1) for part in (q, k, v)], axis=-1)
            return qkv, z, b, a
        z = inner.in_proj_z(x).reshape(1, num_tokens, inner.num_v_heads, inner.head_v_dim)
        return inner.in_proj_qkv(x), z, inner.in_proj_b(x), inner.in_proj_a(x)

    def _convolve(
        self, qkv: mx.array, spans: Sequence[RowSpan], states: Sequence[RecurrentState]
    ) -> tuple[mx.array, dict[int, mx.array]]:
        """Causal depthwise convolution of each row behind its own context.

        Gives activated outputs `[T, channels]`, and the raw inputs `[1, kernel - 1 + n, channels]` by the row's `lo`.
        """
        kernel = self.inner.conv_kernel_size
        windows: dict[int, mx.array] = {}
        outputs = []
        for span, state in zip(spans, states, strict=True):
            context = state.context(kernel - 1)
            if context is None:
                context = mx.zeros((1, kernel - 1, qkv.shape[-1]), qkv.dtype)
            window = mx.concatenate([context, qkv[:, span.lo : span.hi]], axis=1)
            outputs.append(self._shifted_sum(window[0]))
            windows[span.lo] = window
        return nn.silu(mx.concatenate(outputs)), windows

    def _shifted_sum(self, window: mx.array) -> mx.array:
        """The convolution as shifted products: the bits of `conv1d`, at 40 % of its time on a CPU.

        Added up in float32 whatever the type, as `conv1d` does.
        """
        dtype = window.dtype
        weight, window = self.inner.conv1d.weight.astype(mx.float32), window.astype(mx.float32)
        kernel = weight.shape[1]
        num_outputs = window.shape[0] - kernel + 1
        total: mx.array = window[:num_outputs] * weight[:, 0, 0]
        for tap in range(1, kernel):
            total = total + window[tap : tap + num_outputs] * weight[:, tap, 0]
        return total.astype(dtype)

    def _heads(self, mixed: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Queries, keys `[T, num_k_heads, head_k_dim]`, values `[T, num_v_heads, head_v_dim]`."""
        inner = self.inner
        q, k, v = mx.split(mixed, [inner.key_dim, 2 * inner.key_dim], axis=-1)
        q = q.reshape(-1, inner.num_k_heads, inner.head_k_dim)
        k = k.reshape(-1, inner.num_k_heads, inner.head_k_dim)
        q, k = normalize_qk(q, k, inv_scale=inner.head_k_dim**-0.5, eps=L2_EPSILON)
        return q, k, v.reshape(-1, inner.num_v_heads, inner.head_v_dim)

    def _scan_with_marks(self, job: _Job, windows: dict[int, mx.array], kernels: Kernels) -> mx.array:
        """One row, its scan cut at the marks; the row's state passes them one after the other."""
        span, window = job.span, windows[job.span.lo]
        kernel = self.inner.conv_kernel_size - 1
        outputs, done = [], 0
        for end in (*(mark - span.start for mark in span.state.marks), span.num_tokens):
            is_last = end == span.num_tokens
            part = replace(
                span,
                lo=span.lo + done,
                hi=span.lo + end,
                start=span.start + done,
                num_certain=span.num_certain - done if is_last else end - done,
            )
            new, queries = job.new.part(done, end), job.queries[done:end]
            piece = _Job(part, job.state, queries, new, job.state.pending() if done else job.pending)
            outputs += self._scan([piece], {part.lo: window[:, done : end + kernel]}, kernels)
            if not is_last:
                assert job.state.state is not None and job.state.window is not None
                job.state.note(span.start + end, job.state.state, job.state.window)
            done = end
        return mx.concatenate(outputs)

    def _scan(self, jobs: Sequence[_Job], windows: dict[int, mx.array], kernels: Kernels) -> list[mx.array]:
        """Replay what is pending, then run the new tokens: one scan over all jobs, padded with no-op tokens.

        Gives each job's outputs `[n, num_v_heads, head_v_dim]` and advances its state.
        """
        num_replay = max(job.num_pending for job in jobs)
        num_new = max(job.span.num_tokens for job in jobs)
        columns = [_column(job, num_replay, num_new) for job in jobs]
        q, k, v, decay, beta = (mx.stack([column[i] for column in columns]) for i in range(5))
        states = mx.concatenate([self._state_of(job) for job in jobs])
        drafted = any(job.span.num_certain < job.span.num_tokens for job in jobs)
        # rows of one group have the same number of certain tokens: see _groups
        keep = num_replay + jobs[0].span.num_certain if drafted else None
        start = jobs[0].span.start if len(jobs) == 1 and not num_replay else 0
        form = kernels.gated_delta(num_replay + num_new)
        result = scan(form, q, k, v, decay, beta, states, keep=keep, start=start)
        outputs = []
        for row, job in enumerate(jobs):
            self._advance(job, windows[job.span.lo], row, result.end_state, result.kept_state)
            outputs.append(result.y[row, num_replay : num_replay + job.span.num_tokens])
        return outputs

    def _state_of(self, job: _Job) -> mx.array:
        inner = self.inner
        if job.state.state is not None:
            return job.state.state
        return mx.zeros((1, inner.num_v_heads, inner.head_v_dim, inner.head_k_dim), mx.float32)

    def _advance(self, job: _Job, window: mx.array, row: int, end_state: mx.array, kept_state: mx.array | None) -> None:
        span = job.span
        if span.num_certain == span.num_tokens:
            # nothing to roll back: only the context of the next token stays
            context = mx.contiguous(window[:, span.num_tokens :])
            job.state.advance(end_state[row : row + 1], context, None)
            return
        assert kept_state is not None
        stash = job.new.part(span.num_certain, span.num_tokens)
        job.state.advance(kept_state[row : row + 1], window, stash)


def _groups(jobs: Sequence[_Job]) -> list[list[_Job]]:
    """Short rows together by their number of certain tokens, long chunks alone."""
    short: dict[tuple[int, bool], list[_Job]] = {}
    alone = []
    for job in jobs:
        if job.span.num_tokens <= SHORT_SPAN and not job.span.state.marks:
            short.setdefault(_group_key(job.span), []).append(job)
        else:
            alone.append([job])
    return [*short.values(), *alone]


def _group_key(span: RowSpan) -> tuple[int, bool]:
    """Rows whose state is kept at the same step of the scan; rows without drafts keep their end state."""
    drafted = span.num_certain < span.num_tokens
    return (span.num_certain if drafted else 0, drafted)


def _column(job: _Job, num_replay: int, num_new: int) -> list[mx.array]:
    """q, k, v, decay, beta `[num_replay + num_new, …]` of one row: pending tokens, then new ones.

    Pads stand in front of the pending tokens and behind the new ones and are no-ops: k = 0, decay = 1, beta = 0.
    """
    before = num_replay - job.num_pending
    after = num_new - job.span.num_tokens
    # what a pending token would read is of no interest, so its key stands in for its query
    first = job.pending.k if job.pending is not None else None
    parts = [(first, job.queries, 0.0), (first, job.new.k, 0.0)]
    pending = job.pending
    parts.append((pending.v if pending is not None else None, job.new.v, 0.0))
    parts.append((pending.decay if pending is not None else None, job.new.decay, 1.0))
    parts.append((pending.beta if pending is not None else None, job.new.beta, 0.0))
    return [_padded(old, new, before, after, fill) for old, new, fill in parts]


def _padded(old: mx.array | None, new: mx.array, before: int, after: int, fill: float) -> mx.array:
    tokens = new if old is None else mx.concatenate([old, new])
    if not before and not after:
        return tokens
    widths = [(before, after)] + [(0, 0)] * (tokens.ndim - 1)
    return mx.pad(tokens, widths, constant_values=fill)
