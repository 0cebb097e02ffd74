"""Files that lie about themselves or contradict each other: one line says which, before anything is computed."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from models import tiny

from headrace.config import Config, EngineConfig, ModelConfig
from headrace.engine.engine import Engine
from headrace.errors import ModelError
from headrace.models.source import read_files
from headrace.models.stored_files import check_files, norms_contradiction
from headrace.models.weights import load_weights

Header = dict[str, Any]


def rewrite(folder: Path, edit: Callable[[Header, list[str]], object]) -> Path:
    """Change the header of the weights; the data stays as it is."""
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:end])
    edit(header, sorted(name for name in header if name != "__metadata__"))
    encoded = json.dumps(header).encode()
    file.write_bytes(len(encoded).to_bytes(8, "little") + encoded + whole[end:])
    return folder


def overlap(header: Header, names: list[str]) -> None:
    """Two tensors of one size in the same bytes, so that the sizes of all still add up to less than the data."""
    sizes: dict[int, list[str]] = {}
    for name in names:
        begin, end = header[name]["data_offsets"]
        sizes.setdefault(end - begin, []).append(name)
    first, second = next(alike for alike in sizes.values() if len(alike) > 1)[:2]
    header[second]["data_offsets"] = header[first]["data_offsets"]


@pytest.mark.parametrize(
    "edit",
    [
        overlap,
        lambda header, names: header[names[0]].update(shape=[10**9, 10**9]),
        lambda header, names: header[names[0]].update(shape=[2**62, 4]),
        lambda header, names: header[names[0]].update(shape=[-1, -4]),
        lambda header, names: header[names[0]].update(data_offsets=[10**12, 10**12 + 16]),
        lambda header, names: header[names[0]].update(data_offsets=[16, 0]),
        lambda header, names: header[names[0]].update(dtype="F7"),
        lambda header, names: header.pop(names[0]),
    ],
)
def test_a_header_that_does_not_fit_its_data_is_refused_by_its_files_name(
    edit: Callable[[Header, list[str]], object], tmp_path: Path
) -> None:
    folder = rewrite(tiny.save("llama", tmp_path), edit)
    with pytest.raises(ModelError, match=r"model\.safetensors can't be read") as caught:
        check_files(read_files("tiny", folder))
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("length", [2**62, 2**64 - 1, 0])
def test_a_header_of_an_absurd_length_is_refused(length: int, tmp_path: Path) -> None:
    file = tiny.save("llama", tmp_path) / "model.safetensors"
    file.write_bytes(length.to_bytes(8, "little") + file.read_bytes()[8:])
    with pytest.raises(ModelError, match=r"model\.safetensors can't be read"):
        check_files(read_files("tiny", tmp_path))


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_more_layers_than_tensors_are_refused_before_any_is_made(name: str, tmp_path: Path) -> None:
    folder = tiny.save(name, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config.get("text_config", config)["num_hidden_layers"] = 10**7
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"num_hidden_layers is 10000000, but the weights are \d+ tensors"):
        check_files(read_files("tiny", folder))


@pytest.mark.parametrize("name", ["llama", "qwen3_5", "gpt_oss", "falcon_h1"])
def test_checkpoints_that_are_well_pass(name: str, tmp_path: Path) -> None:
    check_files(read_files("tiny", tiny.save(name, tmp_path)))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_attention_heads": 0}, "can't be loaded: ZeroDivisionError"),
        ({"vocab_size": 10**12}, "can't be loaded: OverflowError"),
        ({"intermediate_size": 2**40}, "can't be loaded: OverflowError"),
        ({"head_dim": 10**9}, "can't be loaded: OverflowError"),
        ({"num_hidden_layers": 10**7}, "num_hidden_layers is 10000000"),
        ({"num_hidden_layers": "four"}, "can't be loaded: TypeError"),
        ({"eos_token_id": "x"}, "eos_token_id"),
        ({"eos_token_id": [[1]]}, "eos_token_id"),
    ],
)
def test_a_config_that_lies_ends_the_start_with_one_line(
    fields: dict[str, Any], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny.save("llama", tmp_path)
    config = {**json.loads((folder / "config.json").read_text()), **fields}
    (folder / "config.json").write_text(json.dumps(config))
    caplog.set_level(logging.INFO)
    with pytest.raises(ModelError, match=said) as caught:
        Engine.launch(Config(str(folder), ModelConfig(self_check=False), EngineConfig()))
    assert "\n" not in caught.value.message
    assert not [record for record in caplog.records if record.exc_info]


def test_a_config_nested_beyond_reading_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ModelError, match=r"config\.json is not valid JSON"):
        read_files("tiny", tmp_path)


@pytest.mark.parametrize("length", [0, -5])
def test_a_context_of_no_tokens_counts_as_none_said(length: int, tmp_path: Path) -> None:
    folder = tiny.save("llama", tmp_path)
    config = {**json.loads((folder / "config.json").read_text()), "max_position_embeddings": length}
    (folder / "config.json").write_text(json.dumps(config))
    assert read_files("tiny", folder).context_length is None


def qwen(folder: Path, *, raw_convolutions: bool, centred_norms: bool) -> Path:
    """A hybrid whose convolutions and norms are stored in these forms, each right alone."""
    tiny.save("qwen3_5", folder)
    file = str(folder / "model.safetensors")
    weights: dict[str, mx.array] = dict(mx.load(file))
    for name, array in weights.items():
        if name.endswith("conv1d.weight"):
            channels = max(array.shape)
            flat = array.reshape(channels, -1)
            weights[name] = flat[:, None, :] if raw_convolutions else flat[:, :, None]
        elif array.ndim == 1 and name.endswith("norm.weight") and "linear_attn" not in name:
            near = mx.linspace(-0.2, 0.3, array.size)
            weights[name] = near if centred_norms else near + 1
    mx.eval(weights)
    mx.save_safetensors(file, weights)
    return folder


@pytest.mark.parametrize("raw_convolutions", [True, False])
@pytest.mark.parametrize("centred_norms", [True, False])
def test_convolutions_and_norms_of_different_forms_are_told(
    raw_convolutions: bool, centred_norms: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers' files have [channels, 1, width] and norms around 0, mlx-lm's [channels, width, 1] and around 1."""
    folder = qwen(tmp_path, raw_convolutions=raw_convolutions, centred_norms=centred_norms)
    told = norms_contradiction(read_files("tiny", folder))
    if raw_convolutions == centred_norms:
        assert told is None
        return
    assert told is not None and "answers will be noise" in told
    engine = Engine.launch(Config(str(folder), ModelConfig(self_check=False), EngineConfig()))
    try:
        assert f"weights: {told}" in engine.model.report
    finally:
        engine.stop()
    assert any(told in record.getMessage() for record in caplog.records)


