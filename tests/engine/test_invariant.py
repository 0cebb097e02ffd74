"""Where invariant numerics are refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from models import tiny, tiny_fused
from models.adapter_folders import write_mlx_lm

from headrace.backend.kernels import Kernels
from headrace.config import Config, ModelConfig
from headrace.engine.adapters import load_adapters
from headrace.engine.engine import Engine
from headrace.errors import ConfigError, ModelError
from headrace.models.levels import choose_levels
from headrace.models.packed import PackedModel


@tiny_fused.only_operations
def test_other_devices_are_refused(tmp_path: Path) -> None:
    folder = tiny.save("llama", tmp_path)
    with pytest.raises(ConfigError, match="^--numerics invariant needs an NVIDIA GPU$"):
        Engine.launch(Config(str(folder), ModelConfig(numerics="invariant")))


def test_adapters_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = tiny_fused.widen("qwen3_5_moe", monkeypatch)
    write_mlx_lm(tiny.build(name), tmp_path, 1)
    model = tiny.build(name)
    packed = PackedModel(model, choose_levels(model), Kernels("invariant", "cuda"))
    loaded = SimpleNamespace(packed=packed, precision="float32")
    reason = "--numerics invariant does not support adapters: their sums depend on a step's other tokens"
    with pytest.raises(ModelError, match=f"^--adapter one={tmp_path}: {reason}$"):
        load_adapters([f"one={tmp_path}"], (), loaded)
