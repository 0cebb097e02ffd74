"""Loads a checkpoint's vision tower, which turns pixels into embeddings that replace their placeholder tokens."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.backend.device import Device
from headrace.errors import ModelError
from headrace.models.chunked import CHUNK_WORK, ChunkRecorder
from headrace.models.gemma_vision import Gemma3Tower, Gemma4Tower
from headrace.models.qwen_vision import MODULES, QwenTower
from headrace.models.source import ModelFiles
from headrace.models.vision_tower import PatchAttention, VisionTower
from headrace.models.weights import listed, parameters_of, quantise_as_stored, read_tensors, set_precision, shards

_KINDS: Mapping[str, type[QwenTower | Gemma3Tower | Gemma4Tower]] = {
    **dict.fromkeys(MODULES, QwenTower),
    "gemma3": Gemma3Tower,
    "gemma4": Gemma4Tower,
}
"""The towers by `model_type`."""


def knows_tower(files: ModelFiles) -> bool:
    return files.config["model_type"] in _KINDS


def load_tower(files: ModelFiles, *, dtype: str, device: Device, has_axes: bool) -> tuple[VisionTower, str] | None:
    """The tower of a checkpoint, and a line about it; None if it has none, or one of a kind that is not known here.

    dtype: as in `ModelConfig.dtype`. has_axes: whether the text model gives positions in time, row and column; a tower
    of a kind that needs them is not loaded without. Raises ModelError if weights are missing.
    """
    kind = _KINDS.get(files.config["model_type"])
    if kind is None or not files.config.get("vision_config") or (kind.needs_axes and not has_axes):
        return None
    stored = [pair for file in shards(files.directory) for pair in read_tensors(file)[0].items()]
    weights = {own: array for name, array in stored if (own := kind.own_name(name)) is not None}
    if not weights:
        return None
    module = kind.build(files.config)
    weights = kind.sanitize(module, weights)
    try:
        quantise_as_stored(module, weights)
    except ValueError as error:
        raise ModelError(f"the vision tower of {files.directory} doesn't fit: {error}") from error
    missing = parameters_of(module).keys() - weights.keys()
    if missing:
        raise ModelError(f"{files.directory} lacks weights of its vision tower: {listed(missing)}")
    module.load_weights(list(weights.items()), strict=False)
    module.eval()
    precision = set_precision(module, dtype, device.kind, device.memory_bytes)
    attend = PatchAttention(ChunkRecorder(CHUNK_WORK[device.kind]), has_fused=device.kind != "cpu")
    num_bytes = sum(array.nbytes for array in parameters_of(module).values())
    tower = kind(module, files.config, attend)
    return tower, f"vision tower: {len(tower.blocks)} layers, {num_bytes / 1e6:.0f} MB, {precision}"
