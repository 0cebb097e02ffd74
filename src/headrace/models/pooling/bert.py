"""BERT, RoBERTa and XLM-RoBERTa: encoders with learned positions and norms after each part."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from headrace.models.pooling.attention import attend, split_heads
from headrace.models.pooling.head import ACTIVATIONS, Activation

NAMES = (
    (r"^(bert|roberta)\.", ""),
    (r"^encoder\.layer\.", "layers."),
    (r"\.attention\.self\.", "."),
    (r"\.attention\.output\.dense\.", ".attended."),
    (r"\.attention\.output\.LayerNorm\.", ".attention_norm."),
    (r"\.intermediate\.dense\.", ".widened."),
    (r"\.output\.dense\.", ".narrowed."),
    (r"\.output\.LayerNorm\.", ".norm."),
    (r"^embeddings\.LayerNorm\.", "norm."),
    (r"^embeddings\.", ""),
    (r"(orm\.)gamma$", r"\1weight"),
    (r"(orm\.)beta$", r"\1bias"),
)
"""Patterns in the checkpoints' names of tensors, and what replaces them; the last two are of TensorFlow's."""


class BertLayer(nn.Module):
    def __init__(self, width: int, inner: int, num_heads: int, eps: float, activation: Activation) -> None:
        super().__init__()
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.attended = nn.Linear(width, width)
        self.attention_norm = nn.LayerNorm(width, eps)
        self.widened = nn.Linear(width, inner)
        self.narrowed = nn.Linear(inner, width)
        self.norm = nn.LayerNorm(width, eps)
        self._num_heads = num_heads
        self._activation = activation

    def __call__(self, x: mx.array, lengths: mx.array) -> mx.array:
        queries, keys, values = (split_heads(part(x), self._num_heads) for part in (self.query, self.key, self.value))
        x = self.attention_norm(x + self.attended(attend(queries, keys, values, lengths, None)))
        normed: mx.array = self.norm(x + self.narrowed(self._activation(self.widened(x))))
        return normed


class Bert(nn.Module):
    """has_types: whether the second text of a pair has another type than the first."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, eps = config["hidden_size"], config.get("layer_norm_eps", 1e-12)
        activation = ACTIVATIONS[config.get("hidden_act", "gelu")]
        is_roberta = config["model_type"] != "bert"
        self._first_position = config.get("pad_token_id", 1) + 1 if is_roberta else 0
        self.has_types = config.get("type_vocab_size", 2) > 1
        self.max_length = config["max_position_embeddings"] - self._first_position
        self.word_embeddings = nn.Embedding(config["vocab_size"], width)
        self.position_embeddings = nn.Embedding(config["max_position_embeddings"], width)
        self.token_type_embeddings = nn.Embedding(config.get("type_vocab_size", 2), width)
        self.norm = nn.LayerNorm(width, eps)
        self.layers = [
            BertLayer(width, config["intermediate_size"], config["num_attention_heads"], eps, activation)
            for _ in range(config["num_hidden_layers"])
        ]

    def __call__(self, ids: mx.array, lengths: mx.array, types: mx.array) -> mx.array:
        """ids, types: `[B, L]`, padded at the ends; lengths: `[B]`. Gives `[B, L, hidden]`."""
        positions = mx.arange(self._first_position, self._first_position + ids.shape[1])
        x = self.word_embeddings(ids) + self.position_embeddings(positions) + self.token_type_embeddings(types)
        hidden: mx.array = self.norm(x)
        for layer in self.layers:
            hidden = layer(hidden, lengths)
        return hidden


def renamed(name: str) -> str:
    for pattern, replacement in NAMES:
        name = re.sub(pattern, replacement, name)
    return name
