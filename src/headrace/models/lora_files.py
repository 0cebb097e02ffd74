"""Reads an adapter's folder in mlx-lm's or PEFT's format, and fits it to a loaded model."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import mlx.core as mx

from headrace.errors import ModelError
from headrace.models.lora import EMBEDDINGS, LINEARS, Loras, input_width, output_width
from headrace.models.lora_table import LoraWeights
from headrace.models.weights import dense_weight, listed

CONFIG = "adapter_config.json"
MLX_LM, PEFT = "adapters.safetensors", "adapter_model.safetensors"
"""Files of weights, by which the format is known."""

_HARMLESS = frozenset(
    {
        *("peft_type", "peft_version", "task_type", "auto_mapping", "base_model_name_or_path", "revision"),
        *("inference_mode", "r", "lora_alpha", "lora_dropout", "rank_pattern", "alpha_pattern", "use_rslora"),
        *("use_dora", "lora_bias", "bias", "target_modules", "exclude_modules", "layers_to_transform"),
        *("layers_pattern", "init_lora_weights", "loftq_config", "eva_config", "runtime_config"),
        *("megatron_core", "qalora_group_size", "ensure_weight_tying"),
    }
)
"""Of PEFT's options those that are read here, or that only matter in training. Others are refused if set."""

_INITS_OF_OTHER_WEIGHTS = ("pissa", "olora", "corda", "lora_ga")
"""Of `init_lora_weights` those that change the model's own weights, unless PEFT converted the adapter when saving."""


_ROUNDED_DIFFERENCE, _QUANTISED_DIFFERENCE = 0.01, 0.25
"""Up to this relative difference (Frobenius) a saved weight counts as the model's own in another precision: bfloat16
rounds by up to 0.004; 4 bits in groups of 64 change normally distributed weights by 0.09, 3 bits by 0.2."""


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter's folder. weights: its file of tensors. fingerprint: 32 hex digits for all of its numbers."""

    weights: Path
    config: Mapping[str, Any]
    fingerprint: str

    @property
    def is_peft(self) -> bool:
        return self.weights.name == PEFT


@dataclass(frozen=True, slots=True)
class _Settings:
    """From the config. scale: the factor of a module's product, by its path and rank.

    rank: None if it differs by module. is_dora: whether there are magnitudes.
    """

    scale: Callable[[str, int], float]
    rank: int | None
    is_dora: bool


def read_adapter(folder: Path) -> AdapterFiles:
    """Read the config, and the weights' bytes for the fingerprint. Any thread may. Raises ModelError."""
    folder = folder.expanduser()
    if not folder.is_dir():
        raise ModelError("there is no such folder")
    try:
        text = (folder / CONFIG).read_bytes()
        config = json.loads(text)
    except OSError as error:
        raise ModelError(f"the folder holds no {CONFIG} that can be read") from error
    except ValueError as error:
        raise ModelError(f"{CONFIG} is no JSON") from error
    if not isinstance(config, dict):
        raise ModelError(f"{CONFIG} must hold an object")
    weights = folder / (PEFT if "peft_type" in config else MLX_LM)
    digest = blake2b(text, digest_size=16)
    try:
        with weights.open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
    except OSError as error:
        raise ModelError(f"the folder holds no {weights.name} that can be read") from error
    return AdapterFiles(weights, config, digest.hexdigest())


def fit_adapter(files: AdapterFiles, model: Loras, dtype: mx.Dtype) -> dict[str, LoraWeights]:
    """An adapter's weights by the path of the module that they change, evaluated, in the activations' type.

    Raises ModelError, naming what the model doesn't have or what isn't supported.
    """
    settings = (_peft_settings if files.is_peft else _mlx_lm_settings)(files.config)
    try:
        tensors = mx.load(str(files.weights))
    except RuntimeError as error:
        raise ModelError(f"{files.weights.name} is no safetensors file that can be read") from error
    if not isinstance(tensors, dict) or not tensors:
        raise ModelError(f"{files.weights.name} holds no tensors")
    by_path: dict[str, dict[str, mx.array]] = {}
    for name, tensor in tensors.items():
        path, part, array = (_peft_part if files.is_peft else _mlx_lm_part)(name, tensor)
        by_path.setdefault(_found(path, model), {})[part] = array
    fitted: dict[str, LoraWeights] = {}
    for path, parts in by_path.items():
        if (saved := parts.pop("weight", None)) is not None:
            _refuse_other_weight(path, saved, model.modules[path])
        if not parts:
            continue
        fitted[path] = _fit(path, parts, model.modules[path], settings, dtype)
        mx.eval(fitted[path].arrays())  # dense weights that a magnitude needs are freed one by one
    arrays = {path: weights.arrays() for path, weights in fitted.items()}
    if broken := [path for path, own in arrays.items() if not all(mx.isfinite(array).all().item() for array in own)]:
        raise ModelError(f"not all numbers are finite as {dtype}: {listed(broken)}")
    return fitted


