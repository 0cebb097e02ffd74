"""Pooling, attention and batches of encoders, beside plain arithmetic."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from embedding_models import FOLDER
from models import tiny_fused

from headrace.backend import device
from headrace.engine.pooling import BATCH_TOKENS, PADDING_SHARE, batches
from headrace.models.pooling import attention
from headrace.models.pooling.attention import attend
from headrace.models.pooling.encoder import EncoderInput, load_encoder
from headrace.models.pooling.head import Head, pool
from headrace.models.pooling.trunk import Trunk
from headrace.models.selfcheck import check
from headrace.models.source import read_files
from headrace.models.step import Row
from headrace.state.sequence import SequenceState
from headrace.state.slabs import StatePool


def test_each_pooling_is_what_its_name_says() -> None:
    rows = np.random.default_rng(0).normal(size=(2, 5, 3)).astype(np.float32)
    rows[1, 3:] = np.nan  # padding may hold anything
    of = {
        "cls": lambda own: own[0],
        "lasttoken": lambda own: own[-1],
        "max": lambda own: own.max(0),
        "mean": lambda own: own.sum(0) / len(own),
        "mean_sqrt_len_tokens": lambda own: own.sum(0) / math.sqrt(len(own)),
        "weightedmean": lambda own: sum((n + 1) * row for n, row in enumerate(own)) / sum(range(1, len(own) + 1)),
    }
    for mode, wanted in of.items():
        found = np.array(pool([mode], mx.array(rows), mx.array([5, 3])))
        assert np.allclose(found, [wanted(rows[0]), wanted(rows[1, :3])], atol=1e-6), mode
    both = np.array(pool(["mean", "cls"], mx.array(rows), mx.array([5, 3])))
    assert np.allclose(both[0], [*of["mean"](rows[0]), *of["cls"](rows[0])], atol=1e-6)


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("block", [1 << 26, 1])
def test_attention_is_a_softmax_over_what_each_token_sees(
    window: int | None, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "SCORE_ELEMENTS", block)
    lengths = (7, 2)
    random = np.random.default_rng(1)
    queries, keys, values = (random.normal(size=(2, 2, 7, 4)).astype(np.float32) for _ in range(3))
    found = np.array(attend(*(mx.array(each) for each in (queries, keys, values)), mx.array(lengths), window))
    assert np.isfinite(found).all()
    for row, length in enumerate(lengths):
        for head in range(2):
            for place in range(length):
                seen = [at for at in range(length) if window is None or abs(at - place) <= window]
                scores = np.array([queries[row, head, place] @ keys[row, head, at] / 2 for at in seen])
                weights = np.exp(scores - scores.max())
                wanted = (weights / weights.sum()) @ values[row, head, seen]
                assert np.allclose(found[row, place, 4 * head : 4 * head + 4], wanted, atol=1e-5)


def test_batches_hold_every_text_once_and_little_padding() -> None:
    random = np.random.default_rng(2)
    lengths = {f"t{number}": int(length) for number, length in enumerate(random.integers(1, 3000, 300))}
    lengths["long"] = 3 * BATCH_TOKENS
    made = list(batches(lengths))
    assert sorted(name for batch in made for name in batch) == sorted(lengths)
    for batch in made:
        longest = max(lengths[name] for name in batch)
        assert len(batch) * longest <= max(BATCH_TOKENS, longest)
        assert min(lengths[name] for name in batch) >= (1 - PADDING_SHARE) * longest
    assert len(made) < 100


@pytest.mark.parametrize("name", ["bert_mean", "roberta_cls", "modern_cls"])
def test_what_pads_a_text_does_not_show(name: str) -> None:
    encoder = load_encoder(read_files(name, FOLDER / name), "float32", device.current()).encoder
    short, long = EncoderInput([2, 9, 11, 3]), EncoderInput([2, *range(5, 45), 3])
    alone = np.concatenate([np.array(encoder([each])) for each in (short, long)])
    assert np.abs(np.array(encoder([short, long])) - alone).max() <= 1e-5 * max(1.0, float(np.abs(alone).max()))


@pytest.mark.gpu
def test_a_trunk_takes_our_kernels_and_compiled_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = tiny_fused.build(tiny_fused.widen("qwen3", monkeypatch))
    trunk = Trunk(model.model, Head())
    trunk.eval()
    checked = check(trunk, tiny_fused.KERNELS, trunk.num_ids, tiny_fused.DTYPE)
    assert not checked.lowered
    assert checked.packed.is_compiled
    rows = [Row(SequenceState(StatePool()), [3, 5, 8]), Row(SequenceState(StatePool()), list(range(1, 30)))]
    for row in rows:
        row.state.begin(len(row.token_ids))
    found = checked.packed.forward(rows, [2, 31])
    mx.eval(found)
    checked.packed.restore()
    for row, numbers in zip(rows, np.array(found.astype(mx.float32)), strict=True):
        alone = np.array(trunk(mx.array([row.token_ids]))[0, -1].astype(mx.float32))
        cosine = numbers @ alone / np.linalg.norm(numbers) / np.linalg.norm(alone)
        assert cosine > 0.999
