"""A checkpoint's vision tower: pixels of pictures to embeddings in the place of their placeholder tokens.

The tower is mlx-vlm's module with the checkpoint's weights. Its attention is replaced: patches attend within one frame
or window, and what mlx-vlm computes for each of these one after the other, and on a CPU with all scores at once, is
done in batches of bounded size here. Its forward only builds the graph of a computation, which `Embedding` carries out
in pieces: a large picture takes many times as long as a step, and running streams would wait for it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from headrace.backend.device import Device
from headrace.errors import ModelError
from headrace.models.pieces import PIECE_WORK, Pieces, RowPieces, by_rows
from headrace.models.source import ModelFiles
from headrace.models.weights import LISTED_NAMES, hold, num_parameters
from headrace.types.media import MediaInput

SCORE_ELEMENTS = 16 * 1024 * 1024
"""Attention scores held at once on a device without fused attention (64 MiB in float32)."""

_PREFIXES = ("model.visual.", "visual.", "vision_tower.", "model.vision_tower.")
"""How checkpoints call the tower's weights: as published, and as converted."""

_MODULES = {
    "qwen2_vl": "qwen2_vl",
    "qwen2_5_vl": "qwen2_5_vl",
    "qwen3_vl": "qwen3_vl",
    "qwen3_vl_moe": "qwen3_vl",
    "qwen3_5": "qwen3_vl",
    "qwen3_5_moe": "qwen3_vl",
}
"""Which of mlx-vlm's towers a `model_type` has; one serves several."""


@dataclass(frozen=True, slots=True, eq=False)
class MediaEmbeddings:
    """What stands in the place of one input's placeholders.

    rows: `[placeholders, hidden]`, instead of token embeddings.
    deep: `[placeholders, hidden]` each: what is added to the output of the text model's first, second, … layer there.
    """

    rows: mx.array
    deep: tuple[mx.array, ...] = ()


class Embedding:
    """The embeddings of one input, on their way: `compute` until `is_done`."""

    def __init__(self, embeddings: MediaEmbeddings, pieces: Pieces) -> None:
        self.embeddings = embeddings
        self._pieces = pieces

    @property
    def is_done(self) -> bool:
        """Whether the embeddings are evaluated."""
        return self._pieces.is_done

    def compute(self, max_work: float) -> int:
        """Go on with pieces of at most `max_work` multiply-adds together, or with one; gives how many they had."""
        return self._pieces.compute(max_work)


class VisionTower:
    """Computes embeddings; keeps nothing of what it has seen."""

    def __init__(self, module: Any, dtype: mx.Dtype, pieces: Pieces) -> None:
        """dtype: of its activations. pieces: where the module's parts note what they are to compute."""
        self.module = module
        self._dtype = dtype
        self.pieces = pieces

    @property
    def num_bytes(self) -> int:
        """Of its weights."""
        return sum(array.nbytes for _, array in _flat(self.module))

    def begin(self, one: MediaInput) -> Embedding:
        """The embeddings of an input, of which little more than the graph is there yet."""
        self.pieces.take()  # of one that has failed on the way
        computed = self.module(self._patches(one), mx.array([one.grid], dtype=mx.int32))
        # Towers without deepstack give their embeddings alone, or with an empty list.
        rows, deep = computed if isinstance(computed, tuple) else (computed, [])
        for array in (rows, *deep):
            self.pieces.note(array, 0)
        return Embedding(MediaEmbeddings(rows, tuple(deep)), self.pieces.take())

    def _patches(self, one: MediaInput) -> mx.array:
        """`[patches, channels * values]`, normalised."""
        pixels = mx.array(np.asarray(one.pixels))
        return by_rows(lambda some: _normalised(some, one).astype(self._dtype), pixels, pixels.shape[1], self.pieces)


def load_tower(files: ModelFiles, *, dtype: str, device: Device) -> tuple[VisionTower, str] | None:
    """The tower of a checkpoint, and a line about it; None if it has none, or one of a kind that is not known here.

    dtype: as in `ModelConfig.dtype`. Raises ModelError if weights are missing.
    """
    name, config = _MODULES.get(files.config["model_type"]), files.config.get("vision_config")
    if name is None or not config:
        return None
    weights = _tower_weights(files)
    if not weights:
        return None
    # Imported here: a package that takes a second to load and that models without a tower don't need.
    vision = importlib.import_module(f"mlx_vlm.models.{name}.vision")
    module_config = importlib.import_module(f"mlx_vlm.models.{name}.config").VisionConfig
    module = vision.VisionModel(module_config.from_dict({**config, "model_type": name}))
    weights = module.sanitize(weights)
    _quantise(module, weights, files.config)
    missing = {path for path, _ in _flat(module)} - weights.keys()
    if missing:
        raise ModelError(f"{files.directory} lacks weights of its vision tower: {sorted(missing)[:LISTED_NAMES]}")
    module.load_weights(list(weights.items()), strict=False)
    module.eval()
    precision = hold(module, dtype, device.kind, device.memory_bytes)
    tower = VisionTower(module, module.patch_embed.proj.weight.dtype, Pieces(PIECE_WORK[device.kind]))
    _cut(module, tower, vision.apply_rotary_pos_emb_vision, has_fused=device.kind != "cpu")
    return tower, f"vision tower: {len(module.blocks)} layers, {tower.num_bytes / 1e6:.0f} MB, {precision}"


