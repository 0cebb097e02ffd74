"""The scaffold of vision towers: patch embedding, blocks, merge, encoded in chunks.

A tower is mlx-vlm's module with the checkpoint's weights. Its attention is replaced: patches attend within one frame or
window, and what mlx-vlm computes for each of these one after the other, and on a CPU with all scores at once, is done
in batches of bounded size here. So is all else, in chunks that are computed one after the other: a large picture
takes many times as long as a step, and running streams would wait for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, ClassVar, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from headrace.models.chunked import ChunkedEncoding, ChunkedRows, ChunkRecorder, Stages, by_rows
from headrace.models.mixers.attention import SCORE_ELEMENTS
from headrace.models.weights import num_parameters
from headrace.types.media import MediaInput

SCORE_WORK = 256
"""Multiply-adds that take as long as the softmax of one score there."""

Grid = tuple[int, int, int]
"""Frames, rows and columns of patches."""


@dataclass(frozen=True, slots=True, eq=False)
class MediaEmbeddings:
    """The embeddings of one input's placeholders.

    rows: `[placeholders, hidden]`, instead of token embeddings.
    deep: `[placeholders, hidden]` each: added to the output of the text model's first, second, … layer there.
    """

    rows: mx.array
    deep: tuple[mx.array, ...] = ()


class Embedded(NamedTuple):
    """What the blocks start from.

    hidden: `[patches, width]`. arguments: each block's, besides its input. order: of the placeholders, if the patches
    are not in the order of the input.
    """

    hidden: mx.array
    arguments: Sequence[Mapping[str, Any]]
    order: mx.array | None = None


class VisionTower(ABC):
    """Computes embeddings of images and videos; keeps no state."""

    needs_axes: ClassVar[bool] = False
    """Whether the text model must have positions in time, row and column."""
    output: ClassVar[str]
    """The name of an attention's output projection."""
    scale: ClassVar[float | None] = None
    """Of the scores; None for the attention's own."""

    def __init__(self, module: Any, blocks: Sequence[Any], dtype: mx.Dtype, attend: PatchAttention) -> None:
        """module: as `build` makes it, with its weights. blocks: mlx-vlm's, each with attention and an MLP.
        dtype: of the activations.

        Replaces the blocks' parts by ones that compute in chunks.
        """
        self.module = module
        self.blocks = blocks
        self.attend = attend
        self._dtype = dtype
        self._recorder = attend.recorder
        for block in blocks:
            name = "attn" if "attn" in block else "self_attn"
            setattr(block, name, SegmentAttention(block[name], self))
            block.mlp = self.in_chunks(block.mlp)

    @staticmethod
    @abstractmethod
    def own_name(name: str) -> str | None:
        """The module's name for a weight of the checkpoint; None if it is not the tower's."""

    @staticmethod
    @abstractmethod
    def build(config: Mapping[str, Any]) -> Any:
        """The module described by config.json, with arbitrary weights."""

    @staticmethod
    def sanitize(module: Any, weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """The weights in the module's shapes."""
        sanitized: dict[str, mx.array] = module.sanitize(weights)
        return sanitized

    @abstractmethod
    def heads(self, inner: Any, x: mx.array, positions: Any) -> Sequence[mx.array]:
        """Queries, keys and values, `[patches, heads, head_dim]` each, of mlx-vlm's attention `inner` for its input
        `[patches, width]`."""

    @abstractmethod
    def embed(self, patches: mx.array, grid: Grid) -> Embedded:
        """patches: `[patches, values]` of one input."""

    def deep(self, index: int, hidden: mx.array) -> Sequence[mx.array]:
        """Additions to the text model's first layers, from the output of a block."""
        return ()

    @abstractmethod
    def merge(self, hidden: mx.array) -> mx.array:
        """The blocks' output to rows of the text model `[placeholders, hidden]`."""

    def begin(self, one: MediaInput) -> ChunkedEncoding[MediaEmbeddings]:
        return ChunkedEncoding(self._stages(one), self._recorder)

    def _stages(self, one: MediaInput) -> Stages[MediaEmbeddings]:
        pixels = mx.array(np.asarray(one.pixels))
        patches = by_rows(
            lambda some: _normalised(some, one).astype(self._dtype), pixels, pixels.shape[1], self._recorder
        )
        yield
        hidden, arguments, order = self.embed(patches, one.grid)
        deep: list[mx.array] = []
        for index, (block, own) in enumerate(zip(self.blocks, arguments, strict=True)):
            yield
            hidden = block(hidden, **own)
            deep += self.deep(index, hidden)
        yield
        rows = self.merge(hidden)
        rows = rows if order is None else rows[mx.argsort(order)]
        for array in (rows, *deep):
            self._recorder.record(array, 0)
        return MediaEmbeddings(rows, tuple(deep))

    def in_chunks(self, inner: nn.Module, rows_of_one: int = 1) -> ChunkedRows:
        """A module that treats rows, or so many together, independently."""
        return ChunkedRows(inner, num_parameters(inner) // rows_of_one, self._recorder)

    def rows(self, layer: Any, x: mx.array) -> mx.array:
        """A linear layer of `[patches, width]`, in chunks."""
        return by_rows(layer, x, num_parameters(layer), self._recorder)


def _normalised(pixels: mx.array, one: MediaInput) -> mx.array:
    """Patches of an input as float32: `[patches, channels * values]`."""
    by_channel = pixels.reshape(pixels.shape[0], len(one.mean), -1).astype(mx.float32) / 255
    mean, std = (mx.array(numbers, dtype=mx.float32)[:, None] for numbers in (one.mean, one.std))
    return ((by_channel - mean) / std).reshape(pixels.shape)


# Attention between patches: non-causal, in bounded slices


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
    """Attention of each patch to all patches of its segment: the whole input, a frame, or a window of one."""

    def __init__(self, inner: Any, tower: VisionTower) -> None:
        """inner: mlx-vlm's module, which this replaces."""
        super().__init__()
        self.inner = inner
        self._tower = tower
        self._scale: float = inner.scale if tower.scale is None else tower.scale

    def __call__(
        self,
        x: mx.array,
        positions: Any = None,
        mask: None = None,
        *,
        cu_seqlens: Sequence[int] | None = None,
        rotary_pos_emb: mx.array | None = None,
    ) -> mx.array:
        """x: `[patches, width]`. cu_seqlens: where segments end, a zero before them; None for one of all patches.

        mlx-vlm's blocks give positions under either name.
        """
        num_patches = x.shape[0]
        parts = self._tower.heads(self.inner, x, positions if rotary_pos_emb is None else rotary_pos_emb)
        outputs = []
        for start, end, length in _runs((0, num_patches) if cu_seqlens is None else cu_seqlens):
            queries, keys, values = (_to_segments(part[start:end], length) for part in parts)
            attended = self._tower.attend(queries, keys, values, self._scale)
            outputs.append(attended.transpose(0, 2, 1, 3).reshape(end - start, -1))
        joined = mx.concatenate(outputs)
        return self._tower.rows(self.inner[self._tower.output], joined)


def _runs(ends: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Neighbouring segments of one length: their first and last patch (exclusive), and that length."""
    start = 0
    for length, run in groupby(end - begin for begin, end in pairwise(ends)):
        end = start + length * len(list(run))
        if end > start:
            yield start, end, length
        start = end


def _to_segments(part: mx.array, length: int) -> mx.array:
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
