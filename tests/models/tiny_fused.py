"""Tiny models whose heads are of the sizes that kernels for NVIDIA GPUs do."""

from __future__ import annotations

import copy

import mlx.core as mx
import mlx.nn as nn
import pytest
from models import tiny
from models.tiny_parts import Config

from headrace.backend.kernels import Kernels

HEAD_DIM = 64
SIZED_BY_WIDTH = frozenset(
    {
        *("Klear", "apertus", "bailing_moe", "deepseek", "granite", "granitemoe", "lfm2", "lfm2_moe", "mimo"),
        *("mixtral", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen2_vl", "starcoder2"),
    }
)
"""Families whose heads are as wide as the model divided by their number, whatever else is said."""
KERNELS = Kernels("fast", "cuda", attention_pairs=0)
"""Wherever the tests run: without CUDA, operations stand for the kernels.

attention_pairs: so that a short sentence has chunks of both kinds.
"""
DTYPE = "bfloat16" if mx.cuda.is_available() else "float32"
"""Kernels take half precision only."""
only_operations = pytest.mark.skipif(mx.cuda.is_available(), reason="in single precision, which kernels don't take")


def widen(name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let there be a family like the named one with wider heads; gives its name."""
    config: Config = copy.deepcopy(tiny.FAMILIES[name])
    text = config.get("text_config", config)
    text["head_dim"] = HEAD_DIM
    if name in SIZED_BY_WIDTH:
        text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 2 * HEAD_DIM}
        text |= {"block_dim": 2 * HEAD_DIM} if "block_dim" in text else {}
    if name == "qwen2_vl":
        text["rope_scaling"] = {"type": "mrope", "mrope_section": [8, 12, 12]}
    scaling = text.get("rope_scaling") or {}
    for factors in ("short_factor", "long_factor"):
        if factors in scaling:  # one for each pair of channels
            scaling[factors] = [1 + pair / 8 for pair in range(HEAD_DIM // 2)]
    if "linear_key_head_dim" in text:
        text |= {"linear_key_head_dim": HEAD_DIM, "linear_value_head_dim": 32}
        text["rope_parameters"] = {**text["rope_parameters"], "mrope_section": [6, 5, 5]}
    if "moe_intermediate_size" in text:
        text["moe_intermediate_size"] = 64
    if "shared_expert_intermediate_size" in text:
        text["shared_expert_intermediate_size"] = 64
    monkeypatch.setitem(tiny.FAMILIES, f"{name}_wide", config)
    return f"{name}_wide"


def build(name: str) -> nn.Module:
    """A family that was widened, in DTYPE."""
    model = tiny.build(name)
    if DTYPE != "float32":
        model.set_dtype(mx.bfloat16)
    return model