def _cut(module: Any, tower: VisionTower, rotate: Any, *, has_fused: bool) -> None:
    """Let the parts of the tower's module compute in pieces."""

    def in_rows(inner: Any, rows_of_one: int = 1) -> RowPieces:
        return RowPieces(inner, num_parameters(inner) // rows_of_one, tower.pieces)

    merged = module.spatial_merge_size**2
    module.patch_embed = in_rows(module.patch_embed)
    for block in module.blocks:
        block.attn = SegmentAttention(block.attn, rotate, tower.pieces, has_fused=has_fused)
        block.mlp = in_rows(block.mlp)
    module.merger = in_rows(module.merger, merged)
    if "deepstack_merger_list" in module:
        module.deepstack_merger_list = [in_rows(each, merged) for each in module.deepstack_merger_list]


class SegmentAttention(nn.Module):
    """A tower's attention, of each patch to all patches of its segment: a frame, or a window of one.

    inner: mlx-vlm's module. rotate: its rotary embedding. has_fused: whether the device has fused attention.
    """

    def __init__(self, inner: Any, rotate: Any, pieces: Pieces, *, has_fused: bool) -> None:
        super().__init__()
        self.inner = inner
        self._rotate = rotate
        self._pieces = pieces
        self._has_fused = has_fused
        self._qkv_work, self._proj_work = num_parameters(inner.qkv), num_parameters(inner.proj)

    def __call__(self, x: mx.array, cu_seqlens: mx.array, rotary_pos_emb: mx.array) -> mx.array:
        """x: `[patches, width]`. cu_seqlens: where segments end, a zero before them."""
        num_patches, inner = x.shape[0], self.inner
        joined = by_rows(inner.qkv, x, self._qkv_work, self._pieces)
        qkv = joined.reshape(num_patches, 3, inner.num_heads, -1)
        queries, keys = (self._rotate(qkv[None, :, index], rotary_pos_emb)[0] for index in (0, 1))
        values, outputs, start = qkv[:, 2], [], 0
        ends: Any = cu_seqlens.tolist()
        for length, run in groupby(end - begin for begin, end in pairwise(ends)):
            end = start + length * len(list(run))
            if end > start:
                parts = (_segments(part[start:end], length) for part in (queries, keys, values))
                outputs.append(self._attend(*parts).transpose(0, 2, 1, 3).reshape(end - start, -1))
            start = end
        return by_rows(inner.proj, mx.concatenate(outputs), self._proj_work, self._pieces)

    def _attend(self, queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
        """All `[segments, heads, length, head_dim]`."""
        num_segments, num_heads, length, head_dim = queries.shape
        query_work = 2 * num_heads * length * head_dim
        most = self._pieces.piece_work // query_work
        if not self._has_fused:
            most = min(most, SCORE_ELEMENTS // (num_heads * length))
        block = max(1, min(length, most))
        at_once = max(1, most // block)
        attend = _fused if self._has_fused else _scored
        outputs = []
        for first in range(0, num_segments, at_once):
            some = slice(first, first + at_once)
            rows = []
            for lo in range(0, length, block):
                part = queries[some, :, lo : lo + block]
                row = attend(part, keys[some], values[some], self.inner.scale)
                rows.append(self._pieces.note(row, part.shape[0] * part.shape[2] * query_work))
            outputs.append(mx.concatenate(rows, axis=2))
        return mx.concatenate(outputs)


def _segments(part: mx.array, length: int) -> mx.array:
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


def _normalised(pixels: mx.array, one: MediaInput) -> mx.array:
    """Patches of an input as float32: `[patches, channels * values]`."""
    by_channel = pixels.reshape(pixels.shape[0], len(one.mean), -1).astype(mx.float32) / 255
    mean, std = (mx.array(numbers, dtype=mx.float32)[:, None] for numbers in (one.mean, one.std))
    return ((by_channel - mean) / std).reshape(pixels.shape)


def _tower_weights(files: ModelFiles) -> dict[str, mx.array]:
    """The tower's weights under the names that its module gives them, not yet read."""
    weights: dict[str, mx.array] = {}
    for file in sorted(files.directory.glob("model*.safetensors")):
        try:
            stored: Any = mx.load(str(file))
        except RuntimeError as error:
            raise ModelError(f"{file} can't be loaded: {error}") from error
        for name, array in stored.items():
            prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), None)
            if prefix is not None:
                weights[name.removeprefix(prefix)] = array
    return weights


def _quantise(module: nn.Module, weights: Mapping[str, mx.array], config: Mapping[str, Any]) -> None:
    """Make those layers quantised whose weights are."""
    settings = config.get("quantization") or config.get("quantization_config") or {}
    if not any(name.endswith(".scales") for name in weights):
        return
    nn.quantize(
        module,
        group_size=settings.get("group_size", 64),
        bits=settings.get("bits", 4),
        mode=settings.get("mode", "affine"),
        class_predicate=lambda path, _: f"{path}.scales" in weights,
    )


def _flat(module: nn.Module) -> list[tuple[str, mx.array]]:
    flat: Any = tree_flatten(module.parameters())
    return list(flat)
