"""Loads an encoder, and runs it on batches of texts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from headrace.backend.device import Device
from headrace.errors import ModelError
from headrace.isolation import errors_as
from headrace.models.pooling import bert, modern_bert
from headrace.models.pooling.head import ACTIVATIONS, Activation, Head, HeadLayer, dense_layers, pool
from headrace.models.pooling.recipe import Output, Recipe
from headrace.models.source import ModelFiles
from headrace.models.stored_files import check_files
from headrace.models.weights import listed, parameters_of, quantise_as_stored, read_tensors, set_precision, shards

_CLASSES: Mapping[str, tuple[Callable[[Mapping[str, Any]], Any], Callable[[str], str]]] = {
    "bert": (bert.Bert, bert.renamed),
    "modernbert": (modern_bert.ModernBert, modern_bert.renamed),
    "roberta": (bert.Bert, bert.renamed),
    "xlm-roberta": (bert.Bert, bert.renamed),
}
"""By model type: the encoder's class, and its names for a checkpoint's tensors."""

_CLASSIFIERS = ("classifier.", "pooler.", "head.")
"""Beginnings of names of tensors that a classifier may have after the encoder."""


@dataclass(slots=True)
class EncoderInput:
    """A text's token ids. second_text: see GenerationRequest."""

    token_ids: Sequence[int]
    second_text: int | None = None


class Encoder(nn.Module):
    def __init__(self, body: Any, modes: Sequence[str], head: Head) -> None:
        super().__init__()
        self.body = body
        self.head = head
        self._modes = modes

    @property
    def max_length(self) -> int:
        return int(self.body.max_length)

    @property
    def num_ids(self) -> int:
        embeddings = self.body.get("word_embeddings", self.body.get("tok_embeddings"))
        return int(embeddings.weight.shape[0])

    def __call__(self, inputs: Sequence[EncoderInput]) -> mx.array:
        """Gives `[len(inputs), numbers]`. The inputs are padded to the longest."""
        lengths = [len(each.token_ids) for each in inputs]
        ids = np.zeros((len(inputs), max(lengths)), np.int32)
        types = np.zeros_like(ids)
        for row, each in enumerate(inputs):
            ids[row, : lengths[row]] = each.token_ids
            if each.second_text is not None and self.body.has_types:
                types[row, each.second_text : lengths[row]] = 1
        num_tokens = mx.array(lengths)
        hidden = self.body(mx.array(ids), num_tokens, mx.array(types))
        return self.head(pool(self._modes, hidden, num_tokens))


@dataclass(frozen=True, slots=True)
class LoadedEncoder:
    """width: numbers of a text. num_bytes: what an input of so many tokens takes besides the weights.

    report: lines for start-up.
    """

    encoder: Encoder
    width: int
    num_bytes: Callable[[int], int]
    report: tuple[str, ...]


def load_encoder(files: ModelFiles, dtype: str, device: Device) -> LoadedEncoder:
    """dtype: as in `ModelConfig.dtype`. Raises ModelError."""
    assert files.recipe is not None
    check_files(files)
    started = time.monotonic()
    with errors_as(lambda error: ModelError(f"{files.name} can't be loaded: {error}"), may_exit=True):
        tensors = {name: array for file in shards(files.directory) for name, array in read_tensors(file)[0].items()}
        if not tensors:
            raise ModelError(f"{files.directory} holds no model*.safetensors")
        encoder = _build(files, files.recipe, tensors)
        encoder.eval()
        precision = set_precision(encoder, dtype, device.kind, device.memory_bytes)
        numbers = encoder([EncoderInput([0, 1])])
        mx.eval(numbers)
    lines = [f"model: {files.name} ({files.model_type}), loaded in {time.monotonic() - started:.1f} s", precision]
    lines.append(f"encoder: batches of similar length, {' and '.join(files.recipe.modes)} pooling")
    return LoadedEncoder(encoder, numbers.shape[-1], partial(_num_bytes, files.config), tuple(lines))


def _num_bytes(config: Mapping[str, Any], num_tokens: int) -> int:
    """In float32: a layer's arrays of each token, and scores of one block of queries."""
    per_token = 8 * config["hidden_size"] + 4 * config["intermediate_size"]
    scores = config["num_attention_heads"] * num_tokens * min(num_tokens, 2048)
    return 4 * int(num_tokens * per_token + scores)


def _build(files: ModelFiles, recipe: Recipe, tensors: Mapping[str, mx.array]) -> Encoder:
    make, rename = _CLASSES[files.model_type]
    body = make(files.config)
    own = {rename(name): array for name, array in tensors.items()}
    _fill(files, body, {name: array for name, array in own.items() if not name.startswith(_CLASSIFIERS)})
    head = Head(dense_layers(files.directory, recipe.dense))
    if recipe.output is Output.CLASSIFIER:
        head = Head(_classifier(files.config))
        names = _classifier_names(files.model_type)
        _fill(files, head, {names(name): array for name, array in own.items() if name.startswith(_CLASSIFIERS)})
    return Encoder(body, recipe.modes, head)


def _fill(files: ModelFiles, module: nn.Module, tensors: Mapping[str, mx.array]) -> None:
    quantise_as_stored(module, tensors)
    expected = parameters_of(module)
    if missing := expected.keys() - tensors.keys():
        raise ModelError(f"{files.directory} lacks weights: {listed(missing)}")
    module.load_weights([(name, tensors[name]) for name in expected], strict=True)


def _classifier(config: Mapping[str, Any]) -> list[HeadLayer]:
    """A layer of the encoder's width, then the score."""
    width = config["hidden_size"]
    last = HeadLayer(nn.Linear(width, 1), ACTIVATIONS["identity"])
    if config["model_type"] != "modernbert":
        return [HeadLayer(nn.Linear(width, width), ACTIVATIONS["tanh"]), last]
    activation: Activation = ACTIVATIONS[config.get("classifier_activation", "gelu")]
    linear = nn.Linear(width, width, bias=config.get("classifier_bias", False))
    return [HeadLayer(linear, activation, modern_bert.norm_of(config)), last]


def _classifier_names(model_type: str) -> Callable[[str], str]:
    beginnings = {
        "bert": {"pooler.dense.": "parts.0.linear.", "classifier.": "parts.1.linear."},
        "modernbert": {
            "head.dense.": "parts.0.linear.",
            "head.norm.": "parts.0.norm.",
            "classifier.": "parts.1.linear.",
        },
    }.get(model_type, {"classifier.dense.": "parts.0.linear.", "classifier.out_proj.": "parts.1.linear."})

    def rename(name: str) -> str:
        found = next((each for each in beginnings if name.startswith(each)), None)
        return name if found is None else beginnings[found] + name.removeprefix(found)

    return rename
