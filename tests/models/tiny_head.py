"""Prediction heads with random weights for the tiny models, and folders that hold both."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from models import tiny
from models.tiny_parts import HIDDEN_SIZE

HEAD_DIM, NUM_HEADS, NUM_KV_HEADS = 16, 4, 2
NUM_EXPERTS, EXPERT_SIZE, MLP_SIZE = 4, 32, 96

Tensors = dict[str, np.ndarray]


def text_config(name: str) -> Mapping[str, Any]:
    """Of a tiny model, nested or not."""
    config = tiny.FAMILIES[name]
    return config.get("text_config", config)


def draw(name: str, seed: int = 0) -> Tensors:
    """A head for a tiny model: float32 by names without prefix, norms as plain factors, experts one by one."""
    random = np.random.default_rng([seed, 77])

    def matrix(*shape: int) -> np.ndarray:
        return (random.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    def norm(width: int) -> np.ndarray:
        return (1 + 0.15 * random.standard_normal(width)).astype(np.float32)

    attention = {
        "q_proj": matrix(2 * NUM_HEADS * HEAD_DIM, HIDDEN_SIZE) * 1.5,
        "k_proj": matrix(NUM_KV_HEADS * HEAD_DIM, HIDDEN_SIZE) * 1.5,
        "v_proj": matrix(NUM_KV_HEADS * HEAD_DIM, HIDDEN_SIZE),
        "o_proj": matrix(HIDDEN_SIZE, NUM_HEADS * HEAD_DIM),
    }
    tensors = {
        "fc.weight": matrix(HIDDEN_SIZE, 2 * HIDDEN_SIZE),
        **{f"{one}.weight": norm(HIDDEN_SIZE) for one in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")},
        **{f"layers.0.{one}.weight": norm(HIDDEN_SIZE) for one in ("input_layernorm", "post_attention_layernorm")},
        **{f"layers.0.self_attn.{one}.weight": norm(HEAD_DIM) for one in ("q_norm", "k_norm")},
        **{f"layers.0.self_attn.{one}.weight": array for one, array in attention.items()},
    }
    if "num_experts" not in text_config(name):
        return {**tensors, **_mlp("layers.0.mlp", MLP_SIZE, matrix)}
    for number in range(NUM_EXPERTS):
        tensors |= _mlp(f"layers.0.mlp.experts.{number}", EXPERT_SIZE, matrix)
    tensors |= _mlp("layers.0.mlp.shared_expert", EXPERT_SIZE, matrix)
    tensors["layers.0.mlp.gate.weight"] = matrix(NUM_EXPERTS, HIDDEN_SIZE)
    tensors["layers.0.mlp.shared_expert_gate.weight"] = matrix(1, HIDDEN_SIZE)
    return tensors


def _mlp(path: str, size: int, matrix: Any) -> Tensors:
    shapes = {"gate_proj": (size, HIDDEN_SIZE), "up_proj": (size, HIDDEN_SIZE), "down_proj": (HIDDEN_SIZE, size)}
    return {f"{path}.{part}.weight": matrix(*shape) for part, shape in shapes.items()}


def fused(tensors: Tensors) -> Tensors:
    """The same with the experts in two arrays, as Qwen3.5's own checkpoints have them."""
    mlp = "layers.0.mlp.experts"
    rest = {name: array for name, array in tensors.items() if not name.startswith(f"{mlp}.")}

    def stacked(part: str) -> np.ndarray:
        return np.stack([tensors[f"{mlp}.{number}.{part}.weight"] for number in range(NUM_EXPERTS)])

    gate_up = np.concatenate([stacked("gate_proj"), stacked("up_proj")], axis=1)
    return {**rest, f"{mlp}.gate_up_proj": gate_up, f"{mlp}.down_proj": stacked("down_proj")}


def centred(tensors: Mapping[str, np.ndarray]) -> Tensors:
    """The same with norms as their makers store them: the distance from 1."""
    return {name: array - 1 if array.ndim == 1 else array for name, array in tensors.items()}


def prefixed(tensors: Mapping[str, np.ndarray], prefix: str = "mtp.") -> Tensors:
    """The same by the names of a checkpoint."""
    return {prefix + name: array for name, array in tensors.items()}


def write(file: Path, tensors: Mapping[str, np.ndarray | mx.array], metadata: Mapping[str, str] | None = None) -> None:
    """A file of tensors; its folder is made if need be."""
    file.parent.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(file), {name: mx.array(array) for name, array in tensors.items()}, dict(metadata or {}))


def save_with_head(name: str, folder: Path, tensors: Mapping[str, np.ndarray | mx.array], **fields: Any) -> Path:
    """A tiny model's checkpoint, the tensors in a separate shard beside it. fields: added to the text config."""
    tiny.save(name, folder)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    write(folder / "model-00002-of-00002.safetensors", tensors)
    config = json.loads((folder / "config.json").read_text())
    config.get("text_config", config).update(fields)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def with_raw_trunk(folder: Path) -> Path:
    """Turn the axes of the trunk's convolutions to where its makers have them."""
    for file in folder.glob("model-*.safetensors"):
        tensors: Any = mx.load(str(file))
        rotated = {
            name: array.moveaxis(2, 1) if name.endswith("conv1d.weight") else array for name, array in tensors.items()
        }
        mx.eval(rotated)
        mx.save_safetensors(str(file), rotated)
    return folder