def test_norms_of_other_families_are_theirs(tmp_path: Path) -> None:
    assert norms_contradiction(read_files("tiny", tiny.save("falcon_h1", tmp_path))) is None


@pytest.mark.parametrize("name", ["consolidated.safetensors", "adapters.safetensors"])
def test_files_that_are_never_loaded_may_be_broken(name: str, tmp_path: Path) -> None:
    folder = tiny.save("llama", tmp_path)
    (folder / name).write_bytes((folder / "model.safetensors").read_bytes()[:-100])  # a download that broke off
    check_files(read_files("tiny", folder))
    load_weights(read_files("tiny", folder))


@pytest.mark.parametrize(
    "name", ["model-2.safetensors", "model-mtp.safetensors", "mtp.safetensors", "mtp/a.safetensors"]
)
def test_every_file_that_is_loaded_is_checked(name: str, tmp_path: Path) -> None:
    folder = tiny.save("llama", tmp_path)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes((folder / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(ModelError, match=f"{name} can't be read"):
        check_files(read_files("tiny", folder))


@pytest.mark.parametrize("has_index", [False, True])
def test_the_files_that_mlx_vlm_loads_are_checked_and_no_others(has_index: bool, tmp_path: Path) -> None:
    folder = tiny.save("llama", tmp_path)
    broken = (folder / "model.safetensors").read_bytes()[:-100]
    (folder / "consolidated.safetensors").write_bytes(broken)
    index = {"weight_map": {"a": "model.safetensors", "b": "other.safetensors"}}
    if has_index:
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        (folder / "adapters.safetensors").write_bytes(broken)
    check_files(read_files("tiny", folder), runs_whole=True)
    (folder / "other.safetensors").write_bytes(broken)
    with pytest.raises(ModelError, match="other.safetensors can't be read"):
        check_files(read_files("tiny", folder), runs_whole=True)
