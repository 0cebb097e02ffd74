"""A checkpoint's vision tower: pixels of pictures to embeddings in the place of their placeholder tokens.

The tower is mlx-vlm's module with the checkpoint's weights. Its attention is replaced: patches attend within one frame
or window, and what mlx-vlm computes for each of these one after the other, and on a CPU with all scores at once, is
done in batches of bounded size here.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from headrace.backend.device import Device
from headrace.errors import ModelError
from headrace.models.source import ModelFiles
from headrace.models.weights import LISTED_NAMES, hold
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


class VisionTower:
    """Computes embeddings; keeps nothing of what it has seen."""

    def __init__(self, module: Any, merge_size: int) -> None:
        self.module = module
        self._merge_size = merge_size

    @property
    def num_bytes(self) -> int:
        """Of its weights."""
        return sum(array.nbytes for _, array in _flat(self.module))

    def embed(self, inputs: Sequence[MediaInput]) -> list[MediaEmbeddings]:
        """Embeddings of inputs, not evaluated; at least one. Inputs don't see each other."""
        patches = mx.concatenate([_normalised(each) for each in inputs])
        grids = mx.array([each.grid for each in inputs], dtype=mx.int32)
        computed = self.module(patches.astype(self._dtype), grids)
        # Towers without deepstack give their embeddings alone, or with an empty list.
        rows, deep = computed if isinstance(computed, tuple) else (computed, [])
        ends = np.cumsum([_num_rows(each.grid, self._merge_size) for each in inputs]).tolist()
        return [
            MediaEmbeddings(rows[start:end], tuple(layer[start:end] for layer in deep))
            for start, end in pairwise([0, *ends])
        ]

    @property
    def _dtype(self) -> mx.Dtype:
        dtype: mx.Dtype = self.module.patch_embed.proj.weight.dtype
        return dtype


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
    for block in module.blocks:
        block.attn = SegmentAttention(block.attn, vision.apply_rotary_pos_emb_vision, device.kind != "cpu")
    tower = VisionTower(module, module.spatial_merge_size)
    return tower, f"vision tower: {len(module.blocks)} layers, {tower.num_bytes / 1e6:.0f} MB, {precision}"


class SegmentAttention(nn.Module):
    """A tower's attention, of each patch to all patches of its segment: a frame, or a window of one.

    inner: mlx-vlm's module. rotate: its rotary embedding. has_fused: whether the device has fused attention.
    """

    def __init__(self, inner: Any, rotate: Any, has_fused: bool) -> None:
        super().__init__()
        self.inner = inner
        self._rotate = rotate
        self._has_fused = has_fused

    def __call__(self, x: mx.array, cu_seqlens: mx.array, rotary_pos_emb: mx.array) -> mx.array:
        """x: `[patches, width]`. cu_seqlens: where segments end, a zero before them."""
        num_patches, inner = x.shape[0], self.inner
        qkv = inner.qkv(x).reshape(num_patches, 3, inner.num_heads, -1)
        queries, keys = (self._rotate(qkv[None, :, index], rotary_pos_emb)[0] for index in (0, 1))
        values, outputs, start = qkv[:, 2], [], 0
        ends: Any = cu_seqlens.tolist()
        for length, run in groupby(end - begin for begin, end in pairwise(ends)):
            end = start + length * len(list(run))
            if end > start:
                parts = (_segments(part[start:end], length) for part in (queries, keys, values))
                outputs.append(self._attend(*parts).transpose(0, 2, 1, 3).reshape(end - start, -1))
            start = end
        projected: mx.array = inner.proj(mx.concatenate(outputs))
        return projected

    def _attend(self, queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
        """All `[segments, heads, length, head_dim]`."""
        if self._has_fused:
            return _fused(queries, keys, values, self.inner.scale)
        num_segments, num_heads, length, _ = queries.shape
        block = max(1, min(length, SCORE_ELEMENTS // (num_heads * length)))
        at_once = max(1, SCORE_ELEMENTS // (num_heads * length * block))
        outputs = []
        for first in range(0, num_segments, at_once):
            some = slice(first, first + at_once)
            rows = [
                _scored(queries[some, :, lo : lo + block], keys[some], values[some], self.inner.scale)
                for lo in range(0, length, block)
            ]
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


def _normalised(each: MediaInput) -> mx.array:
    """Patches as float32: `[patches, channels * values]`."""
    pixels = mx.array(np.asarray(each.pixels))
    by_channel = pixels.reshape(pixels.shape[0], len(each.mean), -1).astype(mx.float32) / 255
    mean, std = (mx.array(numbers, dtype=mx.float32)[:, None] for numbers in (each.mean, each.std))
    return ((by_channel - mean) / std).reshape(pixels.shape)


def _num_rows(grid: tuple[int, int, int], merge_size: int) -> int:
    return grid[0] * grid[1] * grid[2] // merge_size**2


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
