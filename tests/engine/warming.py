"""Engines on tiny models whose steps are compiled, on any machine."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from models import tiny, tiny_fused, tiny_head

from headrace.backend.kernels import Kernels
from headrace.config import Config, EngineConfig, ModelConfig
from headrace.engine.engine import Engine
from headrace.models import load

VOCAB = 97
PATIENCE_S = 120


def save(family: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *, has_head: bool = False) -> Path:
    """A family with heads as wide as the kernels want."""
    name = tiny_fused.widen(family, monkeypatch)
    if not has_head:
        return tiny.save(name, folder)
    monkeypatch.setattr(tiny_head, "HEAD_DIM", tiny_fused.HEAD_DIM)
    return tiny_head.save_with_head(name, folder, tiny_head.prefixed(tiny_head.draw(name)))


def launch(folder: Path, **knobs: object) -> Engine:
    """An engine with kernels for NVIDIA GPUs, or the operations that stand for them."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(load, "Kernels", lambda numerics, device: Kernels("fast", "cuda"))
        engine = EngineConfig(**{"max_num_seqs": 3, "prefill_chunk": 128, "max_draft_tokens": 2, **knobs})
        return Engine.launch(Config(str(folder), ModelConfig(dtype=tiny_fused.DTYPE, self_check=False), engine))


def wait_until_warm(engine: Engine) -> None:
    end = time.monotonic() + PATIENCE_S
    while not engine.warm_up_status().is_over:
        assert engine.health() is None
        assert time.monotonic() < end
        time.sleep(0.01)
