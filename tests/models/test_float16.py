"""Where M1's and M2's precision is chosen. The Macs are faked: Metal's forms on this CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import metal_forms
import mlx.core as mx
import pytest
from metal_device import FakedMac, fake_mac
from models import tiny

from headrace.backend import device
from headrace.models import load as load_module
from headrace.models.load import LoadedModel, load
from headrace.models.selfcheck import Checked
from headrace.models.source import read_files

M1, M3 = "applegpu_g13g", "applegpu_g15s"


def save(name: str, folder: Path, change: Callable[[str, mx.array], mx.array] = lambda path, weight: weight) -> Path:
    """A tiny model, stored in bfloat16."""
    file = tiny.save(name, folder) / "model.safetensors"
    weights = {path: change(path, each).astype(mx.bfloat16) for path, each in dict(mx.load(str(file))).items()}
    mx.eval(weights)
    mx.save_safetensors(str(file), weights, metadata={"format": "mlx"})
    return folder


def loaded(folder: Path, patch: pytest.MonkeyPatch, architecture: str = M1, **changes: Any) -> LoadedModel:
    metal_forms.force(patch)
    fake_mac(patch, FakedMac.of(16, architecture))
    settings: dict[str, Any] = {"dtype": "auto", "self_check": True, **changes}
    return load(read_files("tiny", folder), numerics="fast", device=device.current(), **settings)


def about_precision(model: LoadedModel) -> list[str]:
    return [line for line in model.report if line.startswith("precision: ")]


def test_an_m1_computes_in_float16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded(save("qwen3", tmp_path), monkeypatch)
    assert (model.precision, model.dtype) == ("float16", "float16")
    assert about_precision(model)[0].startswith("precision: float16, because this GPU emulates bfloat16, beside which")


@pytest.mark.parametrize(
    ("name", "architecture", "changes"),
    [
        ("qwen3", M3, {}),
        ("qwen3", M1, {"dtype": "stored"}),
        ("qwen3", M1, {"self_check": False}),
        ("gemma3_text", M1, {}),
    ],
)
def test_others_keep_bfloat16(
    name: str, architecture: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded(save(name, tmp_path), monkeypatch, architecture, **changes)
    assert model.precision == "bfloat16"
    assert about_precision(model) == []


def test_what_overflows_float16_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are in float16's range, and the activations between the two matrices are not."""

    def widen(path: str, weight: mx.array) -> mx.array:
        factor = 1e5 if "up_proj" in path else 1e-5 if "down_proj" in path else 1.0
        assert float(mx.abs(weight).max()) * factor < 65504
        return weight * factor

    model = loaded(save("qwen3", tmp_path, widen), monkeypatch)
    assert (model.precision, model.dtype) == ("bfloat16", "stored")
    assert "because float16 changes the logits" in about_precision(model)[0]


def test_a_class_that_float16_would_lower_keeps_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def strict(model: Any, kernels: Any, vocab_size: int, precision: str) -> Checked:
        found = real(model, kernels, vocab_size, precision)
        return replace(found, lowered=("Attention differs",)) if precision == "float16" else found

    real = load_module.check
    monkeypatch.setattr(load_module, "check", strict)
    model = loaded(save("qwen3", tmp_path), monkeypatch)
    assert (model.precision, model.dtype, model.lowered) == ("bfloat16", "stored", ())
    assert "because float16 fails the self-check (Attention differs)" in about_precision(model)[0]


def test_float16_and_float32_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded(tiny.save("qwen3", tmp_path), monkeypatch)
    assert (model.precision, model.dtype) == ("float32", "stored")
