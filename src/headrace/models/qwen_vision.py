"""Qwen's vision towers: mlx-vlm's modules, with attention within one frame or window."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from headrace.models.vision_tower import Embedded, Grid, PatchAttention, VisionTower

MODULES: Mapping[str, str] = {
    "qwen2_vl": "qwen2_vl",
    "qwen2_5_vl": "qwen2_5_vl",
    "qwen3_vl": "qwen3_vl",
    "qwen3_vl_moe": "qwen3_vl",
    "qwen3_5": "qwen3_vl",
    "qwen3_5_moe": "qwen3_vl",
}
"""Which of mlx-vlm's towers a `model_type` has; one serves several."""

_PREFIXES = ("model.visual.", "visual.", "vision_tower.", "model.vision_tower.")
"""How checkpoints call the tower's weights: as published, and as converted."""


class QwenTower(VisionTower):
    """Qwen2-VL to Qwen3.5."""

    needs_axes = True
    output = "proj"

    def __init__(self, module: Any, config: Mapping[str, Any], attend: PatchAttention) -> None:
        super().__init__(module, module.blocks, module.patch_embed.proj.weight.dtype, attend)
        self._rotate = importlib.import_module(type(module).__module__).apply_rotary_pos_emb_vision
        self._merged = module.spatial_merge_size**2
        # List attributes of a Module are its items.
        self._deep_layers: list[int] = module.get("deepstack_visual_indexes", [])
        self._full_layers: list[int] | None = module.get("fullatt_block_indexes")
        module.patch_embed = self.in_chunks(module.patch_embed)
        module.merger = self.in_chunks(module.merger, self._merged)
        if self._deep_layers:
            module.deepstack_merger_list = [self.in_chunks(m, self._merged) for m in module.deepstack_merger_list]

    @staticmethod
    def own_name(name: str) -> str | None:
        prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), None)
        return None if prefix is None else name.removeprefix(prefix)

    @staticmethod
    def build(config: Mapping[str, Any]) -> Any:
        name = MODULES[config["model_type"]]
        # Imported here: it takes a second, and models without a tower don't need it.
        vision = importlib.import_module(f"mlx_vlm.models.{name}.vision")
        module_config = importlib.import_module(f"mlx_vlm.models.{name}.config").VisionConfig
        return vision.VisionModel(module_config.from_dict({**config["vision_config"], "model_type": name}))

    def heads(self, inner: Any, x: mx.array, rotary: mx.array) -> Sequence[mx.array]:
        qkv = self.rows(inner.qkv, x).reshape(x.shape[0], 3, inner.num_heads, -1)
        queries, keys = (self._rotate(qkv[None, :, index], rotary)[0] for index in (0, 1))
        return queries, keys, qkv[:, 2]

    def embed(self, patches: mx.array, grid: Grid) -> Embedded:
        module, grids = self.module, mx.array([grid], dtype=mx.int32)
        hidden = module.patch_embed(patches)
        if "pos_embed" in module:
            hidden = hidden + module.fast_pos_embed_interpolate(grids)
        rotary = module.rot_pos_emb(grids).reshape(patches.shape[0], -1)
        frames = [frame * grid[1] * grid[2] for frame in range(grid[0] + 1)]
        full = {"cu_seqlens": frames, "rotary_pos_emb": rotary}
        if self._full_layers is None:
            return Embedded(hidden, [full] * len(module.blocks))
        # the other layers attend in windows, whose patches are made contiguous
        order, ends = module.get_window_index(grids)
        hidden, rotary = self._ordered(hidden, order), self._ordered(rotary, order)
        full = {"cu_seqlens": frames, "rotary_pos_emb": rotary}
        windowed = {"cu_seqlens": ends.tolist(), "rotary_pos_emb": rotary}
        arguments = [full if index in self._full_layers else windowed for index in range(len(module.blocks))]
        return Embedded(hidden, arguments, order)

    def _ordered(self, rows: mx.array, order: mx.array) -> mx.array:
        return rows.reshape(-1, self._merged, rows.shape[-1])[order].reshape(rows.shape)

    def deep(self, index: int, hidden: mx.array) -> Sequence[mx.array]:
        if index not in self._deep_layers:
            return ()
        return [self.module.deepstack_merger_list[self._deep_layers.index(index)](hidden)]

    def merge(self, hidden: mx.array) -> mx.array:
        rows: mx.array = self.module.merger(hidden)
        return rows
