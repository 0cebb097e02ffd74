"""Models that are quantised when they are loaded, and their kept copies."""

from __future__ import annotations

import json
import logging
import math
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import quantize_model

from headrace.backend.device import Device
from headrace.errors import ModelError
from headrace.models import load as load_module
from headrace.models.built_in import MINIATURE
from headrace.models.load import LoadedModel, load
from headrace.models.quantized import FORMS, Quantization, bits_per_weight, distance, kept_bytes, quantize
from headrace.models.source import ModelFiles, read_files
from headrace.models.weights import load_weights, parameters_of

CPU = Device("cpu", "Some CPU", 24_000_000_000, 2)
SAMPLE = tuple(range(40, 72))


@pytest.fixture
def files(tmp_path: Path) -> ModelFiles:
    """The miniature without its tower and head."""
    shutil.copytree(MINIATURE, tmp_path / "model", ignore=shutil.ignore_patterns("draft"))
    return read_files("miniature", tmp_path / "model")


def loaded_with(files: ModelFiles, wanted: Quantization, *, self_check: bool = False) -> LoadedModel:
    return load(files, dtype="auto", numerics="fast", self_check=self_check, device=CPU, quantization=wanted)


def line_of(loaded: LoadedModel) -> str:
    (line,) = [line for line in loaded.report if line.startswith("quantised: ")]
    return line


def weights_of(loaded: LoadedModel) -> dict[str, np.ndarray]:
    return {name: np.array(array.astype(mx.float32)) for name, array in parameters_of(loaded.packed.model).items()}


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_those_of_mlx_lms_converter(form: str, files: ModelFiles) -> None:
    own = quantize(files, form, "float32").loaded.model
    model: Any = load_weights(files).model
    model.set_dtype(mx.float32)
    settings = FORMS[form]
    theirs, _ = quantize_model(model, dict(files.config), settings["group_size"], settings["bits"], settings["mode"])
    expected = {name: np.array(array.astype(mx.float32)) for name, array in parameters_of(theirs).items()}
    found = {name: np.array(array.astype(mx.float32)) for name, array in parameters_of(own).items()}
    assert found.keys() == expected.keys()
    assert any(name.endswith(".scales") for name in found)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def test_a_distance_is_that_of_its_definition() -> None:
    original, other = np.log([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]), np.log([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]])
    # logits are log-probabilities but for a constant
    found = distance(mx.array(original + 3.0), mx.array(other - 1.0))
    assert found.divergence == pytest.approx((0.5 * math.log(2) - 0.25 * math.log(2)) / 2, abs=1e-6)
    assert (found.agreement, found.num_tokens) == (0.5, 2)


def test_bits_with_scales() -> None:
    # as the documentation of choosing a model has them: 0.56 and 1.06 bytes
    assert [bits_per_weight(form) for form in ("4", "8", "mxfp4")] == [4.5, 8.5, 4.25]


def test_the_report_says_what_was_done_and_how_far_it_is(files: ModelFiles) -> None:
    eight, four = (line_of(loaded_with(files, Quantization(form, None, 0, SAMPLE))) for form in ("8", "4"))
    assert "of the original: self-check: off" in eight
    assert "not kept" in eight
    divergences = [float(line.partition("KL divergence ")[2].split()[0]) for line in (eight, four)]
    assert 0 <= divergences[0] < divergences[1]
    assert f"of {len(SAMPLE)} positions" in four


def test_original_and_result_pass_the_self_check(files: ModelFiles) -> None:
    loaded = loaded_with(files, Quantization("4"), self_check=True)
    assert not loaded.lowered
    assert "of the original: self-check: largest difference" in line_of(loaded)
    assert sum(line.startswith("self-check: largest difference") for line in loaded.report) == 1


def test_a_kept_copy_is_read_without_the_original(
    files: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = Quantization("4", tmp_path / "cache", 1_000_000_000, SAMPLE)
    first = loaded_with(files, wanted)
    assert 0 < kept_bytes(tmp_path / "cache") < (MINIATURE / "model.safetensors").stat().st_size
    assert (tmp_path / "cache").stat().st_mode & 0o077 == 0

    def refuse(*_: object) -> None:
        raise AssertionError("the original is not to be loaded")

    for name in ("load_weights", "quantize"):
        monkeypatch.setattr(load_module, name, refuse)
    second = loaded_with(files, wanted)
    assert "read from" in line_of(second)
    assert line_of(first).rpartition("; ")[2] == line_of(second).rpartition("; ")[2]
    before, after = weights_of(first), weights_of(second)
    assert before.keys() == after.keys()
    for name, array in before.items():
        np.testing.assert_array_equal(after[name], array)


@pytest.mark.parametrize(
    "damage",
    ["flip", "cut", pytest.param("notes", marks=pytest.mark.slow), pytest.param("gone", marks=pytest.mark.slow)],
)
def test_a_damaged_copy_is_made_anew(
    damage: str, files: ModelFiles, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = Quantization("4", tmp_path / "cache", 1_000_000_000)
    first = weights_of(loaded_with(files, wanted))
    (weights,) = (tmp_path / "cache").glob("*/*/model.safetensors")
    content = bytearray(weights.read_bytes())
    if damage == "flip":
        content[-1000] ^= 1
        weights.write_bytes(content)
    elif damage == "cut":
        weights.write_bytes(content[: len(content) // 2])
    elif damage == "notes":
        (weights.parent / "kept.json").write_text("[")
    else:
        weights.unlink()
    with caplog.at_level(logging.WARNING, "headrace"):
        again = loaded_with(files, wanted)
    assert "kept in" in line_of(again)
    assert "is damaged and is made anew" in caplog.text or damage == "gone"
    for name, array in first.items():
        np.testing.assert_array_equal(weights_of(again)[name], array)


def test_a_copy_is_of_one_model_and_one_form(files: ModelFiles, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for form in ("4", "8"):
        assert "kept in" in line_of(loaded_with(files, Quantization(form, cache, 1_000_000_000)))
    assert len(list(cache.glob("quantized/*"))) == 2
    (config := files.directory / "config.json").write_text(config.read_text() + "\n")
    assert "kept in" in line_of(loaded_with(files, Quantization("4", cache, 1_000_000_000)))


def test_copies_stay_within_the_quota(files: ModelFiles, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = tmp_path / "cache"
    loaded_with(files, Quantization("8", cache, 1_000_000_000))
    size = kept_bytes(cache)
    # the larger, older one is evicted
    loaded_with(files, Quantization("4", cache, size))
    assert len(list(cache.glob("quantized/*"))) == 1
    assert kept_bytes(cache) < size
    with caplog.at_level(logging.WARNING, "headrace"):
        assert "not kept" in line_of(loaded_with(files, Quantization("8", cache, 1000)))
    assert "more than --cache-disk-quota" in caplog.text


def test_a_quantised_model_is_refused_by_name(files: ModelFiles) -> None:
    config = {**files.config, "quantization": {"bits": 4, "group_size": 64}}
    (files.directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="--quantize: miniature is quantised already"):
        loaded_with(read_files("miniature", files.directory), Quantization("4"))


def test_an_original_that_memory_has_no_room_for_is_only_read_layer_by_layer(files: ModelFiles) -> None:
    small = Device("cpu", "Some CPU", 1_000_000, 2)
    loaded = load(
        files,
        dtype="auto",
        numerics="fast",
        self_check=False,
        device=small,
        quantization=Quantization("4", sample=SAMPLE),
    )
    assert "distance from the original not measured" in line_of(loaded)
    assert "of the original" not in line_of(loaded)
