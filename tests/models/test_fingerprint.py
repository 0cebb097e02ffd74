"""What changes a model's fingerprint, and what does not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from models import tiny

from headrace.models.fingerprint import SAMPLE_BYTES, fingerprint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save("llama", tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture
def print_of(folder: Path) -> Callable[..., str]:
    model = tiny.build("llama")

    def of(
        directory: Path,
        numerics: str = "exact",
        dtype: mx.Dtype = mx.float32,
        head: str = "",
        layers: str = "adapter",
        kv_bits: int | None = None,
    ) -> str:
        model.set_dtype(dtype)
        return fingerprint(directory, model, numerics, (layers,), head, kv_bits=kv_bits)

    return of


def test_a_copy_under_another_name_is_the_same_model(
    folder: Path, tmp_path: Path, print_of: Callable[..., str]
) -> None:
    copied = shutil.copytree(folder, tmp_path / "copy")
    (copied / "README.md").write_text("about")
    assert print_of(copied) == print_of(folder)


def test_numerics_precision_layers_a_prediction_head_and_bits_of_keys_count(
    folder: Path, print_of: Callable[..., str]
) -> None:
    prints = {
        print_of(folder),
        print_of(folder, "fast"),
        print_of(folder, dtype=mx.bfloat16),
        print_of(folder, head="model-mtp.safetensors"),
        print_of(folder, layers="kernels"),
        print_of(folder, kv_bits=8),
        print_of(folder, kv_bits=4),
    }
    assert len(prints) == 7


def test_config_header_name_and_content_of_every_file_count(
    folder: Path, tmp_path: Path, print_of: Callable[..., str]
) -> None:
    prints = [print_of(folder)]

    def changed(number: int, change: Callable[[Path], None]) -> None:
        copied = shutil.copytree(folder, tmp_path / str(number))
        change(copied)
        prints.append(print_of(copied))

    def edit_config(copied: Path) -> None:
        config = json.loads((copied / "config.json").read_text())
        (copied / "config.json").write_text(json.dumps({**config, "rope_theta": 5.0}))

    def flip(place: int) -> Callable[[Path], None]:
        def change(copied: Path) -> None:
            data = bytearray((copied / "model.safetensors").read_bytes())
            data[place] ^= 1
            (copied / "model.safetensors").write_bytes(bytes(data))

        return change

    changed(1, edit_config)
    changed(2, lambda copied: (copied / "model.safetensors").rename(copied / "model-1.safetensors") and None)
    changed(3, lambda copied: (copied / "extra.safetensors").write_bytes(b"x" * 20) and None)
    changed(4, flip(-1))
    changed(5, flip(20))
    changed(6, flip((folder / "model.safetensors").stat().st_size // 2 - SAMPLE_BYTES // 2))
    changed(7, lambda copied: (copied / "preprocessor_config.json").write_text('{"image_mean": [0.5]}') and None)
    assert len(set(prints)) == len(prints)


def test_every_single_number_of_the_loaded_weights_counts(folder: Path) -> None:
    """Whatever the samples of the files miss: the files are the same here."""
    model, tower = tiny.build("llama"), tiny.build("qwen3")

    def of(*, with_tower: bool = True) -> str:
        return fingerprint(folder, model, "exact", (), "", tower if with_tower else None)

    prints = [of(), of(with_tower=False)]
    for module in (model, tower):
        for _, weight in tree_flatten(module.parameters()):
            before = weight[...] + 0
            first = (0,) * weight.ndim
            weight[first] = weight[first] * 1.0001 + 1e-6
            prints.append(of())
            weight[...] = before
    assert of() == prints[0]
    assert len(set(prints)) == len(prints)
    # two rows that have changed places
    embeddings = model.model.embed_tokens
    rows = embeddings.weight
    embeddings.weight = mx.concatenate([rows[1:2], rows[:1], rows[2:]])
    assert of() not in prints
