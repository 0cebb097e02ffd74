"""The miniature with rows in its embeddings and its output matrix that no token has, as many checkpoints are padded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from headrace.models.built_in import MINIATURE

NUM_TOKENS = 4096
NUM_ADDED = 256
_EMBEDDING = "model.language_model.embed_tokens.weight"


def save(folder: Path, *, is_random: bool, is_tied: bool) -> Path:
    """Write the padded checkpoint. is_random: rows that win often, else zeros. is_tied: one matrix for both ends."""
    shutil.copytree(MINIATURE, folder, ignore=shutil.ignore_patterns("draft"))
    weights: dict[str, mx.array] = dict(mx.load(str(MINIATURE / "model.safetensors")))  # type: ignore[arg-type]
    matrix = weights[_EMBEDDING]
    rows = np.zeros((NUM_ADDED, matrix.shape[1]), np.float32)
    if is_random:
        spread = 3 * float(mx.std(matrix.astype(mx.float32)))
        rows = np.random.default_rng(7).normal(0, spread, rows.shape).astype(np.float32)
    weights[_EMBEDDING] = mx.concatenate([matrix, mx.array(rows).astype(matrix.dtype)])
    if not is_tied:
        weights["lm_head.weight"] = weights[_EMBEDDING]
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "pt"})
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = is_tied
    config["text_config"]["vocab_size"] = NUM_TOKENS + NUM_ADDED
    (folder / "config.json").write_text(json.dumps(config))
    return folder