def _found(path: str, model: Loras) -> str:
    """The path of the module in the loaded model, whose text part may be inside of a wrapper."""
    of_text = path.replace("model.language_model.", "language_model.model.", 1)
    for candidate in (path, f"language_model.{path}", of_text):
        if candidate in model.modules:
            return candidate
    kind = next((model.kinds[each] for each in (path, f"language_model.{path}", of_text) if each in model.kinds), None)
    if kind is None:
        raise ModelError(f"the model has no module {path}")
    raise ModelError(f"adapters of {path}, a {kind} here, are not supported")


def _fit(path: str, parts: Mapping[str, mx.array], module: Any, settings: _Settings, dtype: mx.Dtype) -> LoraWeights:
    """parts: `a` `[rank, input width]`, `b` `[rank, output width]`, both with experts as first axis where the module
    has some, and as far as there are `magnitude`, `bias` (which replaces the module's) and `b_bias` (which is scaled
    and added), each `[output width]`."""
    own_bias = module.get("bias")
    is_linear = type(module) in LINEARS
    if is_linear and set(parts) == {"bias"} and own_bias is not None and parts["bias"].shape == own_bias.shape:
        nothing = mx.zeros((1, input_width(module)), dtype), mx.zeros((1, own_bias.shape[0]), dtype)
        return LoraWeights(*nothing, None, (_float(parts["bias"]) - _float(own_bias)).astype(dtype))
    _check_shapes(path, parts, module, settings)
    a, b = _float(parts["a"]), _float(parts["b"])
    scale = settings.scale(path, a.shape[-2])
    b, gain, offset = scale * b, None, None
    if "b_bias" in parts:
        offset = scale * _float(parts["b_bias"])
    if "bias" in parts:
        change = _float(parts["bias"]) - _float(own_bias)
        offset = change if offset is None else offset + change
    if "magnitude" in parts:
        dense = dense_weight(module) + b.T @ a
        gain = _float(parts["magnitude"]) / mx.linalg.norm(dense, axis=1)
        b = gain * b
        if own_bias is not None:  # the magnitude is of the product, without the bias
            kept = (1 - gain) * _float(own_bias)
            offset = kept if offset is None else offset + kept
    typed = [None if one is None else one.astype(dtype) for one in (gain, offset)]
    return LoraWeights(a.astype(dtype), b.astype(dtype), *typed)


def _refuse_other_weight(path: str, saved: mx.array, module: Any) -> None:
    """PEFT saves the embedding and the output matrix beside adapters of them, normally the model's own."""
    own = dense_weight(module)
    if saved.shape == own.shape:
        difference = mx.linalg.norm(_float(saved) - own) / mx.linalg.norm(own)
        if float(difference) < (_QUANTISED_DIFFERENCE if "scales" in module else _ROUNDED_DIFFERENCE):
            return
    raise ModelError(f"{path}: {PEFT} holds another weight than the model's own, which is not supported")


def _float(array: mx.array) -> mx.array:
    return array.astype(mx.float32)


def _check_shapes(path: str, parts: Mapping[str, mx.array], module: Any, settings: _Settings) -> None:
    if missing := {"a", "b"} - parts.keys():
        raise ModelError(f"{path} lacks its {' and '.join(f'matrix {each.upper()}' for each in sorted(missing))}")
    if settings.is_dora != ("magnitude" in parts):
        raise ModelError(f"{path} {'lacks a' if settings.is_dora else 'has an unexpected'} magnitude of DoRA")
    if type(module) not in LINEARS and parts.keys() - {"a", "b"}:
        what = "an embedding" if type(module) in EMBEDDINGS else "a layer's experts"
        raise ModelError(f"{path} is {what}, for which only plain LoRA is supported")
    experts = () if type(module) in EMBEDDINGS else tuple(module.weight.shape[:-2])
    rank = parts["a"].shape[len(experts)] if parts["a"].ndim > len(experts) else 0
    if settings.rank is not None and rank != settings.rank:
        raise ModelError(f"{path} has the rank {rank}, but {CONFIG} says {settings.rank}")
    width = output_width(module)
    shapes = {"a": (*experts, rank, input_width(module)), "b": (*experts, rank, width)}
    for part, array in parts.items():
        if not array.size or array.shape != shapes.get(part, (width,)):
            raise ModelError(f"{path}: {_SPOKEN[part]} has the shape {array.shape}, not {shapes.get(part, (width,))}")
    if "bias" in parts and "bias" not in module:
        raise ModelError(f"{path} has no bias to replace")


