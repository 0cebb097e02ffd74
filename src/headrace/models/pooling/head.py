"""From the hidden states of a text to its vector or score."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from headrace.errors import ModelError
from headrace.isolation import errors_as
from headrace.models.json_file import read_object

Activation = Callable[[mx.array], mx.array]

ACTIVATIONS: dict[str, Activation] = {
    "gelu": nn.gelu,
    "gelu_new": nn.gelu_approx,
    "gelu_pytorch_tanh": nn.gelu_approx,
    "identity": lambda x: x,
    "relu": nn.relu,
    "sigmoid": mx.sigmoid,
    "silu": nn.silu,
    "tanh": mx.tanh,
}
"""By their names in transformers' configurations, and those of torch's classes in lower case."""


def _cls(hidden: mx.array, lengths: mx.array, mask: mx.array) -> mx.array:
    return hidden[:, 0]


def _last(hidden: mx.array, lengths: mx.array, mask: mx.array) -> mx.array:
    return mx.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1).squeeze(1)


def _max(hidden: mx.array, lengths: mx.array, mask: mx.array) -> mx.array:
    return mx.where(mask, hidden, -mx.inf).max(axis=1)


def _sum(hidden: mx.array, mask: mx.array) -> mx.array:
    return mx.where(mask, hidden, 0).astype(mx.float32).sum(axis=1)


def _mean(hidden: mx.array, lengths: mx.array, mask: mx.array) -> mx.array:
    return _sum(hidden, mask) / lengths[:, None]


def _mean_by_root(hidden: mx.array, lengths: mx.array, mask: mx.array) -> mx.array:
    return _sum(hidden, mask) / mx.sqrt(lengths[:, None])


def _weighted_mean(hidden: mx.array, lengths: mx.array, mask: mx.array) -> mx.array:
    weights = mx.arange(1, hidden.shape[1] + 1)[None, :, None]
    return _sum(hidden * weights, mask) / (lengths * (lengths + 1) / 2)[:, None]


POOLINGS: dict[str, Callable[[mx.array, mx.array, mx.array], mx.array]] = {
    "cls": _cls,
    "lasttoken": _last,
    "max": _max,
    "mean": _mean,
    "mean_sqrt_len_tokens": _mean_by_root,
    "weightedmean": _weighted_mean,
}
"""By sentence-transformers' names. Each takes `[B, L, hidden]`, lengths `[B]`, and the mask `[B, L, 1]` of tokens that
are no padding."""


def pool(modes: Sequence[str], hidden: mx.array, lengths: mx.array) -> mx.array:
    """hidden: `[B, L, hidden]` of texts padded at their ends. Gives `[B, len(modes) * hidden]`."""
    mask = (mx.arange(hidden.shape[1])[None] < lengths[:, None])[..., None]
    return mx.concatenate([POOLINGS[mode](hidden, lengths, mask) for mode in modes], axis=-1)


class HeadLayer(nn.Module):
    def __init__(self, linear: nn.Module, activation: Activation, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.linear = linear
        self.norm = norm
        self._activation = activation

    def __call__(self, x: mx.array) -> mx.array:
        activated = self._activation(self.linear(x))
        normed: mx.array = activated if self.norm is None else self.norm(activated)
        return normed


class Head(nn.Module):
    """The layers after pooling; none in most embedding models."""

    def __init__(self, layers: Sequence[HeadLayer] = ()) -> None:
        super().__init__()
        self.parts = list(layers)

    def __call__(self, x: mx.array) -> mx.array:
        """x: `[…, in]`. Gives `[…, out]`."""
        for part in self.parts:
            x = part(x)
        return x


def dense_layers(directory: Path, folders: Sequence[str]) -> list[HeadLayer]:
    """Those that sentence-transformers puts after pooling. Raises ModelError."""
    return [_dense(directory / folder) for folder in folders]


def _dense(folder: Path) -> HeadLayer:
    path = folder / "config.json"
    name = (read_object(path) or {}).get("activation_function")
    activation = str(name).rpartition(".")[2].lower()
    if activation not in ACTIVATIONS:
        raise ModelError(f"{path}: the activation {name} is not supported")
    with errors_as(lambda error: ModelError(f"{folder} holds no usable model.safetensors: {error}"), may_exit=True):
        weights = mx.load(str(folder / "model.safetensors"))
        assert isinstance(weights, dict)
        matrix, bias = weights["linear.weight"], weights.get("linear.bias")
        linear = nn.Linear(matrix.shape[1], matrix.shape[0], bias=bias is not None)
    linear.weight = matrix
    if bias is not None:
        linear.bias = bias
    return HeadLayer(linear, ACTIVATIONS[activation])
