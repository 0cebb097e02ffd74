"""Which checkpoints load, what is said about those that don't, and the precision in which weights are held."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.mla import MultiLinear
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.utils import load_config, quantize_model
from models import tiny

from headrace.backend import blas
from headrace.errors import ModelError
from headrace.models.source import read_files
from headrace.models.weights import MEMORY_SHARE, Loaded, load_weights, set_precision

ROOMY = 1 << 40
"""Bytes of a machine that everything fits into."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of a 4-bit float of the OCP microscaling formats (exponent 2 bits, mantissa 1); bit 3 is the sign."""


@pytest.fixture(autouse=True)
def stock_blas() -> None:
    blas.install("exact")


def load(folder: Path) -> Loaded:
    return load_weights(read_files("tiny", folder))


def change(folder: Path, edit: Callable[[dict[str, mx.array]], Any]) -> Path:
    """Rewrite the checkpoint's weights."""
    file = folder / "model.safetensors"
    weights = dict(mx.load(str(file)))
    mx.eval(weights)
    edit(weights)
    mx.save_safetensors(str(file), weights)
    return folder


def configure(folder: Path, **fields: Any) -> Path:
    """Change fields of config.json; None takes one out."""
    config = {**json.loads((folder / "config.json").read_text(encoding="utf-8")), **fields}
    config = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def logits(model: Any) -> np.ndarray:
    """Of the untouched model, token by token."""
    return np.array(tiny.reference(model, tiny.PROMPT).astype(mx.float32))


ROTATED = {
    # the older fields, and transformers 5's for the same
    "qwen2": ({"rope_theta": 123.0}, {"rope_type": "default", "rope_theta": 123.0}),
    "llama": (
        {"rope_theta": 123.0, "rope_scaling": {"rope_type": "linear", "factor": 3.0}},
        {"rope_type": "linear", "factor": 3.0, "rope_theta": 123.0},
    ),
    "nemotron": (
        {"rope_theta": 123.0, "partial_rotary_factor": 0.25},
        {"rope_type": "default", "rope_theta": 123.0, "partial_rotary_factor": 0.25},
    ),
    "gemma3_text": (
        {"rope_theta": 456.0, "rope_local_base_freq": 123.0},
        {
            "full_attention": {"rope_type": "default", "rope_theta": 456.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 123.0},
        },
    ),
}


@pytest.mark.parametrize("name", ROTATED)
def test_transformers_5_names_of_rotary_settings_are_read(name: str, tmp_path: Path) -> None:
    older, newer = ROTATED[name]
    unset = dict.fromkeys(("rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor"))
    folder = tiny.save(name, tmp_path)
    wanted = logits(load(configure(folder, **{**unset, **older})).model)
    found = logits(load(configure(folder, **unset, rope_parameters=newer)).model)
    defaults = logits(load(configure(folder, **unset, rope_parameters=None)).model)
    assert np.array_equal(found, wanted)
    assert not np.allclose(found, defaults, atol=1e-4)


# What loads and what does not


@pytest.mark.parametrize("name", ["llama", "qwen3_5", "qwen3_vl", "lfm2"])
def test_a_checkpoint_loads_to_the_weights_it_was_made_of(name: str, tmp_path: Path) -> None:
    loaded = load(tiny.save(name, tmp_path))
    assert loaded.num_unused == 0
    assert not loaded.model.training
    ours, theirs = tiny.parameters(loaded.model), tiny.parameters(tiny.build(name))
    assert ours.keys() == theirs.keys()
    assert all(mx.array_equal(ours[path], theirs[path]) for path in theirs)


@pytest.mark.parametrize("name", ["llama", "qwen3_5", "qwen3_vl"])
def test_extra_weights_are_left_aside(name: str, tmp_path: Path) -> None:
    extra = ["mtp.fc.weight", "mtp.layers.0.input_layernorm.weight", "visual.patch_embed.proj.weight", "a.b.c"]
    folder = change(tiny.save(name, tmp_path), lambda weights: weights.update({one: mx.ones((3, 3)) for one in extra}))
    loaded = load(folder)
    assert np.array_equal(logits(loaded.model), logits(tiny.build(name)))
    # what mlx-lm's model drops is not counted
    assert 1 <= loaded.num_unused <= len(extra)
    if name == "llama":
        assert loaded.num_unused == len(extra)


def test_missing_weights_are_named_and_the_rest_counted(tmp_path: Path) -> None:
    folder = tiny.save("llama", tmp_path)
    change(folder, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelError, match=r"lacks weights: model\.layers\.1\.mlp\.up_proj\.weight$") as caught:
        load(folder)
    assert str(folder) in caught.value.message

    def drop_layer(weights: dict[str, mx.array]) -> None:
        for path in [path for path in weights if path.startswith("model.layers.0.")]:
            del weights[path]

    # a layer of this family: 2 norms, 4 projections with biases, 3 of the MLP with biases; up_proj is gone already
    with pytest.raises(ModelError) as caught:
        load(change(folder, drop_layer))
    named = caught.value.message.partition("lacks weights: ")[2]
    assert named.startswith("model.layers.0.input_layernorm.weight, model.layers.0.mlp.down_proj.bias, ")
    assert named.endswith(" and 12 more")
    assert named.count("model.layers.") == 5


