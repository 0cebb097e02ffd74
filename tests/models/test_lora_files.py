"""Adapters of PEFT's format equal the merged weights, and what doesn't fit is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from models import tiny
from models.adapter_folders import merge_peft, peft_tensors, scale_of, write_mlx_lm, write_peft

from headrace.backend.kernels import Kernels
from headrace.errors import ModelError
from headrace.models.levels import choose_levels
from headrace.models.lora_files import fit_adapter, read_adapter
from headrace.models.packed import PackedModel
from headrace.models.step import Row
from headrace.models.weights import dense_weight
from headrace.state.sequence import SequenceState
from headrace.state.slabs import StatePool

TOLERANCE = 1e-4
IDS = list(tiny.PROMPT)


def build() -> nn.Module:
    """With biases of queries, keys and values."""
    return tiny.build("qwen2")


@pytest.fixture(scope="module")
def packed() -> PackedModel:
    model = build()
    return PackedModel(model, choose_levels(model), Kernels("fast", "cpu"))


def logits_with(packed: PackedModel, folder: Path) -> mx.array:
    slot = packed.loras.add(fit_adapter(read_adapter(folder), packed.loras, mx.float32))
    state = SequenceState(StatePool())
    state.begin(len(IDS))
    logits = packed.forward([Row(state, IDS, adapter=slot)], range(len(IDS)))
    mx.eval(logits)
    packed.loras.remove(slot)
    return logits


def merged(tensors: dict[str, np.ndarray], scale: float) -> mx.array:
    model = build()
    merge_peft(model, tensors, scale)
    return tiny.reference(model, IDS)


def with_magnitudes(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    random = np.random.default_rng(9)
    ends = [name for name in tensors if name.endswith("lora_B.weight")]
    return tensors | {
        name.replace("lora_B.weight", "lora_magnitude_vector"): random.uniform(0.5, 1.5, tensors[name].shape[0])
        for name in ends
    }


def with_biases(tensors: dict[str, np.ndarray], end: str) -> dict[str, np.ndarray]:
    random = np.random.default_rng(9)
    return tensors | {
        name.replace("lora_B.weight", end): random.normal(0, 0.3, tensor.shape[0])
        for name, tensor in tensors.items()
        if name.endswith(("q_proj.lora_B.weight", "v_proj.lora_B.weight"))
    }


Case = tuple[Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]], dict[str, Any], float]
CASES: dict[str, Case] = {
    "plain": (lambda tensors: tensors, {}, scale_of(4, 8)),
    "rslora": (lambda tensors: tensors, {"use_rslora": True}, scale_of(4, 8, root=True)),
    "alpha_pattern": (lambda tensors: tensors, {"lora_alpha": 1, "alpha_pattern": {r".*_proj": 6}}, scale_of(4, 6)),
    "dora": (with_magnitudes, {"use_dora": True}, scale_of(4, 8)),
    "dora_over_other_biases": (
        lambda tensors: with_biases(with_magnitudes(tensors), "base_layer.bias"),
        {"use_dora": True, "bias": "all"},
        scale_of(4, 8),
    ),
    "lora_bias": (lambda tensors: with_biases(tensors, "lora_B.bias"), {"lora_bias": True}, scale_of(4, 8)),
    "bias": (lambda tensors: with_biases(tensors, "base_layer.bias"), {"bias": "all"}, scale_of(4, 8)),
}


@pytest.mark.parametrize("case", CASES)
def test_pefts_adapters_equal_merged_weights(case: str, packed: PackedModel, tmp_path: Path) -> None:
    change, config, scale = CASES[case]
    tensors = change(peft_tensors(build(), 1))
    difference = mx.abs(logits_with(packed, write_peft(tmp_path, tensors, **config)) - merged(tensors, scale))
    assert difference.max().item() < TOLERANCE


def test_biases_that_replace_the_models_need_no_product(packed: PackedModel, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj"
    bias = np.random.default_rng(3).normal(0, 1, packed.loras.modules[name].weight.shape[0])
    expected = build()
    expected.layers[0].self_attn.q_proj.bias = mx.array(bias.astype(np.float32))
    folder = write_peft(tmp_path, {f"{name}.base_layer.bias": bias}, bias="all")
    assert mx.abs(logits_with(packed, folder) - tiny.reference(expected, IDS)).max().item() < TOLERANCE


@pytest.mark.parametrize("bits", [None, 4])
def test_weights_that_peft_saves_with_an_embeddings_adapter_are_the_models_own(
    bits: int | None, tmp_path: Path
) -> None:
    """Of both matrices' adapters, in a model where they are two. Merged: E + s (B A)ᵀ, and W + s B A."""

    def build() -> nn.Module:
        model = tiny.build("llama")
        if bits is not None:
            nn.quantize(model, group_size=32, bits=bits)
        return model

    expected, stored = build(), tiny.build("llama")
    random, scale = np.random.default_rng(4), scale_of(4, 8)
    tensors = {}
    for path, kind in (("model.embed_tokens", "embedding_"), ("lm_head", "")):
        weight = np.array(dict(stored.named_modules())[path].weight)
        a, b = (random.normal(0, 0.06, shape) for shape in ((4, len(weight)), (weight.shape[1], 4)))
        if not kind:
            a, b = b.T, a.T
        tensors[f"{path}.lora_{kind}A{'' if kind else '.weight'}"] = a
        tensors[f"{path}.lora_{kind}B{'' if kind else '.weight'}"] = b
        tensors[f"{path}.base_layer.weight"] = weight
        merged = expected.model.embed_tokens if kind else expected.lm_head
        dense = nn.Embedding(*weight.shape) if kind else nn.Linear(*weight.shape[::-1], bias=False)
        dense.weight = dense_weight(merged) + mx.array((scale * ((b @ a).T if kind else b @ a)).astype(np.float32))
        parent = expected.model if kind else expected
        parent[path.rpartition(".")[2]] = dense
    model = build()
    packed = PackedModel(model, choose_levels(model), Kernels("fast", "cpu"))
    folder = write_peft(tmp_path, tensors)
    difference = mx.abs(logits_with(packed, folder) - tiny.reference(expected, IDS))
    assert difference.max().item() < TOLERANCE
    for changed in (np.roll(tensors["lm_head.base_layer.weight"], 1, 0), tensors["lm_head.base_layer.weight"][:-1]):
        folder = write_peft(tmp_path, tensors | {"lm_head.base_layer.weight": changed})
        refused(packed, folder, "lm_head: adapter_model.safetensors holds another weight than the model's own")


