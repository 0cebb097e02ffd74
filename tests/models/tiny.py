"""Tiny models with random weights, one of every family that mlx-lm runs on a CPU: the material of parity tests.

Their logits spread over a few units and depend on every earlier token, so that a state, a position or a window that is
wrong by one shows. The reference is mlx-lm's own model with its own caches, fed token by token.
"""

from __future__ import annotations

import copy
import json
import math
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import _get_classes
from models.tiny_dense import DENSE
from models.tiny_experts import EXPERT
from models.tiny_hybrid import HYBRID
from models.tiny_parts import Config
from models.tiny_windowed import WINDOWED

FAMILIES: dict[str, Config] = {**DENSE, **WINDOWED, **EXPERT, **HYBRID}
"""What config.json holds, by a name: the model_type, or that and what is special about the variant."""

PROMPT = (17, 93, 5, 128, 61, 142, 33, 77, 110, 9, 54, 138, 26, 85, 99, 41)
"""Twice as long as the windows; 64 tokens taken greedily after it have margins over 1e-3 in every family."""

_NORM_ADDS_ONE = frozenset({"gemma", "gemma2", "gemma3", "gemma3_text", "nemotron", "recurrent_gemma"})
"""Their norms scale by 1 + weight but are created with ones, as if they scaled by the weight."""

_FINAL_NORM_CENTRE = {"baichuan_m1": 2.5}
"""Its head has rows of length one, so the final norm has to spread the logits."""

# fmt: off
_SALTS = {
    "afm7": 2, "cohere": 1, "ernie4_5": 1, "gemma3_text": 2, "gemma4_text": 4, "glm4": 1, "gpt_oss": 1,
    "hunyuan": 1, "kimi_k3": 1, "lfm2-vl": 1, "minimax": 1, "ministral3": 1, "mistral3": 1, "mistral4": 1,
    "olmoe": 2, "openelm": 7, "qwen": 1, "qwen3": 2, "qwen3_moe": 1, "recurrent_gemma": 2, "rwkv7": 3,
    "seed_oss": 1, "step3p5": 1, "talkie": 1, "telechat3": 1,
}
# fmt: on
"""Another draw for families whose first one nearly ties two logits on the greedy path from PROMPT."""

_FINAL_NORM = re.compile(
    r"(^|\.)(model|language_model|backbone|transformer)\.(norm|norm_f|final_norm|final_layernorm|embedding_norm|ln_f)\.weight$"
)
_EMBEDDING = re.compile(r"(embed\w*|wte|wpe|emb|word_embeddings|embedding|tok_embeddings)\.weight$")
_HEAD = re.compile(r"(^|\.)(lm_head(\.linear)?|output|head)(\.weight)?$")
_QUERY_OR_KEY = re.compile(r"(q_proj|k_proj|qkv\w*|query_key_value|Wqkv|c_attn)\.weight$")


def build(name: str, seed: int = 0) -> nn.Module:
    """mlx-lm's model of a family in float32 and in eval mode; the same name and seed give the same weights.

    Raises KeyError for an unknown name.
    """
    model, weights = _draw(name, seed)
    if hasattr(model, "sanitize"):
        weights = model.sanitize(weights)
    model.load_weights(list(weights.items()), strict=True)
    model.eval()
    mx.eval(model.parameters())
    return model


def with_wide_heads(name: str) -> Config:
    """A family's config with heads of 64 channels, as many as kernels for NVIDIA GPUs take at least."""
    config = copy.deepcopy(FAMILIES[name])
    text = config.get("text_config", config)
    text.update(dict.fromkeys(("head_dim", "linear_key_head_dim", "linear_value_head_dim"), 64))
    return config


