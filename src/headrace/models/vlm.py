"""Vision-language models that run whole: mlx-vlm's own model, a row at a time.

For families whose tower is not among those of `models/vision.py`. A picture is embedded separately, together with the
tokens that its processor writes around it; the self-check compares that with the model's result for a whole prompt.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import KVCache, RotatingKVCache

from headrace.errors import ModelError
from headrace.isolation import errors_as
from headrace.models.chunked import ChunkedEncoding, ChunkRecorder, Stages
from headrace.models.source import ModelFiles
from headrace.models.vision import knows_tower
from headrace.models.vision_tower import MediaEmbeddings, VisionTower
from headrace.models.weights import Loaded, has_text_model
from headrace.types.media import MediaInput


class VlmWrapper(nn.Module):
    """mlx-vlm's model with mlx-lm's interface: ids or embeddings in, logits out, mlx-lm's caches."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def __call__(self, inputs: mx.array, cache: list[Any] | None = None) -> mx.array:
        """inputs: ids `[1, n]` or embeddings `[1, n, hidden]`. Gives logits `[1, n, vocab_size]`."""
        rows = self.embed(inputs) if inputs.ndim == 2 else inputs
        no_ids = mx.zeros(rows.shape[:2], mx.int32)
        return cast(mx.array, self.inner.language_model(no_ids, inputs_embeds=rows, cache=cache).logits)

    def embed(self, ids: mx.array) -> mx.array:
        """Token ids `[1, n]` to embeddings `[1, n, hidden]`."""
        return cast(mx.array, self.inner.get_input_embeddings(ids).inputs_embeds)

    def embed_picture(self, token_ids: mx.array, fields: Mapping[str, mx.array]) -> Any:
        """The model's embeddings of tokens `[1, n]` and of a picture's processor outputs."""
        pixels = {name: array for name, array in fields.items() if name != "pixel_values"}
        mask = mx.ones(token_ids.shape, mx.int32)
        return self.inner.get_input_embeddings(token_ids, fields["pixel_values"], mask=mask, **pixels)

    @property
    def layers(self) -> list[nn.Module]:
        return cast(list[nn.Module], self.inner.language_model.layers)

    def make_cache(self) -> list[Any]:
        """mlx-lm's caches of the model's kinds. Raises ModelError if a kind is unknown."""
        made = importlib.import_module("mlx_vlm.models.cache").make_prompt_cache(self.inner.language_model)
        return [_own_cache(one) for one in made]


def _own_cache(made: Any) -> Any:
    kind = type(made).__name__
    if kind in ("KVCache", "SimpleKVCache"):
        return KVCache()
    if kind == "RotatingKVCache":
        return RotatingKVCache(max_size=made.max_size, keep=made.keep)
    raise ModelError(f"the model has a cache of the unknown class {kind}")


class WholeTower:
    """Encodes pictures with the model's own method, each at once."""

    module = nn.Module()
    """It has no weights."""

    def __init__(self, model: VlmWrapper) -> None:
        self._model = model
        self._recorder = ChunkRecorder(1)

    def begin(self, one: MediaInput) -> ChunkedEncoding[MediaEmbeddings]:
        return ChunkedEncoding(self._stages(one), self._recorder)

    def _stages(self, one: MediaInput) -> Stages[MediaEmbeddings]:
        yield
        fields = {name: mx.array(np.asarray(value)) for name, value in one.fields.items()}
        rows = self._model.embed_picture(fields.pop("input_ids"), fields).inputs_embeds[0]
        return MediaEmbeddings(self._recorder.record(rows, 1))


Tower = VisionTower | WholeTower
"""Computes embeddings of images and videos."""


def runs_whole(files: ModelFiles) -> bool:
    if not files.config.get("vision_config") or knows_tower(files):
        return False
    try:
        name = importlib.import_module("mlx_vlm.utils").get_model_type(files.config)
        package = importlib.import_module(f"mlx_vlm.models.{name}")
    except ImportError:
        return False
    return all(hasattr(package, name) for name in ("Model", "LanguageModel", "VisionModel"))


def load_vlm(files: ModelFiles) -> Loaded:
    """mlx-vlm's model of a checkpoint, its weights not yet evaluated. Raises ModelError if it can't be loaded."""
    if files.config.get("model_file"):
        raise ModelError(f"{files.name} brings its own code, which is not run")
    with errors_as(lambda error: ModelError(f"mlx-vlm can't load {files.name}: {error}"), may_exit=True):
        return Loaded(VlmWrapper(importlib.import_module("mlx_vlm.utils").load_model(files.directory, lazy=True)), 0)


def whole_tower(model: VlmWrapper, files: ModelFiles) -> tuple[WholeTower, str]:
    line = "vision: mlx-vlm's own model, whole, a row at a time; a picture is embedded in one go"
    hint = "; --vision off runs its text part alone, in packed steps" if has_text_model(files) else ""
    return WholeTower(model), line + hint