def test_ranks_may_differ_by_module(packed: PackedModel, tmp_path: Path) -> None:
    tensors = peft_tensors(build(), 1)
    wide = {name: tensor for name, tensor in peft_tensors(build(), 2, rank=6).items() if ".mlp.down_proj." in name}
    folder = write_peft(tmp_path, tensors | wide, rank_pattern={"down_proj": 6}, lora_alpha=0, alpha_pattern={"mlp": 0})
    assert mx.abs(logits_with(packed, folder) - tiny.reference(build(), IDS)).max().item() < TOLERANCE
    folder = write_peft(tmp_path, tensors | wide, rank_pattern={"down_proj": 6}, alpha_pattern={"down_proj": 12})
    assert mx.abs(logits_with(packed, folder) - merged(tensors | wide, 2.0)).max().item() < TOLERANCE


def test_a_text_model_inside_of_a_wrapper_is_found(tmp_path: Path) -> None:
    model = tiny.build("qwen3_5")
    wrapped = PackedModel(model, choose_levels(model), Kernels("fast", "cpu"))
    path = next(path for path in wrapped.loras.modules if path.endswith("q_proj"))
    assert path.startswith("language_model.model.layers.")
    rows, width = wrapped.loras.modules[path].weight.shape
    for spelled in (path.removeprefix("language_model."), path.replace("language_model.model", "model.language_model")):
        tensors = {f"{spelled}.lora_A.weight": np.ones((4, width)), f"{spelled}.lora_B.weight": np.ones((rows, 4))}
        folder = write_peft(tmp_path / spelled, tensors)
        assert set(fit_adapter(read_adapter(folder), wrapped.loras, mx.float32)) == {path}


def test_the_fingerprint_is_of_all_numbers(tmp_path: Path) -> None:
    tensors = peft_tensors(build(), 1)
    first = read_adapter(write_peft(tmp_path / "a", tensors)).fingerprint
    assert read_adapter(write_peft(tmp_path / "b", tensors)).fingerprint == first
    name = next(iter(tensors))
    tensors[name][0, 0] += 1
    assert read_adapter(write_peft(tmp_path / "c", tensors)).fingerprint != first
    tensors[name][0, 0] -= 1
    assert read_adapter(write_peft(tmp_path / "d", tensors, lora_alpha=9)).fingerprint != first


