"""Loads the dense layers that sentence-transformers puts after pooling."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from headrace.errors import ModelError
from headrace.models.pooling.head import ACTIVATIONS, HeadLayer
from headrace.models.pooling.recipe import activation_of, read_object
from headrace.models.source import foreign_errors


def dense_layers(directory: Path, folders: Sequence[str]) -> list[HeadLayer]:
    """Raises ModelError."""
    return [_dense(directory / folder) for folder in folders]


def _dense(folder: Path) -> HeadLayer:
    config = read_object(folder / "config.json")
    activation = activation_of(str(folder / "config.json"), config.get("activation_function"))
    with foreign_errors(lambda error: ModelError(f"{folder} holds no usable model.safetensors: {error}")):
        weights = mx.load(str(folder / "model.safetensors"))
        assert isinstance(weights, dict)
        matrix, bias = weights["linear.weight"], weights.get("linear.bias")
        linear = nn.Linear(matrix.shape[1], matrix.shape[0], bias=bias is not None)
    linear.weight = matrix
    if bias is not None:
        linear.bias = bias
    return HeadLayer(linear, ACTIVATIONS[activation])