def test_a_weight_of_another_shape_is_named(tmp_path: Path) -> None:
    folder = tiny.save("llama", tmp_path)
    change(folder, lambda weights: weights.update({"model.norm.weight": mx.ones((65,))}))
    with pytest.raises(ModelError, match=r"tiny can't be loaded: .*model\.norm\.weight"):
        load(folder)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    folder = tiny.save("llama", tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"holds no model\*\.safetensors") as caught:
        load(folder)
    assert str(folder) in caught.value.message


@pytest.mark.parametrize("share", [0.0, 0.00005, 0.5, 0.999])
def test_a_truncated_file_is_named(share: float, tmp_path: Path) -> None:
    folder = tiny.save("llama", tmp_path)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    (folder / "model-00002-of-00002.safetensors").write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors can't be loaded") as caught:
        load(folder)
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize("model_type", ["no_such_family", "bert", "../llama", "rope_utils"])
def test_an_unknown_architecture_is_named(model_type: str, tmp_path: Path) -> None:
    folder = configure(tiny.save("llama", tmp_path), model_type=model_type)
    with pytest.raises(ModelError, match=re.escape(model_type)):
        load(folder)


def test_a_config_that_lacks_a_field_names_it(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="tiny can't be loaded: .*num_hidden_layers"):
        load(configure(tiny.save("llama", tmp_path), num_hidden_layers=None))


def test_code_inside_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    folder = configure(tiny.save("llama", tmp_path), model_file="model.py")
    (folder / "model.py").write_text("raise SystemExit('ran')", encoding="utf-8")
    with pytest.raises(ModelError, match=r"can't be loaded: .*model\.py"):
        load(folder)


@pytest.mark.parametrize("name", ["qwen3_5", "ministral3", "gemma4_text", "qwen3_vl"])
def test_loading_leaves_the_parsed_config_as_it_is(name: str, tmp_path: Path) -> None:
    files = read_files(name, tiny.save(name, tmp_path))
    load_weights(files)
    again = read_files(name, tmp_path)
    assert files.config == again.config
    assert files.text_config == again.text_config


# Precision


def stored_in(name: str, dtype: mx.Dtype, folder: Path) -> Path:
    """A checkpoint whose floats are all of one type."""
    cast = {path: weight.astype(dtype) for path, weight in tiny.parameters(tiny.build(name)).items()}
    tiny.save(name, folder)
    mx.save_safetensors(str(folder / "model.safetensors"), cast)
    return folder


def quantised(name: str, folder: Path, mode: str = "affine", bits: int = 4, global_scale: bool = False) -> Path:
    """A checkpoint as converters write it: bfloat16, and quantised where the group size divides.

    global_scale: one more scale for each expert, as nvfp4 may have it.
    """
    tiny.save(name, folder)
    model = tiny.build(name)
    model.set_dtype(mx.bfloat16)

    def fits(_: str, module: Any) -> bool:
        return module.weight.shape[-1] % 32 == 0

    group_size = 16 if mode == "nvfp4" else 32
    model, config = quantize_model(
        model, load_config(folder), group_size, bits, mode=mode, global_scale=global_scale, quant_predicate=fits
    )
    mx.save_safetensors(str(folder / "model.safetensors"), tiny.parameters(model))
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def bits_of(words: mx.array, bits: int) -> np.ndarray:
    """Packed uint32 `[..., n]` as codes `[..., n * 32 / bits]`, lowest bits first."""
    codes = np.array(words)[..., None] >> np.arange(0, 32, bits, dtype=np.uint32)
    return (codes & (2**bits - 1)).reshape(*words.shape[:-1], -1)


def block_scales(scales: np.ndarray, num_codes: int, global_scale: mx.array | None) -> np.ndarray:
    """Scales in bytes as numbers, one for each code: powers of two in mxfp4, floats with 3 mantissa bits in nvfp4.

    A global scale is the largest weight, which the largest code (6) with the largest block scale (448) stands for.
    """
    width = num_codes // scales.shape[-1]
    if width == 32:
        return np.repeat(2.0 ** (scales.astype(np.int32) - 127), width, axis=-1)
    exponents, mantissas = (scales >> 3).astype(np.int32), (scales & 7) / 8
    numbers = np.where(exponents == 0, mantissas * 2.0**-6, (1 + mantissas) * 2.0 ** (exponents - 7))
    if global_scale is not None:
        numbers = numbers * np.array(global_scale)[:, None, None] / (6 * 448)
    return np.repeat(numbers, width, axis=-1)


