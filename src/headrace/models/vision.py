"""A checkpoint's vision tower: pixels of pictures to embeddings that replace their placeholder tokens.

The tower is mlx-vlm's module with the checkpoint's weights. Its attention is replaced: patches attend within one frame
or window, and what mlx-vlm computes for each of these one after the other, and on a CPU with all scores at once, is
done in batches of bounded size here. So is all else, in chunks that are computed one after the other: a large picture
takes many times as long as a step, and running streams would wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from headrace.backend.device import Device
from headrace.errors import ModelError
from headrace.models.chunked import CHUNK_WORK, ChunkedEncoding, ChunkRecorder, Stages, by_rows
from headrace.models.gemma4_vision import GEMMA4
from headrace.models.qwen_vision import MODULES, QWEN
from headrace.models.siglip import GEMMA3
from headrace.models.source import ModelFiles
from headrace.models.tower_kind import TowerKind
from headrace.models.vision_attention import PatchAttention
from headrace.models.weights import LISTED_NAMES, hold, parameters_of
from headrace.types.media import MediaInput

_KINDS: Mapping[str, TowerKind] = {**dict.fromkeys(MODULES, QWEN), "gemma3": GEMMA3, "gemma4": GEMMA4}
"""The towers by `model_type`."""


@dataclass(frozen=True, slots=True, eq=False)
class MediaEmbeddings:
    """The embeddings of one input's placeholders.

    rows: `[placeholders, hidden]`, instead of token embeddings.
    deep: `[placeholders, hidden]` each: added to the output of the text model's first, second, … layer there.
    """

    rows: mx.array
    deep: tuple[mx.array, ...] = ()


class VisionTower:
    """Computes embeddings with a supported tower; keeps no state."""

    def __init__(self, module: Any, kind: TowerKind, attend: PatchAttention) -> None:
        """module: of the kind, with its weights."""
        self.module = module
        self.num_bytes = sum(array.nbytes for array in parameters_of(module).values())
        """Of its weights."""
        self._dtype = kind.dtype(module)
        self._forward = kind.forward(module, attend)
        self._recorder = attend.recorder

    def begin(self, one: MediaInput) -> ChunkedEncoding[MediaEmbeddings]:
        """Starts the embeddings of an input."""
        return ChunkedEncoding(self._stages(one), self._recorder)

    def _stages(self, one: MediaInput) -> Stages[MediaEmbeddings]:
        patches = self._patches(one)
        yield
        rows, deep = yield from self._forward(patches, one.grid)
        for array in (rows, *deep):
            self._recorder.record(array, 0)
        return MediaEmbeddings(rows, tuple(deep))

    def _patches(self, one: MediaInput) -> mx.array:
        """`[patches, channels * values]`, normalised."""
        pixels = mx.array(np.asarray(one.pixels))
        return by_rows(lambda some: _normalised(some, one).astype(self._dtype), pixels, pixels.shape[1], self._recorder)


def knows_tower(files: ModelFiles) -> bool:
    """Whether the checkpoint's tower is supported."""
    return files.config["model_type"] in _KINDS


def load_tower(files: ModelFiles, *, dtype: str, device: Device, has_axes: bool) -> tuple[VisionTower, str] | None:
    """The tower of a checkpoint, and a line about it; None if it has none, or one of a kind that is not known here.

    dtype: as in `ModelConfig.dtype`. has_axes: whether the text model gives positions in time, row and column; a tower
    of a kind that needs them is not loaded without. Raises ModelError if weights are missing.
    """
    kind = _KINDS.get(files.config["model_type"])
    if kind is None or not files.config.get("vision_config") or (kind.needs_axes and not has_axes):
        return None
    weights = _tower_weights(files, kind)
    if not weights:
        return None
    module = kind.build(files.config)
    weights = module.sanitize(weights)
    _quantise(module, weights, files.config)
    missing = parameters_of(module).keys() - weights.keys()
    if missing:
        raise ModelError(f"{files.directory} lacks weights of its vision tower: {sorted(missing)[:LISTED_NAMES]}")
    module.load_weights(list(weights.items()), strict=False)
    module.eval()
    precision = hold(module, dtype, device.kind, device.memory_bytes)
    attend = PatchAttention(ChunkRecorder(CHUNK_WORK[device.kind]), has_fused=device.kind != "cpu")
    tower = VisionTower(module, kind, attend)
    return tower, f"vision tower: {kind.num_layers(module)} layers, {tower.num_bytes / 1e6:.0f} MB, {precision}"


def _normalised(pixels: mx.array, one: MediaInput) -> mx.array:
    """Patches of an input as float32: `[patches, channels * values]`."""
    by_channel = pixels.reshape(pixels.shape[0], len(one.mean), -1).astype(mx.float32) / 255
    mean, std = (mx.array(numbers, dtype=mx.float32)[:, None] for numbers in (one.mean, one.std))
    return ((by_channel - mean) / std).reshape(pixels.shape)


def _tower_weights(files: ModelFiles, kind: TowerKind) -> dict[str, mx.array]:
    """The tower's weights under the names that its module gives them, not yet read."""
    weights: dict[str, mx.array] = {}
    for file in sorted(files.directory.glob("model*.safetensors")):
        try:
            stored: Any = mx.load(str(file))
        except RuntimeError as error:
            raise ModelError(f"{file} can't be loaded: {error}") from error
        for name, array in stored.items():
            own_name = kind.own_name(name)
            if own_name is not None:
                weights[own_name] = array
    return weights


def _quantise(module: nn.Module, weights: Mapping[str, mx.array], config: Mapping[str, Any]) -> None:
    """Quantise those layers whose weights are."""
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
