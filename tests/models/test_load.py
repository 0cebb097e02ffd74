"""From a folder to a model that runs packed steps, and what is said about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model
from models import tiny
from models.mixed_steps import MixedSteps

from benchmarks.shapes import SHAPES, random_model
from headrace.backend import blas
from headrace.backend.device import Device
from headrace.errors import ModelError
from headrace.models.levels import Level
from headrace.models.load import LoadedModel, load
from headrace.models.selfcheck import TOLERANCE
from headrace.models.source import read_files
from headrace.types.model import TokenIds

DATA = Path(__file__).parent.parent / "data"
CPU = Device("cpu", "a processor", 1 << 40, 2)
ROWS = (tiny.PROMPT, tiny.PROMPT[::-1][:11], (7,) * 5)


@pytest.fixture(autouse=True)
def stock_blas() -> None:
    blas.install("exact")


def loaded(folder: Path, dtype: str = "auto", self_check: bool = True, numerics: str = "exact") -> LoadedModel:
    return load(read_files("tiny", folder), dtype=dtype, numerics=numerics, self_check=self_check, device=CPU)


def mixed(model: LoadedModel) -> list[mx.array]:
    return MixedSteps(model.packed, ROWS, model.tokens.end).run()


def halve(folder: Path) -> Path:
    """Store the weights in bfloat16."""
    file = str(folder / "model.safetensors")
    weights = {path: weight.astype(mx.bfloat16) for path, weight in dict(mx.load(file)).items()}
    mx.eval(weights)
    mx.save_safetensors(file, weights)
    return folder


def test_a_loaded_model_gives_the_logits_of_the_untouched_one(tmp_path: Path) -> None:
    model = loaded(tiny.save("qwen3_5", tmp_path))
    assert model.tokens == TokenIds(160)
    expected, _ = load_model(tmp_path)
    for got, row in zip(mixed(model), ROWS, strict=True):
        assert mx.array_equal(got, tiny.reference(expected, row))


def test_the_report_tells_name_precision_levels_and_margin(tmp_path: Path) -> None:
    folder = halve(tiny.save("qwen3_5", tmp_path))
    name, precision, layers, margin = loaded(folder).report
    assert name.startswith("model: tiny (qwen3_5), loaded in ")
    assert precision == "weights: float32, stored as bfloat16"
    assert layers == "layers: GatedDeltaNet: packed, Qwen3NextAttention: adapter"
    # in exact numerics nothing differs
    assert margin.startswith("self-check: largest difference 0.0e+00 at logits up to ")


def test_the_report_tells_what_kernels_stand_for(tmp_path: Path) -> None:
    heads = {"head_dim": 64, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
    ropes = {**SHAPES["tiny-qwen3.5"]["rope_parameters"], "mrope_section": [4, 2, 2]}
    config = {**SHAPES["tiny-qwen3.5"], **heads, "rope_parameters": ropes}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    weights = dict(tree_flatten(random_model(config, dtype="float32").parameters()))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    gpu = Device("cuda", "a GPU", 1 << 40, 2)
    for numerics, told in (
        ("exact", ["layers: GatedDeltaNet: packed, Qwen3NextAttention: adapter"]),
        (
            "fast",
            [
                "layers: GatedDeltaNet: kernels, Qwen3NextAttention: kernels",
                "kernels: 3 GatedDeltaNet and 1 Qwen3NextAttention, steps of few tokens compiled",
            ],
        ),
    ):
        model = load(read_files("tiny", tmp_path), dtype="auto", numerics=numerics, self_check=True, device=gpu)
        assert list(model.report[2:-1]) == told


def test_the_report_counts_weights_that_were_left_aside(tmp_path: Path) -> None:
    folder = tiny.save("llama", tmp_path)
    mx.save_safetensors(str(folder / "model-mtp.safetensors"), {"mtp.fc.weight": mx.ones((2, 2)), "a.b": mx.ones(3)})
    assert "weights left aside: 2 that the text model doesn't use" in loaded(folder).report
    assert not any("left aside" in line for line in loaded(tiny.save("qwen3", tmp_path / "other")).report)


def test_without_the_self_check_the_chosen_levels_are_taken(tmp_path: Path) -> None:
    model = loaded(tiny.save("lfm2", tmp_path), self_check=False)
    assert model.report[-1] == "self-check: off"
    assert {one.__name__: level for one, level in model.packed.levels.items()} == {
        "Attention": Level.ADAPTER,
        "ShortConv": Level.ROWS,
    }
    expected = tiny.build("lfm2")
    for got, row in zip(mixed(model), ROWS, strict=True):
        assert mx.array_equal(got, tiny.reference(expected, row))


@pytest.mark.parametrize(
    ("name", "numerics"), [("llama", "exact"), ("qwen3", "exact"), ("gemma3", "fast"), ("qwen3_5", "fast")]
)
def test_half_precision_models_agree_with_the_untouched_one(name: str, numerics: str, tmp_path: Path) -> None:
    folder = halve(tiny.save(name, tmp_path))
    model = loaded(folder, dtype="stored", numerics=numerics)
    assert model.report[1] == "weights: bfloat16, as stored"
    assert Level.WHOLE not in model.packed.levels.values()
    untouched, _ = load_model(folder)
    for got, row in zip(mixed(model), ROWS, strict=True):
        expected = tiny.reference(untouched, row)
        assert got.dtype == expected.dtype == mx.bfloat16
        apart = mx.abs(got.astype(mx.float32) - expected.astype(mx.float32)).max().item()
        assert apart <= TOLERANCE["bfloat16"] * mx.abs(expected).max().item()


@pytest.mark.skipif(mx.default_device().type != mx.DeviceType.cpu, reason="a GPU runs it")
def test_a_precision_that_the_device_cannot_run_is_refused_and_named(tmp_path: Path) -> None:
    # unquantised experts multiply in float32 only on a CPU
    with pytest.raises(ModelError, match=r"tiny can't run on cpu \(weights: bfloat16, stored as float32\): .*float32"):
        loaded(tiny.save("qwen3_moe", tmp_path), dtype="bfloat16")


@pytest.mark.parametrize(("name", "root"), [("tiny_qwen35_torch", "qwen3_5"), ("tiny_qwen3vl_torch", "qwen3_vl")])
def test_a_text_part_saved_alone_runs_like_the_vision_checkpoint_it_came_from(
    name: str, root: str, tmp_path: Path
) -> None:
    """`qwen3_5_text` at the root of config.json: the form of a text-only export."""
    config = json.loads((DATA / name / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config["text_config"]), encoding="utf-8")
    assert config["text_config"]["model_type"] == f"{root}_text"
    stored: dict[str, Any] = dict(mx.load(str(DATA / name / "model.safetensors")))
    text = {
        path.replace("model.language_model.", "model."): one for path, one in stored.items() if "visual" not in path
    }
    assert len(text) < len(stored)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), text)
    model = loaded(tmp_path)
    assert model.report[0].startswith(f"model: tiny ({root}), ")
    with np.load(DATA / name / "expected.npz") as data:
        ids, expected = data["text40/input_ids"].tolist(), data["text40/prefill_logits"]
    got = np.array(MixedSteps(model.packed, [ids, ids[5:30]], model.tokens.end).run()[0])
    assert np.abs(got - expected).max() <= 1e-3