def by_hand(weights: dict[str, mx.array], bits: int) -> dict[str, np.ndarray]:
    """Numbers that a quantised checkpoint stands for, in float32, by the formats' definitions."""
    numbers: dict[str, np.ndarray] = {}
    for path, array in weights.items():
        stem = path.removesuffix("weight")
        scales, biases = weights.get(stem + "scales"), weights.get(stem + "biases")
        if path.endswith((".scales", ".biases", ".global_scale")):
            continue
        if not path.endswith("weight") or scales is None:
            numbers[path] = np.array(array.astype(mx.float32))
            continue
        codes = bits_of(array, bits)
        if biases is not None:
            per_group = [np.array(one.astype(mx.float32)) for one in (scales, biases)]
            scale, bias = (np.repeat(one, codes.shape[-1] // one.shape[-1], axis=-1) for one in per_group)
            numbers[path] = (scale * codes + bias).astype(np.float32)
        else:
            scale = block_scales(np.array(scales), codes.shape[-1], weights.get(stem + "global_scale"))
            sign = np.where(codes & 8, -1.0, 1.0)
            numbers[path] = (sign * np.array(E2M1)[codes & 7] * scale).astype(np.float32)
    return numbers


def meant(name: str, folder: Path, bits: int = 4) -> nn.Module:
    """The family's plain float32 model with the numbers of a quantised checkpoint."""
    numbers = by_hand(dict(mx.load(str(folder / "model.safetensors"))), bits)
    model = tiny.build(name)
    model.load_weights([(path, mx.array(one)) for path, one in numbers.items()], strict=True)
    return model


def num_quantised(model: Any) -> int:
    return sum("scales" in module for _, module in model.named_modules())


QUANTISED = [
    ("llama", "affine", 4),
    ("llama_tied", "affine", 4),
    ("qwen3_moe", "affine", 4),
    ("deepseek_v3", "affine", 4),
    ("qwen3_5", "affine", 8),
    ("gpt_oss", "mxfp4", 4),
    ("llama_tied", "mxfp4", 4),
    ("qwen3_moe", "nvfp4", 4),
    ("qwen3_moe", "nvfp4 with global scales", 4),
]


@pytest.mark.parametrize(("name", "mode", "bits"), QUANTISED)
def test_quantised_weights_held_in_float32_are_the_numbers_they_stand_for(
    name: str, mode: str, bits: int, tmp_path: Path
) -> None:
    mode, _, more = mode.partition(" ")
    folder = quantised(name, tmp_path, mode, bits, global_scale=bool(more))
    model = load(folder).model
    assert num_quantised(model) >= 8
    assert set_precision(model, "auto", "cpu", ROOMY) == f"weights: float32, stored as {bits}-bit"
    assert num_quantised(model) == 0
    expected = meant(name, folder, bits)
    ours, theirs = tiny.parameters(model), tiny.parameters(expected)
    assert ours.keys() == theirs.keys()
    for path, weight in theirs.items():
        assert ours[path].dtype == mx.float32
        assert mx.allclose(ours[path], weight, rtol=1e-6, atol=1e-7), path
    assert np.abs(logits(model) - logits(expected)).max() <= 1e-4


def test_dequantising_reaches_every_kind_of_layer(tmp_path: Path) -> None:
    kinds: set[type] = set()
    for name in ("llama_tied", "qwen3_moe", "deepseek_v3"):
        model = load(quantised(name, tmp_path / name)).model
        held = [path for path, module in model.named_modules() if "scales" in module]
        set_precision(model, "float32", "cpu", ROOMY)
        modules = dict(model.named_modules())
        kinds |= {type(modules[path]) for path in held}
    assert kinds == {nn.Linear, nn.Embedding, SwitchLinear, MultiLinear}


def test_biases_of_quantised_layers_are_kept(tmp_path: Path) -> None:
    # this llama has a bias in every projection, gpt-oss one in every expert: without them logits move by far more
    for name, mode in (("llama", "affine"), ("gpt_oss", "mxfp4")):
        folder = quantised(name, tmp_path / name, mode)
        model = load(folder).model
        set_precision(model, "float32", "cpu", ROOMY)
        names = [path for path in tiny.parameters(model) if path.endswith("proj.bias")]
        assert len(names) >= 12
        assert all(mx.any(tiny.parameters(model)[path] != 0) for path in names)


@pytest.mark.parametrize(
    ("dtype", "word"), [(mx.float32, "float32"), (mx.bfloat16, "bfloat16"), (mx.float16, "float16")]
)
def test_auto_on_a_cpu_is_float32_and_says_what_was_stored(dtype: mx.Dtype, word: str, tmp_path: Path) -> None:
    model = load(stored_in("qwen3_5", dtype, tmp_path)).model
    line = set_precision(model, "auto", "cpu", ROOMY)
    assert line == ("weights: float32" if word == "float32" else f"weights: float32, stored as {word}")
    assert {weight.dtype for weight in tiny.parameters(model).values()} == {mx.float32}
    expected = {
        path: one.astype(dtype).astype(mx.float32) for path, one in tiny.parameters(tiny.build("qwen3_5")).items()
    }
    assert all(mx.array_equal(weight, expected[path]) for path, weight in tiny.parameters(model).items())


@pytest.mark.parametrize("device", ["cuda", "metal"])
def test_auto_on_a_gpu_keeps_what_is_stored(device: str, tmp_path: Path) -> None:
    model = load(stored_in("llama", mx.bfloat16, tmp_path / "half")).model
    assert set_precision(model, "auto", device, ROOMY) == "weights: bfloat16, as stored"
    assert {weight.dtype for weight in tiny.parameters(model).values()} == {mx.bfloat16}
    model = load(quantised("llama", tmp_path / "four")).model
    assert set_precision(model, "auto", device, ROOMY) == "weights: 4-bit, as stored"
    assert num_quantised(model) > 0


@pytest.mark.parametrize("name", ["llama_tied", "qwen3_moe"])
def test_without_memory_for_float32_weights_stay_as_stored_and_it_says_so(name: str, tmp_path: Path) -> None:
    needed = 4 * sum(weight.size for weight in tiny.parameters(tiny.build(name)).values())
    folder = quantised(name, tmp_path)
    enough = int(needed / MEMORY_SHARE) + 1
    model = load(folder).model
    line = set_precision(model, "auto", "cpu", enough - 2)
    assert line.startswith("weights: 4-bit, as stored; in float32 they would run faster on this CPU, but take ")
    assert line.endswith(f" {needed / 1e9:.1f} of {(enough - 2) / 1e9:.1f} GB")
    assert num_quantised(model) > 0
    assert set_precision(load(folder).model, "auto", "cpu", enough) == "weights: float32, stored as 4-bit"
    # what is asked for by name is done
    assert set_precision(load(folder).model, "float32", "cpu", 1) == "weights: float32, stored as 4-bit"


def test_stored_keeps_everything(tmp_path: Path) -> None:
    folder = quantised("llama", tmp_path)
    model = load(folder).model
    assert set_precision(model, "stored", "cpu", ROOMY) == "weights: 4-bit, as stored"
    weights = dict(mx.load(str(folder / "model.safetensors")))
    ours = tiny.parameters(model)
    assert ours.keys() == weights.keys()
    assert all(ours[path].dtype == one.dtype and mx.array_equal(ours[path], one) for path, one in weights.items())


def test_half_precision_on_quantised_weights_concerns_the_rest_and_the_line_says_so(tmp_path: Path) -> None:
    folder = quantised("llama", tmp_path)
    model = load(folder).model
    assert set_precision(model, "float16", "cpu", ROOMY) == "weights: 4-bit, as stored, and float16 around them"
    floats = {weight.dtype for weight in tiny.parameters(model).values() if mx.issubdtype(weight.dtype, mx.floating)}
    assert floats == {mx.float16}
    assert num_quantised(model) > 0


def test_a_quantised_layer_of_an_unknown_kind_stays_and_the_line_says_so(tmp_path: Path) -> None:
    class Unknown(nn.QuantizedLinear):
        pass

    model = load(quantised("llama", tmp_path)).model
    model.lm_head.__class__ = Unknown
    assert set_precision(model, "float32", "cpu", ROOMY) == "weights: 4-bit, as stored, and float32 around them"
    assert num_quantised(model) == 1
    assert logits(model).shape[0] == len(tiny.PROMPT)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_spares_the_weights_that_need_more(dtype: str, tmp_path: Path) -> None:
    model = load(tiny.save("qwen3_5", tmp_path)).model
    assert set_precision(model, dtype, "cpu", ROOMY) == f"weights: {dtype}, stored as float32"
    for path, weight in tiny.parameters(model).items():
        # decay rates sit in an exponential of an exponential; mlx-lm's own converter leaves them alone too
        assert weight.dtype == (mx.float32 if path.endswith("A_log") else getattr(mx, dtype)), path


def test_weights_are_evaluated_so_that_the_files_may_go(tmp_path: Path) -> None:
    for dtype in ("auto", "stored"):
        folder = quantised("llama", tmp_path / dtype)
        model = load(folder).model
        set_precision(model, dtype, "cpu", ROOMY)
        other = load(folder).model
        set_precision(other, dtype, "cpu", ROOMY)
        expected = logits(other)
        (folder / "model.safetensors").write_bytes(b"")
        assert np.array_equal(logits(model), expected)
        assert len(make_prompt_cache(model)) == 3
