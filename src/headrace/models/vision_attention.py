"""Attention inside vision towers: between patches, non-causal, in bounded slices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from headrace.models.chunked import ChunkRecorder, by_rows
from headrace.models.weights import num_parameters

SCORE_ELEMENTS = 16 * 1024 * 1024
"""Attention scores held at once on a device without fused attention (64 MiB in float32)."""

SCORE_WORK = 256
"""Multiply-adds that take as long as the softmax of one score there."""


@dataclass(frozen=True, slots=True)
class PatchAttention:
    """Attention of patches. recorder: of its chunks. has_fused: whether the device has fused attention."""

    recorder: ChunkRecorder
    has_fused: bool

    def __call__(self, queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
        """Of every query to every key of its segment; all `[segments, heads, length, head_dim]`."""
        num_segments, num_heads, length, head_dim = queries.shape
        query_work = num_heads * length * (2 * head_dim + (0 if self.has_fused else SCORE_WORK))
        most = self.recorder.chunk_work // query_work
        if not self.has_fused:
            most = min(most, SCORE_ELEMENTS // (num_heads * length))
        block = max(1, min(length, most))
        at_once = max(1, most // block)
        compute = _fused if self.has_fused else _scored
        outputs = []
        for first in range(0, num_segments, at_once):
            some = slice(first, first + at_once)
            rows = []
            for lo in range(0, length, block):
                part = queries[some, :, lo : lo + block]
                row = compute(part, keys[some], values[some], scale)
                rows.append(self.recorder.record(row, part.shape[0] * part.shape[2] * query_work))
            outputs.append(mx.concatenate(rows, axis=2))
        return mx.concatenate(outputs)


class SegmentAttention(nn.Module):
    """Attention of each patch to all patches of its segment: a frame, or a window of one (Qwen's towers).

    inner: mlx-vlm's module. rotate: its rotary embedding.
    """

    def __init__(self, inner: Any, rotate: Any, attend: PatchAttention) -> None:
        super().__init__()
        self.inner = inner
        self._rotate = rotate
        self._attend = attend
        self._qkv_work, self._proj_work = num_parameters(inner.qkv), num_parameters(inner.proj)

    def __call__(self, x: mx.array, cu_seqlens: Sequence[int], rotary_pos_emb: mx.array) -> mx.array:
        """x: `[patches, width]`. cu_seqlens: where segments end, a zero before them."""
        num_patches, inner = x.shape[0], self.inner
        joined = by_rows(inner.qkv, x, self._qkv_work, self._attend.recorder)
        qkv = joined.reshape(num_patches, 3, inner.num_heads, -1)
        queries, keys = (self._rotate(qkv[None, :, index], rotary_pos_emb)[0] for index in (0, 1))
        values, outputs, start = qkv[:, 2], [], 0
        for length, run in groupby(end - begin for begin, end in pairwise(cu_seqlens)):
            end = start + length * len(list(run))
            if end > start:
                of_run = [to_segments(part[start:end], length) for part in (queries, keys, values)]
                attended = self._attend(of_run[0], of_run[1], of_run[2], inner.scale)
                outputs.append(attended.transpose(0, 2, 1, 3).reshape(end - start, -1))
            start = end
        return by_rows(inner.proj, mx.concatenate(outputs), self._proj_work, self._attend.recorder)


class PictureAttention(nn.Module):
    """Attention of each patch to all of its picture, without positions (SigLIP's tower).

    inner: mlx-vlm's module.
    """

    def __init__(self, inner: Any, attend: PatchAttention) -> None:
        super().__init__()
        self.inner = inner
        self._attend = attend
        self._work = num_parameters(inner.q_proj)

    def __call__(self, x: mx.array, mask: None = None) -> mx.array:
        """x: `[patches, width]`."""
        inner, recorder = self.inner, self._attend.recorder
        queries, keys, values = (
            to_segments(by_rows(part, x, self._work, recorder).reshape(x.shape[0], inner.num_heads, -1), x.shape[0])
            for part in (inner.q_proj, inner.k_proj, inner.v_proj)
        )
        attended = self._attend(queries, keys, values, inner.scale)
        return by_rows(inner.out_proj, attended[0].transpose(1, 0, 2).reshape(x.shape), self._work, recorder)


def to_segments(part: mx.array, length: int) -> mx.array:
    """`[patches, heads, head_dim]` to `[segments, heads, length, head_dim]`."""
    _, num_heads, head_dim = part.shape
    return part.reshape(-1, length, num_heads, head_dim).transpose(0, 2, 1, 3)


def _scored(queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
    return mx.softmax((queries * scale) @ keys.swapaxes(-1, -2), axis=-1, precise=True) @ values


def _fused(queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
    """The library's kernel, which needs heads of one of a few sizes: zeros beside them change nothing."""
    head_dim = queries.shape[-1]
    missing = next((size for size in (64, 80, 128) if size >= head_dim), head_dim) - head_dim
    queries, keys, values = (mx.pad(part, [(0, 0)] * 3 + [(0, missing)]) for part in (queries, keys, values))
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale)[..., :head_dim]
