"""Qwen's vision towers: mlx-vlm's modules, with attention within one frame or window in bounded slices."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, cast

import mlx.core as mx

from headrace.models.chunked import ChunkedRows, Stages
from headrace.models.tower_kind import TowerKind
from headrace.models.vision_attention import PatchAttention, SegmentAttention
from headrace.models.weights import num_parameters

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


def _own_name(name: str) -> str | None:
    """The tower module's name for a weight of the checkpoint; None if it is not the tower's."""
    prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), None)
    return None if prefix is None else name.removeprefix(prefix)


def _build(config: Mapping[str, Any]) -> Any:
    """The module described by a checkpoint's config.json, with arbitrary weights."""
    name = MODULES[config["model_type"]]
    # Imported here: it takes a second, and models without a tower don't need it.
    vision = importlib.import_module(f"mlx_vlm.models.{name}.vision")
    module_config = importlib.import_module(f"mlx_vlm.models.{name}.config").VisionConfig
    return vision.VisionModel(module_config.from_dict({**config["vision_config"], "model_type": name}))


class QwenForward:
    """mlx-vlm's computation for one input, in stages of one layer."""

    def __init__(self, module: Any, attend: PatchAttention) -> None:
        """Changes the module's parts, so that they compute in slices."""
        rotate = importlib.import_module(type(module).__module__).apply_rotary_pos_emb_vision
        self._module = module
        self._merged = module.spatial_merge_size**2
        # List attributes of a Module are its items.
        self._deep_layers: list[int] = module.get("deepstack_visual_indexes", [])
        self._full_layers: list[int] | None = module.get("fullatt_block_indexes")

        def in_rows(inner: Any, rows_of_one: int = 1) -> ChunkedRows:
            return ChunkedRows(inner, num_parameters(inner) // rows_of_one, attend.recorder)

        module.patch_embed = in_rows(module.patch_embed)
        for block in module.blocks:
            block.attn = SegmentAttention(block.attn, rotate, attend)
            block.mlp = in_rows(block.mlp)
        module.merger = in_rows(module.merger, self._merged)
        if self._deep_layers:
            module.deepstack_merger_list = [in_rows(each, self._merged) for each in module.deepstack_merger_list]

    def __call__(self, patches: mx.array, grid: tuple[int, int, int]) -> Stages[tuple[mx.array, list[mx.array]]]:
        """See Forward."""
        module, grids = self._module, mx.array([grid], dtype=mx.int32)
        hidden = module.patch_embed(patches)
        yield
        if "pos_embed" in module:
            hidden = hidden + module.fast_pos_embed_interpolate(grids)
        rotary = module.rot_pos_emb(grids).reshape(patches.shape[0], -1)
        frames = [frame * grid[1] * grid[2] for frame in range(grid[0] + 1)]
        windows, order = frames, None
        if self._full_layers is not None:  # the others attend in windows, whose patches are made contiguous
            order, ends = module.get_window_index(grids)
            windows = ends.tolist()
            hidden, rotary = self._ordered(hidden, order), self._ordered(rotary, order)
        deep: list[mx.array] = []
        for index, block in enumerate(module.blocks):
            yield
            is_full = self._full_layers is None or index in self._full_layers
            hidden = block(hidden, cu_seqlens=frames if is_full else windows, rotary_pos_emb=rotary)
            if index in self._deep_layers:
                deep.append(module.deepstack_merger_list[self._deep_layers.index(index)](hidden))
        yield
        rows = module.merger(hidden)
        return (rows if order is None else rows[mx.argsort(order)]), deep

    def _ordered(self, rows: mx.array, order: mx.array) -> mx.array:
        """Rows in another order of the blocks that make one token each."""
        return rows.reshape(-1, self._merged, rows.shape[-1])[order].reshape(rows.shape)


QWEN = TowerKind(
    own_name=_own_name,
    build=_build,
    forward=QwenForward,
    dtype=lambda module: cast(mx.Dtype, module.patch_embed.proj.weight.dtype),
    num_layers=lambda module: len(module.blocks),
    needs_axes=True,
)
