"""Adapters of random weights, in folders as mlx-lm and PEFT write them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.tuner.utils import linear_to_lora_layers

LINEARS = (nn.Linear, nn.QuantizedLinear)
EXPERTS = (SwitchLinear, QuantizedSwitchLinear)


def linear_keys(model: Any) -> list[str]:
    """Names of all linears inside of a layer, as mlx-lm's configs have them.

    Without those that gemma3n reads the weights of, which mlx-lm can't give adapters.
    """
    return [path for path in _keys(model, LINEARS) if not path.endswith("_coefs")]


def expert_keys(model: Any) -> list[str]:
    """The same of experts' stacked linears."""
    return _keys(model, EXPERTS)


def _keys(model: Any, kinds: tuple[type, ...]) -> list[str]:
    named = [each for layer in model.layers for each in layer.named_modules()]
    return sorted({path for path, module in named if isinstance(module, kinds)})


def write_mlx_lm(
    model: Any,
    folder: Path,
    seed: int,
    *,
    rank: int = 4,
    dora: bool = False,
    keys: Sequence[str] = (),
    size: float = 0.06,
) -> Path:
    """An adapter of a model, which gets mlx-lm's layers by this. keys: none for all linears inside of layers."""
    parameters = {"rank": rank, "scale": 2.0, "dropout": 0.0, "keys": list(keys) or linear_keys(model)}
    linear_to_lora_layers(model, len(model.layers), parameters, use_dora=dora)
    random = np.random.default_rng(seed)
    weights: dict[str, mx.array] = {}
    flat: Any = tree_flatten(model.parameters())
    for path, array in flat:
        leaf = path.rpartition(".")[2]
        if leaf in ("lora_a", "lora_b"):
            weights[path] = mx.array(random.normal(0, size, array.shape).astype(np.float32))
        elif leaf == "m" and dora:
            weights[path] = array * mx.array(random.uniform(0.5, 1.5, array.shape).astype(np.float32))
    config = {
        "fine_tune_type": "dora" if dora else "lora",
        "num_layers": len(model.layers),
        "lora_parameters": parameters,
    }
    return _write(folder, "adapters.safetensors", weights, config)


def write_peft(folder: Path, tensors: Mapping[str, np.ndarray], **config: Any) -> Path:
    """tensors: by name without PEFT's first part."""
    weights = {f"base_model.model.{name}": mx.array(tensor.astype(np.float32)) for name, tensor in tensors.items()}
    return _write(folder, "adapter_model.safetensors", weights, {"peft_type": "LORA", "r": 4, "lora_alpha": 8} | config)


def peft_tensors(model: Any, seed: int, rank: int = 4) -> dict[str, np.ndarray]:
    """A and B of all linears inside of layers."""
    random = np.random.default_rng(seed)
    inside = {id(module) for layer in model.layers for _, module in layer.named_modules()}
    tensors = {}
    for path, module in model.named_modules():
        if isinstance(module, LINEARS) and id(module) in inside:
            rows, width = module.weight.shape
            tensors[f"{path}.lora_A.weight"] = random.normal(0, 0.06, (rank, width))
            tensors[f"{path}.lora_B.weight"] = random.normal(0, 0.06, (rows, rank))
    return tensors


def merge_peft(model: Any, tensors: Mapping[str, np.ndarray], scale: float) -> None:
    """W + scale · B A, and with a magnitude m: of length m in each row; biases as PEFT's `merge` does."""
    modules = dict(model.named_modules())
    for name, a in tensors.items():
        path = name.removesuffix(".lora_A.weight")
        if path == name:
            continue
        module = modules[path]
        merged = np.array(module.weight) + scale * tensors[f"{path}.lora_B.weight"] @ a
        magnitude = tensors.get(f"{path}.lora_magnitude_vector")
        if magnitude is not None:
            merged *= (magnitude / np.linalg.norm(merged, axis=1))[:, None]
        module.weight = mx.array(merged.astype(np.float32))
        if (bias := tensors.get(f"{path}.lora_B.bias")) is not None:
            module.bias = module.bias + mx.array((scale * bias).astype(np.float32))
        if (bias := tensors.get(f"{path}.base_layer.bias")) is not None:
            module.bias = mx.array(bias.astype(np.float32))


def scale_of(rank: int, alpha: float, *, root: bool = False) -> float:
    return alpha / (math.sqrt(rank) if root else rank)


def _write(folder: Path, name: str, weights: Mapping[str, mx.array], config: Mapping[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / name), dict(weights))
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