# fmt: off
PEFT_REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "type": ({"peft_type": "IA3"}, "peft_type IA3"),
    "modules_to_save": ({"modules_to_save": ["lm_head"]}, "not supported: modules_to_save"),
    "transposed": ({"fan_in_fan_out": True, "layer_replication": [[0, 1]]}, "fan_in_fan_out, layer_replication"),
    "activated": ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens"),
    "unknown": ({"new_method": {"a": 1}}, "new_method"),
    "init": ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4"),
    "alpha": ({"lora_alpha": "8"}, "lora_alpha must be a number"),
    "rank": ({"r": 5}, "has the rank 4, but adapter_config.json says 5"),
    "dora": ({"use_dora": True}, "lacks a magnitude of DoRA"),
}
# fmt: on


@pytest.mark.parametrize("case", PEFT_REFUSALS)
def test_pefts_options_are_refused_by_name(case: str, packed: PackedModel, tmp_path: Path) -> None:
    config, message = PEFT_REFUSALS[case]
    refused(packed, write_peft(tmp_path, peft_tensors(build(), 1), **config), message)


def refused(packed: PackedModel, folder: Path, message: str) -> None:
    num_bytes = packed.loras.num_bytes
    with pytest.raises(ModelError) as error:
        packed.loras.add(fit_adapter(read_adapter(folder), packed.loras, mx.float32))
    assert message in error.value.message
    assert packed.loras.num_bytes == num_bytes


Q = "model.layers.0.self_attn.q_proj"
A, B = f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"


def tensors_with(**changes: Any) -> dict[str, np.ndarray]:
    tensors = {name: tensor for name, tensor in peft_tensors(build(), 1).items() if name in (A, B)}
    tensors |= changes
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


# fmt: off
TENSOR_REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "no_b": ({B: None}, f"{Q} lacks its matrix B"),
    "shape_a": ({A: np.ones((4, 3))}, f"{Q}: matrix A has the shape (4, 3), not (4, "),
    "shape_b": ({B: np.ones((3, 4))}, f"{Q}: matrix B has the shape (4, 3), not (4, "),
    "one_axis": ({A: np.ones(4)}, f"{Q}: matrix A has the shape (4,)"),
    "nan": ({A: lambda a: np.where(a == a[0, 0], np.nan, a)}, f"not all numbers are finite as mlx.core.float32: {Q}"),
    "infinite": ({B: lambda b: b * np.inf}, f"not all numbers are finite as mlx.core.float32: {Q}"),
    "unknown_module": ({"model.layers.77.mlp.up_proj.lora_A.weight": np.ones((4, 4))}, "no module model.layers.77"),
    "unknown_tensor": ({f"{Q}.lora_C.weight": np.ones(4)}, f"{Q}.lora_C.weight, which is not supported"),
    "norm": ({"model.norm.lora_A.weight": np.ones((4, 4))}, "adapters of model.norm, a RMSNorm here"),
    "no_bias": ({"model.layers.0.self_attn.o_proj.base_layer.bias": np.ones(4)}, "lacks its matrix A and matrix B"),
    "magnitude": ({f"{Q}.lora_magnitude_vector": np.ones(4)}, "unexpected magnitude"),
    "embedding_bias": (
        {"model.embed_tokens.lora_embedding_A": np.ones((4, 150)),
         "model.embed_tokens.lora_embedding_B": np.ones((4, 4)),
         "model.embed_tokens.lora_B.bias": np.ones(4)}, "only plain LoRA"),
}
# fmt: on


@pytest.mark.parametrize("case", TENSOR_REFUSALS)
def test_tensors_that_do_not_fit_are_refused_by_name(case: str, packed: PackedModel, tmp_path: Path) -> None:
    changes, message = TENSOR_REFUSALS[case]
    tensors = tensors_with()
    made = {name: change(tensors[name]) if callable(change) else change for name, change in changes.items()}
    refused(packed, write_peft(tmp_path, tensors_with(**made)), message)


def test_numbers_beyond_the_models_precision_are_refused(packed: PackedModel, tmp_path: Path) -> None:
    folder = write_peft(tmp_path, tensors_with(**{B: np.full((tensors_with()[B].shape[0], 4), 1e6)}))
    with pytest.raises(ModelError, match="not all numbers are finite as mlx.core.float16"):
        fit_adapter(read_adapter(folder), packed.loras, mx.float16)


