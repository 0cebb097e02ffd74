"""The miniature in a larger shape says what the miniature says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

from benchmarks import shapes
from headrace.backend import blas
from headrace.backend.kernels import Kernels
from headrace.models.levels import choose_levels
from headrace.models.mtp_head import load_head
from headrace.models.mtp_weights import find_head
from headrace.models.packed import PackedModel
from headrace.models.source import read_files
from headrace.models.step import Row
from headrace.state.sequence import SequenceState
from headrace.state.slabs import StatePool
from training import widened

IDS = tuple(np.random.default_rng(0).integers(0, 4000, 40).tolist())
LARGER = {
    **shapes.SHAPES["qwen3.5-4b"],
    "hidden_size": 768,
    "intermediate_size": 400,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 3,
    "head_dim": 128,
    "vocab_size": 5000,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
}


@pytest.fixture(autouse=True)
def fast_blas() -> Iterator[None]:
    blas.install("fast")
    yield
    blas.uninstall()


def said(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Logits behind each token, and the outputs of the prediction head behind the last."""
    model, _ = load_model(folder, strict=False)
    model.set_dtype(mx.float32)
    trunk = PackedModel(model, choose_levels(model), Kernels("fast", "cpu"))
    trunk.keep_hidden(True)
    weights = find_head(read_files("a checkpoint", folder))
    assert weights is not None
    head = load_head(trunk, weights, "float32", "cpu", 10**10)
    state, count = SequenceState(StatePool()), len(IDS) - 1
    state.begin(count)
    logits = trunk.forward([Row(state, IDS[:-1])], range(count))
    mx.eval(logits, state.arrays())
    state.commit(count)
    state.reserve(1)
    rows = head.forward([Row(state, IDS[1:], start=1)], head.hidden_of(state).part(0, count)).hidden
    return np.array(logits), np.array(rows)


def test_its_logits_and_its_heads_outputs_are_the_miniatures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shapes.SHAPES, "larger", LARGER)
    logits, rows = said(widened.MINIATURE)
    more_logits, more_rows = said(widened.widen(tmp_path / "larger", "larger", dtype=mx.float32))
    size = logits.shape[1]
    assert more_logits.shape[1] == LARGER["vocab_size"] > size
    assert np.abs(more_logits[:, :size] - logits).max() < 0.02 * np.abs(logits).max()
    assert (more_logits.argmax(-1) == logits.argmax(-1)).mean() > 0.95
    assert more_logits[:, size:].max() < logits.min() - 20
    assert np.abs(more_rows[..., : rows.shape[-1]] - rows).max() < 0.02 * np.abs(rows).max()


@pytest.mark.parametrize(
    ("size", "number", "reason"),
    [
        ("hidden_size", 256, "a hidden size of 256 is no multiple of 256 or no larger"),
        ("hidden_size", 400, "a hidden size of 400 is no multiple of 256 or no larger"),
        ("num_hidden_layers", 4, "4 layers are fewer than 8"),
    ],
)
def test_a_shape_in_which_the_miniature_can_not_lie_is_refused(
    size: str, number: int, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(shapes.SHAPES, "other", {**LARGER, size: number})
    with pytest.raises(ValueError, match=reason):
        widened.widen(tmp_path / "other", "other")
    assert not (tmp_path / "other").exists()
