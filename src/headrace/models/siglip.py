"""Gemma 3's vision tower: SigLIP (arXiv 2303.15343), whose patches are averaged in squares (arXiv 2503.19786).

Patches are ordered by those squares, which attention does not depend on; positions follow them.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from headrace.models.chunked import ChunkedRows, Stages, by_rows
from headrace.models.tower_kind import TowerKind
from headrace.models.vision_attention import PatchAttention, PictureAttention
from headrace.models.weights import num_parameters

SQUARE_SIDE = 4
"""Patches on a side of one token, unless config.json sets it."""

_PARTS = ("vision_tower.", "multi_modal_projector.")


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


class GemmaWeights(nn.Module):
    """The tower's weights, named as in checkpoints. vision: mlx-vlm's module. side: patches on a square's side."""

    def __init__(self, vision: Any, soft_tokens: SoftTokens, side: int) -> None:
        super().__init__()
        self.vision_tower = vision
        self.multi_modal_projector = soft_tokens
        self.side = side

    def sanitize(self, weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Weights in the shapes that the modules have."""
        shaped: dict[str, mx.array] = self.vision_tower.sanitize(weights)
        return shaped


class GemmaForward:
    """Patches of one picture to embeddings, in slices."""

    def __init__(self, weights: GemmaWeights, attend: PatchAttention) -> None:
        self._recorder = attend.recorder
        self._side = weights.side
        self._soft_tokens = weights.multi_modal_projector
        self._tower = weights.vision_tower.vision_model
        self._embed_work = num_parameters(self._tower.embeddings.patch_embedding)
        for layer in self._tower.encoder.layers:
            layer.self_attn = PictureAttention(layer.self_attn, attend)
            layer.mlp = ChunkedRows(layer.mlp, num_parameters(layer.mlp), attend.recorder)
        # mlx-lm's model scales its input embeddings, by a root in bfloat16; pictures must not be scaled.
        text_width = self._soft_tokens.mm_input_projection_weight.shape[-1]
        self._root = mx.array(text_width**0.5, mx.bfloat16)

    def __call__(self, patches: mx.array, grid: tuple[int, int, int]) -> Stages[tuple[mx.array, list[mx.array]]]:
        """See Forward. patches: `[patches, channels * height * width]`."""
        order = mx.array(square_order(grid[1], grid[2], self._side))
        x = by_rows(self._embed, patches, self._embed_work, self._recorder)
        x = x + self._tower.embeddings.position_embedding(order)
        for layer in self._tower.encoder.layers:
            yield
            x = layer(x)
        soft: mx.array = self._soft_tokens(self._tower.post_layernorm(x), self._side**2)
        return soft / self._root.astype(soft.dtype), []

    def _embed(self, patches: mx.array) -> mx.array:
        layer = self._tower.embeddings.patch_embedding
        _, height, width, channels = layer.weight.shape
        embedded = layer(patches.reshape(-1, channels, height, width).transpose(0, 2, 3, 1))
        return cast(mx.array, embedded.reshape(patches.shape[0], -1))


def square_order(rows: int, columns: int, side: int) -> npt.NDArray[np.int32]:
    """The index of each patch by rows, in the order of squares of side * side."""
    by_row = np.arange(rows * columns, dtype=np.int32)
    return by_row.reshape(rows // side, side, columns // side, side).transpose(0, 2, 1, 3).reshape(-1)


def name_among(parts: tuple[str, ...], name: str) -> str | None:
    """A weight's name, if it belongs to one of these parts, whatever wraps the model."""
    bare = name.removeprefix("model.")
    return bare if bare.startswith(parts) else None


def _build(config: Mapping[str, Any]) -> GemmaWeights:
    # Imported here: it takes a second, and models without a tower don't need it.
    vision = importlib.import_module("mlx_vlm.models.gemma3.vision")
    module_config = importlib.import_module("mlx_vlm.models.gemma3.config").VisionConfig
    described = module_config.from_dict({**config["vision_config"], "model_type": "siglip_vision_model"})
    module = vision.VisionModel(described)
    # mlx-vlm leaves the last norm at its library's default.
    module.vision_model.post_layernorm.eps = described.layer_norm_eps
    text_width = config["text_config"]["hidden_size"]
    soft_tokens = SoftTokens(described.hidden_size, text_width, described.layer_norm_eps)
    return GemmaWeights(module, soft_tokens, square_side(config))


def square_side(config: Mapping[str, Any]) -> int:
    """Patches on a side of a square, of a checkpoint's config.json."""
    vision = config["vision_config"]
    num_tokens = config.get("mm_tokens_per_image")
    if num_tokens is None:
        return SQUARE_SIDE
    return int(vision["image_size"] // vision["patch_size"] // num_tokens**0.5)


GEMMA3 = TowerKind(
    own_name=partial(name_among, _PARTS),
    build=_build,
    forward=GemmaForward,
    dtype=lambda module: cast(mx.Dtype, module.vision_tower.vision_model.embeddings.patch_embedding.weight.dtype),
    num_layers=lambda module: len(module.vision_tower.vision_model.encoder.layers),
    needs_axes=False,
)