def test_a_magnitude_of_a_row_of_zeros_is_refused(tmp_path: Path) -> None:
    model = build()
    model.layers[0].self_attn.q_proj.weight[3] = 0
    broken = PackedModel(model, choose_levels(model), Kernels("fast", "cpu"))
    tensors = tensors_with()
    tensors[B] = np.zeros_like(tensors[B])
    refused(broken, write_peft(tmp_path, with_magnitudes(tensors), use_dora=True), "not all numbers are finite")


def test_files_that_cannot_be_read_are_refused(packed: PackedModel, tmp_path: Path) -> None:
    whole = write_mlx_lm(build(), tmp_path / "whole", 1)
    refused(packed, tmp_path / "nowhere", "there is no such folder")
    for name, text, message in (
        ("adapter_config.json", None, "holds no adapter_config.json"),
        ("adapter_config.json", b"{", "is no JSON"),
        ("adapter_config.json", b"[]", "must hold an object"),
        ("adapter_config.json", b'{"peft_type": "LORA"}', "holds no adapter_model.safetensors"),
        ("adapters.safetensors", None, "holds no adapters.safetensors"),
        ("adapters.safetensors", b"\x00" * 30, "is no safetensors file that can be read"),
        ("adapters.safetensors", b"", "is no safetensors file that can be read"),
    ):
        folder = shutil.copytree(whole, tmp_path / "broken", dirs_exist_ok=True)
        file = folder / name
        file.unlink() if text is None else file.write_bytes(text)
        refused(packed, folder, message)
    mx.save_safetensors(str(folder / "adapters.safetensors"), {})
    refused(packed, folder, "holds no tensors")


def test_mlx_lms_options_are_refused_by_name(packed: PackedModel, tmp_path: Path) -> None:
    folder = write_mlx_lm(build(), tmp_path, 1)
    config = json.loads((folder / "adapter_config.json").read_text())
    lora = config["lora_parameters"]
    for change, message in (
        ({"fine_tune_type": "full"}, "fine_tune_type full"),
        ({"lora_parameters": None}, "lacks lora_parameters"),
        ({"lora_parameters": {**lora, "scale": None}}, "scale must be a number"),
        ({"lora_parameters": {**lora, "rank": True}}, "rank must be a number"),
        ({"lora_parameters": {**lora, "rank": 3}}, "has the rank 4, but adapter_config.json says 3"),
        ({"fine_tune_type": "dora"}, "lacks a magnitude"),
    ):
        (folder / "adapter_config.json").write_text(json.dumps(config | change))
        refused(packed, folder, message)


def test_what_experts_do_not_take_is_refused(tmp_path: Path) -> None:
    model = tiny.build("gpt_oss")
    packed = PackedModel(model, choose_levels(model), Kernels("fast", "cpu"))
    folder = write_mlx_lm(tiny.build("gpt_oss"), tmp_path, 1, keys=["mlp.experts.up_proj"])
    tensors = mx.load(str(folder / "adapters.safetensors"))
    name = next(name for name in tensors if name.endswith("lora_a"))
    path = name.removesuffix(".lora_a")
    num_experts, rank, width = tensors[name].shape
    for changes, message in (
        ({name: tensors[name][0]}, f"{path}: matrix A has the shape ({width}, {rank}), not"),
        ({name: tensors[name][:-1]}, f"{path}: matrix A has the shape ({num_experts - 1}, {rank}, {width}), not"),
        ({f"{path}.m": mx.ones((width,))}, "unexpected magnitude"),
    ):
        mx.save_safetensors(str(folder / "adapters.safetensors"), tensors | changes)
        refused(packed, folder, message)
    bias = np.zeros(packed.loras.modules[path].bias.shape)
    refused(packed, write_peft(tmp_path / "peft", {f"{path}.base_layer.bias": bias}, bias="all"), "lacks its matrix A")


def test_dora_of_embeddings_is_refused(packed: PackedModel, tmp_path: Path) -> None:
    folder = write_mlx_lm(build(), tmp_path, 1, dora=True, keys=["model.embed_tokens"])
    refused(packed, folder, "model.embed_tokens is an embedding, for which only plain LoRA is supported")
