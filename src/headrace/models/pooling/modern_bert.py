"""ModernBERT: an encoder with rotary positions, gated layers, and windows in most of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from headrace.models.pooling.attention import attend, split_heads
from headrace.models.pooling.head import ACTIVATIONS, Activation

_EVERY_LAYERS = 3
"""Every which layer sees whole texts, in a configuration that doesn't say."""


class Attention(nn.Module):
    def __init__(self, width: int, num_heads: int, theta: float, window: int | None, has_bias: bool) -> None:
        super().__init__()
        self.Wqkv = nn.Linear(width, 3 * width, bias=has_bias)
        self.Wo = nn.Linear(width, width, bias=has_bias)
        self.rope = nn.RoPE(width // num_heads, base=theta)
        self._num_heads = num_heads
        self._window = window

    def __call__(self, x: mx.array, lengths: mx.array) -> mx.array:
        queries, keys, values = (split_heads(part, self._num_heads) for part in mx.split(self.Wqkv(x), 3, axis=-1))
        attended: mx.array = self.Wo(attend(self.rope(queries), self.rope(keys), values, lengths, self._window))
        return attended


class GatedMLP(nn.Module):
    def __init__(self, width: int, inner: int, activation: Activation, has_bias: bool) -> None:
        super().__init__()
        self.Wi = nn.Linear(width, 2 * inner, bias=has_bias)
        self.Wo = nn.Linear(inner, width, bias=has_bias)
        self._activation = activation

    def __call__(self, x: mx.array) -> mx.array:
        wide, gate = mx.split(self.Wi(x), 2, axis=-1)
        narrowed: mx.array = self.Wo(self._activation(wide) * gate)
        return narrowed


class ModernBertLayer(nn.Module):
    def __init__(self, config: Mapping[str, Any], index: int) -> None:
        super().__init__()
        width = config["hidden_size"]
        is_whole = _sees_all(config, index)
        window = None if is_whole else config.get("local_attention", 128) // 2
        has_bias = config.get("attention_bias", False)
        # the norm after the embeddings is the first layer's
        self.attn_norm = nn.Identity() if index == 0 else norm_of(config)
        self.attn = Attention(width, config["num_attention_heads"], _theta(config, is_whole), window, has_bias)
        self.mlp_norm = norm_of(config)
        activation = ACTIVATIONS[config.get("hidden_activation", "gelu")]
        self.mlp = GatedMLP(width, config["intermediate_size"], activation, config.get("mlp_bias", False))

    def __call__(self, x: mx.array, lengths: mx.array) -> mx.array:
        x = x + self.attn(self.attn_norm(x), lengths)
        added: mx.array = x + self.mlp(self.mlp_norm(x))
        return added


class ModernBert(nn.Module):
    has_types = False

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.max_length: int = config["max_position_embeddings"]
        self.tok_embeddings = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.norm = norm_of(config)
        self.layers = [ModernBertLayer(config, index) for index in range(config["num_hidden_layers"])]
        self.final_norm = norm_of(config)

    def __call__(self, ids: mx.array, lengths: mx.array, types: mx.array) -> mx.array:
        """As `Bert`; types count for nothing."""
        x = self.norm(self.tok_embeddings(ids))
        for layer in self.layers:
            x = layer(x, lengths)
        normed: mx.array = self.final_norm(x)
        return normed


def norm_of(config: Mapping[str, Any]) -> nn.LayerNorm:
    return nn.LayerNorm(config["hidden_size"], config.get("norm_eps", 1e-5), bias=config.get("norm_bias", False))


def _sees_all(config: Mapping[str, Any], index: int) -> bool:
    types = config.get("layer_types")
    if types is not None:
        return bool(types[index] == "full_attention")
    return index % int(config.get("global_attn_every_n_layers", _EVERY_LAYERS)) == 0


def _theta(config: Mapping[str, Any], is_whole: bool) -> float:
    """The rope's base; each kind of layer has its own, in one of two forms of configurations."""
    old, new, default = "local_rope_theta", "sliding_attention", 10_000.0
    if is_whole:
        old, new, default = "global_rope_theta", "full_attention", 160_000.0
    parameters = (config.get("rope_parameters") or {}).get(new) or {}
    return float(parameters.get("rope_theta", config.get(old, default)))


def renamed(name: str) -> str:
    return name.removeprefix("model.").removeprefix("embeddings.")
