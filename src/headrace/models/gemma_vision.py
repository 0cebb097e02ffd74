"""Gemma's vision towers, whose patches are averaged in squares.

Gemma 3's is SigLIP (arXiv 2303.15343, 2503.19786). Gemma 4's takes pictures of many shapes, and rotates its patches by
row and column. Patches are ordered by the squares, which attention does not depend on; positions follow them.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from headrace.models.chunked import by_rows
from headrace.models.vision_tower import Embedded, Grid, PatchAttention, VisionTower
from headrace.models.weights import num_parameters

SQUARE_SIDE = 4
"""Patches on a side of one token, unless config.json sets it."""


class SoftTokens(nn.Module):
    """Patches to the text model's width: the average of each square, normed and projected.

    Its parts are named as in checkpoints.
    """

    def __init__(self, width: int, text_width: int, eps: float) -> None:
        super().__init__()
        self.mm_input_projection_weight = mx.zeros((width, text_width))
        self.mm_soft_emb_norm = nn.RMSNorm(width, eps=eps)

    def __call__(self, patches: mx.array, square: int) -> mx.array:
        """patches: `[patches, width]`, those of a square of so many next to each other."""
        averages = patches.reshape(-1, square, patches.shape[-1]).mean(axis=1)
        norm = self.mm_soft_emb_norm
        return mx.fast.rms_norm(averages, 1.0 + norm.weight, norm.eps) @ self.mm_input_projection_weight


class Gemma3Tower(VisionTower):
    """SigLIP, whose patches have learned positions, and a projection."""

    output = "out_proj"

    def __init__(self, module: Any, config: Mapping[str, Any], attend: PatchAttention) -> None:
        self._vision = module.vision_tower.vision_model
        self._patches = self._vision.embeddings.patch_embedding
        super().__init__(module, self._vision.encoder.layers, self._patches.weight.dtype, attend)
        self._side = square_side(config)
        # mlx-lm's model scales its input embeddings, by a root in bfloat16; pictures must not be scaled.
        text_width = module.multi_modal_projector.mm_input_projection_weight.shape[-1]
        self._root = mx.array(text_width**0.5, mx.bfloat16)

    @staticmethod
    def own_name(name: str) -> str | None:
        return _name_among(("vision_tower.", "multi_modal_projector."), name)

    @staticmethod
    def build(config: Mapping[str, Any]) -> Any:
        # Imported here: it takes a second, and models without a tower don't need it.
        vision = importlib.import_module("mlx_vlm.models.gemma3.vision")
        module_config = importlib.import_module("mlx_vlm.models.gemma3.config").VisionConfig
        described = module_config.from_dict({**config["vision_config"], "model_type": "siglip_vision_model"})
        tower = vision.VisionModel(described)
        # mlx-vlm leaves the last norm at its library's default.
        tower.vision_model.post_layernorm.eps = described.layer_norm_eps
        text_width = config["text_config"]["hidden_size"]
        soft_tokens = SoftTokens(described.hidden_size, text_width, described.layer_norm_eps)
        return _joined(vision_tower=tower, multi_modal_projector=soft_tokens)

    @staticmethod
    def sanitize(module: Any, weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
        return VisionTower.sanitize(module.vision_tower, weights)

    def heads(self, inner: Any, x: mx.array, positions: None) -> Sequence[mx.array]:
        projections = (inner.q_proj, inner.k_proj, inner.v_proj)
        return [self.rows(part, x).reshape(x.shape[0], inner.num_heads, -1) for part in projections]

    def embed(self, patches: mx.array, grid: Grid) -> Embedded:
        """patches: `[patches, channels * height * width]`."""
        order = mx.array(square_order(grid[1], grid[2], self._side))
        x = by_rows(self._embed_patches, patches, num_parameters(self._patches), self.attend.recorder)
        return Embedded(x + self._vision.embeddings.position_embedding(order), [{}] * len(self.blocks))

    def _embed_patches(self, patches: mx.array) -> mx.array:
        _, height, width, channels = self._patches.weight.shape
        embedded = self._patches(patches.reshape(-1, channels, height, width).transpose(0, 2, 3, 1))
        return cast(mx.array, embedded.reshape(patches.shape[0], -1))

    def merge(self, hidden: mx.array) -> mx.array:
        soft: mx.array = self.module.multi_modal_projector(self._vision.post_layernorm(hidden), self._side**2)
        return soft / self._root.astype(soft.dtype)


class Gemma4Tower(VisionTower):
    """Patches are rotated by row and column; squares are averaged by the length of their sum."""

    output = "o_proj"
    scale = 1.0

    def __init__(self, module: Any, config: Mapping[str, Any], attend: PatchAttention) -> None:
        self._vision = module.vision_tower
        self._embedder = self._vision.patch_embedder
        dtype = self._embedder.position_embedding_table.dtype
        super().__init__(module, self._vision.encoder.layers, dtype, attend)
        self._text_scale = config["text_config"]["hidden_size"] ** 0.5
        self._rotate = importlib.import_module(type(self._vision).__module__).apply_multidimensional_rope

    @staticmethod
    def own_name(name: str) -> str | None:
        return _name_among(("vision_tower.", "embed_vision."), name)

    @staticmethod
    def build(config: Mapping[str, Any]) -> Any:
        # Imported here: it takes a second, and models without a tower don't need it.
        modules = importlib.import_module("mlx_vlm.models.gemma4.gemma4")
        module_config = importlib.import_module("mlx_vlm.models.gemma4.config").VisionConfig
        described = module_config.from_dict(config["vision_config"])
        text_width = config["text_config"]["hidden_size"]
        embed = modules.MultimodalEmbedder(described.hidden_size, text_width, described.rms_norm_eps)
        return _joined(vision_tower=modules.VisionModel(described), embed_vision=embed)

    @staticmethod
    def sanitize(module: Any, weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
        return dict(weights)

    def heads(self, inner: Any, x: mx.array, positions: mx.array) -> Sequence[mx.array]:
        """positions: column and row of each patch, `[patches, 2]`."""
        queries, keys, values = (
            self.rows(part, x).reshape(x.shape[0], -1, inner.head_dim)
            for part in (inner.q_proj, inner.k_proj, inner.v_proj)
        )
        queries, keys = (
            self._rotate(part[None], positions[None], inner.rope_base_frequency)[0]
            for part in (inner.q_norm(queries), inner.k_norm(keys))
        )
        group = inner.num_heads // inner.num_kv_heads
        return queries, mx.repeat(keys, group, axis=1), mx.repeat(inner._v_norm(values), group, axis=1)

    def embed(self, patches: mx.array, grid: Grid) -> Embedded:
        """patches: `[patches, channels * height * width]`."""
        by_row = mx.array(square_order(grid[1], grid[2], self._vision.pooling_kernel_size))
        columns, rows = by_row % grid[2], by_row // grid[2]
        table: mx.array = self._embedder.position_embedding_table
        work = num_parameters(self._embedder.input_proj)
        x = by_rows(self._embed_patches, patches, work, self.attend.recorder) + (table[0][columns] + table[1][rows])
        return Embedded(x, [{"positions": mx.stack([columns, rows], axis=-1)}] * len(self.blocks))

    def _embed_patches(self, patches: mx.array) -> mx.array:
        """The layer expects a pixel's channels together."""
        side = self._vision.patch_size
        by_pixel = patches.reshape(patches.shape[0], -1, side, side).transpose(0, 2, 3, 1)
        embedded: mx.array = self._embedder.input_proj(by_pixel.reshape(patches.shape))
        return embedded

    def merge(self, hidden: mx.array) -> mx.array:
        square, width = self._vision.pooling_kernel_size**2, hidden.shape[-1]
        soft = hidden.astype(mx.float32).reshape(-1, square, width).mean(axis=1).astype(hidden.dtype)
        soft = soft * width**0.5
        if self._vision.config.standardize:
            soft = (soft - self._vision.std_bias) * self._vision.std_scale
        # mlx-lm's model scales its input embeddings; pictures must not be scaled.
        embedded: mx.array = self.module.embed_vision(soft) / self._text_scale
        return embedded


def _joined(**modules: nn.Module) -> nn.Module:
    whole = nn.Module()
    for name, module in modules.items():
        setattr(whole, name, module)
    return whole


def _name_among(parts: tuple[str, ...], name: str) -> str | None:
    """A weight's name, if it belongs to one of these parts, whatever wraps the model."""
    bare = name.removeprefix("model.")
    return bare if bare.startswith(parts) else None


def square_order(rows: int, columns: int, side: int) -> npt.NDArray[np.int32]:
    """The index of each patch by rows, in the order of squares of side * side."""
    by_row = np.arange(rows * columns, dtype=np.int32)
    return by_row.reshape(rows // side, side, columns // side, side).transpose(0, 2, 1, 3).reshape(-1)


def square_side(config: Mapping[str, Any]) -> int:
    vision = config["vision_config"]
    num_tokens = config.get("mm_tokens_per_image")
    if num_tokens is None:
        return SQUARE_SIDE
    return int(vision["image_size"] // vision["patch_size"] // num_tokens**0.5)
