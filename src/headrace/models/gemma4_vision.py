"""Gemma 4's vision tower: pictures of many shapes, patches with rotary positions by row and column, averaged in
squares.

Patches are ordered by those squares; their positions follow them.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from headrace.models.chunked import ChunkedRows, Stages, by_rows
from headrace.models.siglip import name_among, square_order
from headrace.models.tower_kind import TowerKind
from headrace.models.vision_attention import PatchAttention, to_segments
from headrace.models.weights import num_parameters

_PARTS = ("vision_tower.", "embed_vision.")


class Gemma4Weights(nn.Module):
    """The tower's weights, named as in checkpoints.

    vision, embed: mlx-vlm's modules. text_scale: the text model's factor on all embeddings.
    """

    def __init__(self, vision: Any, embed: nn.Module, text_scale: float) -> None:
        super().__init__()
        self.vision_tower = vision
        self.embed_vision = embed
        self.text_scale = text_scale

    def sanitize(self, weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Weights in the modules' shapes."""
        return dict(weights)


class RopeAttention(nn.Module):
    """Attention of each patch to all of its picture, with rotary positions by row and column.

    inner: mlx-vlm's module. rotate: its rotary embedding.
    """

    def __init__(self, inner: Any, rotate: Any, attend: PatchAttention) -> None:
        super().__init__()
        self.inner = inner
        self._rotate = rotate
        self._attend = attend

    def __call__(self, x: mx.array, positions: mx.array, mask: None = None) -> mx.array:
        """x: `[patches, width]`. positions: column and row of each, `[patches, 2]`."""
        inner = self.inner
        queries = self._rotated(inner.q_norm(self._heads(inner.q_proj, x)), positions)
        keys = self._rotated(inner.k_norm(self._heads(inner.k_proj, x)), positions)
        values = inner._v_norm(self._heads(inner.v_proj, x))
        queries, keys, values = (to_segments(part, x.shape[0]) for part in (queries, keys, values))
        group = inner.num_heads // inner.num_kv_heads
        attended = self._attend(queries, mx.repeat(keys, group, axis=1), mx.repeat(values, group, axis=1), 1.0)
        return self._rows(inner.o_proj, attended[0].transpose(1, 0, 2).reshape(x.shape[0], -1))

    def _heads(self, projection: Any, x: mx.array) -> mx.array:
        return self._rows(projection, x).reshape(x.shape[0], -1, self.inner.head_dim)

    def _rows(self, projection: Any, x: mx.array) -> mx.array:
        return by_rows(projection, x, num_parameters(projection), self._attend.recorder)

    def _rotated(self, part: mx.array, positions: mx.array) -> mx.array:
        rotated: mx.array = self._rotate(part[None], positions[None], self.inner.rope_base_frequency)
        return rotated[0]


class Gemma4Forward:
    """Patches of one picture to embeddings, in slices."""

    def __init__(self, weights: Gemma4Weights, attend: PatchAttention) -> None:
        self._recorder = attend.recorder
        self._text_scale = weights.text_scale
        self._tower, self._embed = weights.vision_tower, weights.embed_vision
        self._embed_work = num_parameters(self._tower.patch_embedder.input_proj)
        rotate = importlib.import_module(type(self._tower).__module__).apply_multidimensional_rope
        for layer in self._tower.encoder.layers:
            layer.self_attn = RopeAttention(layer.self_attn, rotate, attend)
            layer.mlp = ChunkedRows(layer.mlp, num_parameters(layer.mlp), attend.recorder)

    def __call__(self, patches: mx.array, grid: tuple[int, int, int]) -> Stages[tuple[mx.array, list[mx.array]]]:
        """See Forward. patches: `[patches, channels * height * width]`."""
        side: int = self._tower.pooling_kernel_size
        by_row = mx.array(square_order(grid[1], grid[2], side))
        columns, rows = by_row % grid[2], by_row // grid[2]
        table: mx.array = self._tower.patch_embedder.position_embedding_table
        x = by_rows(self._embed_patches, patches, self._embed_work, self._recorder) + (
            table[0][columns] + table[1][rows]
        )
        positions = mx.stack([columns, rows], axis=-1)
        for layer in self._tower.encoder.layers:
            yield
            x = layer(x, positions)
        soft = x.astype(mx.float32).reshape(-1, side**2, x.shape[-1]).mean(axis=1).astype(x.dtype)
        soft = soft * x.shape[-1] ** 0.5
        if self._tower.config.standardize:
            soft = (soft - self._tower.std_bias) * self._tower.std_scale
        # mlx-lm's model scales its input embeddings; pictures must not be scaled.
        embedded: mx.array = self._embed(soft) / self._text_scale
        return embedded, []

    def _embed_patches(self, patches: mx.array) -> mx.array:
        """The layer expects a pixel's channels together."""
        side = self._tower.patch_size
        by_pixel = patches.reshape(patches.shape[0], -1, side, side).transpose(0, 2, 3, 1)
        embedded: mx.array = self._tower.patch_embedder.input_proj(by_pixel.reshape(patches.shape))
        return embedded


def _build(config: Mapping[str, Any]) -> Gemma4Weights:
    # Imported here: it takes a second, and models without a tower don't need it.
    modules = importlib.import_module("mlx_vlm.models.gemma4.gemma4")
    described = importlib.import_module("mlx_vlm.models.gemma4.config").VisionConfig.from_dict(config["vision_config"])
    text_width = config["text_config"]["hidden_size"]
    embed = modules.MultimodalEmbedder(described.hidden_size, text_width, described.rms_norm_eps)
    return Gemma4Weights(modules.VisionModel(described), embed, text_width**0.5)


GEMMA4 = TowerKind(
    own_name=partial(name_among, _PARTS),
    build=_build,
    forward=Gemma4Forward,
    dtype=lambda module: cast(mx.Dtype, module.vision_tower.patch_embedder.position_embedding_table.dtype),
    num_layers=lambda module: len(module.vision_tower.encoder.layers),
    needs_axes=False,
)
