"""Where invariant numerics are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine.sparse_models import name_tokens
from models import tiny, tiny_fused
from models.adapter_folders import write_mlx_lm

from headrace.backend import device
from headrace.backend.kernels import Kernels
from headrace.config import Config, EngineConfig, ModelConfig
from headrace.engine.adapters import load_adapters
from headrace.engine.draft_model import load_draft_model
from headrace.engine.engine import Engine
from headrace.errors import ConfigError, ModelError
from headrace.models.levels import choose_levels
from headrace.models.packed import PackedModel
from headrace.models.source import read_files


@tiny_fused.only_operations
def test_other_devices_are_refused(tmp_path: Path) -> None:
    folder = tiny.save("llama", tmp_path)
    with pytest.raises(ModelError, match="^--numerics invariant needs an NVIDIA GPU$"):
        Engine.launch(Config(str(folder), ModelConfig(numerics="invariant")))


@pytest.mark.parametrize(
    ("is_encoder", "sparse_draft", "reason"),
    [
        (True, None, "does not support encoders, and tiny is one"),
        (False, "draft", "does not support --sparse-draft: which tokens it leaves out depends on the cache"),
    ],
)
def test_encoders_and_sparse_prefill_are_refused(
    is_encoder: bool, sparse_draft: str | None, reason: str, tmp_path: Path
) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    if is_encoder:
        (folder / "config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
    else:
        tiny.save("llama", folder)
    config = Config(str(folder), ModelConfig(numerics="invariant"), EngineConfig(sparse_draft=sparse_draft))
    with pytest.raises(ConfigError, match=f"^--numerics invariant {reason}$"):
        Engine.launch(config)


def test_a_draft_model_need_not_be_invariant(tmp_path: Path) -> None:
    """If it had to be, a CPU would refuse it."""
    own, draft = (read_files(name, name_tokens(tiny.save(name, tmp_path / name))) for name in ("llama", "qwen3"))
    config = Config("llama", ModelConfig(numerics="invariant", self_check=False))
    target: Any = SimpleNamespace(tokens=None)
    here = replace(device.current(), kind="cpu")
    assert load_draft_model(config, "draft_model", own, draft, target, here).name == "qwen3"


def test_adapters_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = tiny_fused.widen("qwen3_5_moe", monkeypatch)
    write_mlx_lm(tiny.build(name), tmp_path, 1)
    model = tiny.build(name)
    packed = PackedModel(model, choose_levels(model), Kernels("invariant", "cuda"))
    loaded = SimpleNamespace(packed=packed, precision="float32")
    reason = "--numerics invariant does not support adapters: their sums depend on a step's other tokens"
    with pytest.raises(ModelError, match=f"^--adapter one={tmp_path}: {reason}$"):
        load_adapters([f"one={tmp_path}"], (), loaded)
