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
KERNELS = Kernels("fast", "cuda")
"""Wherever the tests run: without CUDA, operations stand for the kernels."""
DTYPE = "bfloat16" if mx.cuda.is_available() else "float32"
"""Kernels take half precision only."""
only_operations = pytest.mark.skipif(mx.cuda.is_available(), reason="in single precision, which kernels don't take")


def widen(name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let there be a family like the named one with wider heads; gives its name."""
    config: Config = copy.deepcopy(tiny.FAMILIES[name])
    text = config.get("text_config", config)
    text["head_dim"] = HEAD_DIM
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
