"""Logits of ids that stand for tokens, and of no others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from models import tiny, tiny_fused, tiny_head
from models.mixed_steps import MixedSteps

from headrace.backend import blas
from headrace.backend.device import Device
from headrace.backend.kernels import Kernels
from headrace.models.levels import Level
from headrace.models.load import load
from headrace.models.mtp_head import load_head
from headrace.models.mtp_weights import find_head
from headrace.models.packed import PackedModel
from headrace.models.selfcheck import check
from headrace.models.source import read_files
from headrace.models.step import Row
from headrace.state.sequence import SequenceState
from headrace.state.slabs import StatePool
from headrace.types.model import TokenIds

CPU = Device("cpu", "a processor", 1 << 40, 2)
GAPS = frozenset({3, 77})
TOKENS = TokenIds(90, GAPS)
ROWS = ((17, 9, 5, 28, 61, 42, 33), (80, 1, 87, 23, 70, 12, 39, 10, 66, 52, 7))


@pytest.fixture(autouse=True)
def stock_blas() -> Iterator[None]:
    blas.install("exact")
    yield
    blas.uninstall()


def cut(logits: mx.array) -> np.ndarray:
    """By definition."""
    wanted = np.array(logits, dtype=np.float32)[:, : TOKENS.end]
    wanted[:, list(GAPS)] = -np.inf
    return wanted


@pytest.mark.parametrize("level", [None, Level.ROWS, Level.WHOLE])
def test_logits_are_the_untouched_models_without_what_is_no_token(level: Level | None) -> None:
    model = tiny.build("qwen3_5")
    expected = [tiny.reference(model, row) for row in ROWS]
    packed = check(model, Kernels("exact", "cpu"), 160, "float32").packed
    if level is not None:
        packed.restore()
        packed = PackedModel(model, dict.fromkeys(packed.levels, level), Kernels("exact", "cpu"))
    packed.keep_tokens(TOKENS)
    for got, logits in zip(MixedSteps(packed, ROWS, TOKENS.end).run(), expected, strict=True):
        assert np.allclose(np.array(got), cut(logits), atol=1e-5)


def test_compiled_steps_give_no_others_either(monkeypatch: pytest.MonkeyPatch) -> None:
    blas.install("fast")
    model = tiny_fused.build(tiny_fused.widen("qwen3_5", monkeypatch))
    expected = [tiny.reference(model, row) for row in ROWS]
    packed = check(model, tiny_fused.KERNELS, 97, tiny_fused.DTYPE).packed
    assert packed.is_compiled
    packed.keep_tokens(TOKENS)
    tolerance = 3e-4 if tiny_fused.DTYPE == "float32" else 0.5
    for got, logits in zip(MixedSteps(packed, ROWS, TOKENS.end).run(), expected, strict=True):
        assert np.allclose(np.array(got.astype(mx.float32)), cut(logits.astype(mx.float32)), atol=tolerance)


def test_a_prediction_head_drafts_no_others(tmp_path: Path) -> None:
    drawn = {f"mtp.{path}": array for path, array in tiny_head.draw("qwen3_5").items()}
    folder = tiny_head.save_with_head("qwen3_5", tmp_path, drawn)
    files = read_files("tiny", folder)
    weights = find_head(files)
    assert weights is not None
    logits = []
    for tokens in (None, TOKENS):
        loaded = load(files, dtype="auto", numerics="exact", self_check=False, device=CPU, tokens=tokens)
        loaded.packed.keep_hidden(True)
        head = load_head(loaded.packed, weights, "auto", "cpu", 10**9)
        state = SequenceState(StatePool())
        state.begin(len(ROWS[0]) - 1)
        mx.eval(loaded.packed.forward([Row(state, ROWS[0][:-1])], [0]), state.arrays())
        state.commit(len(ROWS[0]) - 1)
        rows = head.hidden_of(state).arrays()[0]
        logits.append(head.forward([Row(state, ROWS[0][1:], start=1)], rows).logits)
    assert logits[0].shape == (1, 160)
    assert np.array_equal(np.array(logits[1]), cut(logits[0]))


@pytest.mark.parametrize(("num_tokens", "expected"), [(150, 150), (160, 160), (170, 160)])
def test_no_more_tokens_are_kept_than_the_weights_have_rows(num_tokens: int, expected: int, tmp_path: Path) -> None:
    files = read_files("tiny", tiny.save("qwen3_5", tmp_path))
    tokens = TokenIds(num_tokens, frozenset({5, 165}) if num_tokens == 170 else frozenset())
    loaded = load(files, dtype="auto", numerics="exact", self_check=True, device=CPU, tokens=tokens)
    assert loaded.tokens == TokenIds(expected, frozenset({5}) if num_tokens == 170 else frozenset())
    assert MixedSteps(loaded.packed, ROWS, expected).run()[0].shape[-1] == expected