_SPOKEN = {"a": "matrix A", "b": "matrix B", "magnitude": "the magnitude", "bias": "the bias", "b_bias": "B's bias"}


def _mlx_lm_settings(config: Mapping[str, Any]) -> _Settings:
    kind = config.get("fine_tune_type", "lora")
    if kind not in ("lora", "dora"):
        raise ModelError(f"{CONFIG}: fine_tune_type {kind} is not supported, only lora and dora")
    parameters = config.get("lora_parameters")
    if not isinstance(parameters, dict):
        raise ModelError(f"{CONFIG} lacks lora_parameters")
    scale, rank = _number(parameters, "scale"), _number(parameters, "rank")
    return _Settings(lambda path, rank: scale, int(rank), kind == "dora")


def _mlx_lm_part(name: str, tensor: mx.array) -> tuple[str, str, mx.array]:
    path, _, leaf = name.rpartition(".")
    is_of_experts = tensor.ndim == 3
    if leaf == "lora_a":
        return path, "a", tensor if is_of_experts else tensor.T
    if leaf == "lora_b":
        return path, "b", tensor.swapaxes(-1, -2) if is_of_experts else tensor
    if leaf == "m":
        return path, "magnitude", tensor
    raise ModelError(f"{MLX_LM} holds {name}, which is no part of an adapter")


def _peft_settings(config: Mapping[str, Any]) -> _Settings:
    if config["peft_type"] != "LORA":
        raise ModelError(f"{CONFIG}: peft_type {config['peft_type']} is not supported, only LORA")
    if unsupported := [name for name, value in config.items() if value and name not in _HARMLESS]:
        raise ModelError(f"{CONFIG}: not supported: {', '.join(sorted(unsupported))}")
    inits = config.get("init_lora_weights")
    if isinstance(inits, str) and inits.lower().startswith(_INITS_OF_OTHER_WEIGHTS):
        raise ModelError(f"{CONFIG}: init_lora_weights {inits} is not supported: it changes the model's own weights")
    rank, alpha = _number(config, "r"), _number(config, "lora_alpha")
    alphas, ranks = config.get("alpha_pattern") or {}, config.get("rank_pattern") or {}
    root = bool(config.get("use_rslora"))

    def scale(path: str, own_rank: int) -> float:
        own = next((value for key, value in alphas.items() if re.match(rf"(.*\.)?({key})$", path)), alpha)
        return own / (math.sqrt(own_rank) if root else own_rank)

    return _Settings(scale, None if ranks else int(rank), bool(config.get("use_dora")))


_PEFT_PARTS: dict[str, tuple[str, bool]] = {
    "lora_A.weight": ("a", False),
    "lora_B.weight": ("b", True),
    "lora_embedding_A": ("a", False),
    "lora_embedding_B": ("b", True),
    "lora_B.bias": ("b_bias", False),
    "lora_magnitude_vector": ("magnitude", False),
    "lora_magnitude_vector.weight": ("magnitude", False),
    "base_layer.bias": ("bias", False),
    "base_layer.weight": ("weight", False),
    "bias": ("bias", False),
}
"""By the end of a tensor's name: the part, and whether it is transposed here."""


def _peft_part(name: str, tensor: mx.array) -> tuple[str, str, mx.array]:
    path = name.removeprefix("base_model.model.")
    for end, (part, is_transposed) in _PEFT_PARTS.items():
        if path.endswith(f".{end}"):
            return path.removesuffix(f".{end}"), part, tensor.T if is_transposed else tensor
    raise ModelError(f"{PEFT} holds {name}, which is not supported")


def _number(config: Mapping[str, Any], name: str) -> float:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ModelError(f"{CONFIG}: {name} must be a number, not {value!r}")
    return value
