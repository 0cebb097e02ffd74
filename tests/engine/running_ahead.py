"""Engines that run ahead on any device or don't, and what they are asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headrace.config import Config, EngineConfig, ModelConfig
from headrace.engine.engine import Engine
from headrace.models.packed import PackedModel
from headrace.types.request import GREEDY

VOCAB = 97
WARM = replace(GREEDY, temperature=1.0, seed=5)
PENALISED = replace(WARM, repetition_penalty=1.3, frequency_penalty=0.5, min_tokens=4, banned_sequences=((7, 8),))


def launch(folder: Path, *, runs_ahead: bool, **knobs: object) -> Engine:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(PackedModel, "launches_ahead", runs_ahead)
        engine = EngineConfig(**{"prefill_chunk": 32, **knobs})
        return Engine.launch(Config(str(folder), ModelConfig(numerics="exact", self_check=False), engine))


def tokens(seed: int, length: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, VOCAB, length).tolist())