def save(name: str, folder: Path, seed: int = 0) -> Path:
    """Write what `build(name, seed)` is made of as a checkpoint that mlx-lm loads into equal weights.

    Gives the folder, which is made if need be. Raises KeyError for an unknown name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _, weights = _draw(name, seed)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(FAMILIES[name], indent=2), encoding="utf-8")
    return folder


def reference(model: nn.Module, token_ids: Sequence[int]) -> mx.array:
    """Logits `[T, vocab_size]` in float32 of the untouched model, fed token by token with its own caches."""
    cache = make_prompt_cache(model)
    rows = []
    for token_id in token_ids:
        row = model(mx.array([[token_id]]), cache=cache)[0, -1]
        mx.eval(row)
        rows.append(row)
    return mx.stack(rows)


def parameters(model: nn.Module) -> dict[str, mx.array]:
    """A model's weights by their dotted paths."""
    return cast("dict[str, mx.array]", dict(tree_flatten(model.parameters())))


def _draw(name: str, seed: int) -> tuple[nn.Module, dict[str, mx.array]]:
    """A model with its first weights and, by path, the random ones that are still to go through its `sanitize`."""
    config = copy.deepcopy(FAMILIES[name])  # some families change the nested parts of what they are given
    model_class, arguments_class = _get_classes(config)
    model: nn.Module = model_class(arguments_class.from_dict(config))
    weights = {path: _random(config, path, value, seed) for path, value in parameters(model).items()}
    if config.get("tie_word_embeddings"):
        # some families always create a head and drop it when the checkpoint has none
        weights = {path: value for path, value in weights.items() if not _HEAD.search(path)}
    return model, weights


def _random(config: Config, path: str, created: mx.array, seed: int) -> mx.array:
    """A float32 value for a parameter, keyed by model_type, path and seed, so that new families change no old ones."""
    model_type, tied = config["model_type"], bool(config.get("tie_word_embeddings"))
    random = np.random.default_rng([seed, _SALTS.get(model_type, 0), zlib.crc32(f"{model_type}.{path}".encode())])
    shape = created.shape
    if (special := _recurrence(path, shape, random)) is not None:
        return mx.array(special.astype(np.float32))
    first = np.array(created.astype(mx.float32))
    # scales and offsets are created as constants; what is created at random (linear layers) is drawn anew
    constant = first.min() == first.max() and not path.endswith("bias")
    if (deviation := _deviation(path, shape, tied, constant)) is not None:
        return mx.array((deviation * random.standard_normal(shape)).astype(np.float32))
    centre = first if constant else np.zeros(shape)
    if model_type in _NORM_ADDS_ONE and "norm" in path and path.endswith("weight"):
        centre = centre - 1.0
    if _FINAL_NORM.search(path):
        centre = centre + (6.0 if tied else 0.0) + _FINAL_NORM_CENTRE.get(model_type, 0.0)
    return mx.array((centre + 0.15 * random.standard_normal(shape)).astype(np.float32))


def _recurrence(path: str, shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray | None:
    """Parameters that decide how long a recurrent layer remembers: between two and some hundred tokens."""
    if path.endswith("A_log"):
        return np.log(random.uniform(0.3, 2.0, shape))
    if path.endswith(("dt_bias", "dt_proj.bias")):
        return np.log(np.expm1(random.uniform(0.05, 0.6, shape)))  # the inverse of softplus
    if path.endswith("recurrent_param") or re.search(r"w_lora.*bias$", path):
        return random.uniform(-5.0, -2.0, shape)
    return None


def _deviation(path: str, shape: tuple[int, ...], tied: bool, constant: bool) -> float | None:
    """Standard deviation of a matrix, centred on zero; None for what varies around a constant."""
    if "sink" in path:
        return 1.0
    if "conv" in path and len(shape) == 3:
        return 1.5 / math.sqrt(shape[1])  # [channels, kernel, 1]
    if len(shape) < 2 or constant and min(shape[-2:]) == 1:
        return None
    if _HEAD.search(path):
        return 2.5 / math.sqrt(shape[-1])
    if _EMBEDDING.search(path):
        # a tied head would find the input's own embedding in the last hidden state: keep it small beside what the
        # layers add, and let the final norm make up for it, as trained models do
        return 0.04 if tied else 0.3
    # sharper attention than plain random projections have: one key matters more than another
    return (1.5 if _QUERY_OR_KEY.search(path) else 1.0) / math.sqrt(shape[-1])
