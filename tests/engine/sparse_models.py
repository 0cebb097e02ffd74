"""Tiny models that can read prompts for each other: folders that say the same of their tokens."""

from __future__ import annotations

import json
from pathlib import Path

from models import tiny

from headrace.config import Config, EngineConfig, ModelConfig

THRESHOLD = 100


def name_tokens(folder: Path, **changed: int) -> Path:
    """Give a folder a vocabulary; its tokens are only compared. changed: ids of some that others have otherwise."""
    vocabulary = {f"t{number}": number for number in range(160)} | changed
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": []}))
    return folder


def save(family: str, folder: Path, seed: int = 0) -> Path:
    """A checkpoint with a vocabulary."""
    return name_tokens(tiny.save(family, folder, seed))


def config(target: Path, draft: Path | None, **knobs: object) -> Config:
    """Of an engine that is exact and takes prompts of THRESHOLD tokens for long ones."""
    engine = EngineConfig(
        prefill_chunk=32,
        sparse_draft=None if draft is None else str(draft),
        sparse_threshold=THRESHOLD,
        **knobs,  # type: ignore[arg-type]
    )
    return Config(str(target), ModelConfig(numerics="exact", self_check=False), engine)
