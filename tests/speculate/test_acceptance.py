"""Counts accepted drafts of heads that are known to be right or wrong."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import pytest
from models import tiny, tiny_head

from headrace.backend import blas
from headrace.backend.kernels import Kernels
from headrace.models.levels import choose_levels
from headrace.models.mtp_head import MtpHead, load_head
from headrace.models.mtp_weights import find_head
from headrace.models.packed import PackedModel
from headrace.models.source import read_files
from headrace.speculate.acceptance import Acceptance, measure_acceptance
from headrace.speculate.drafter import DraftRow
from headrace.speculate.drafts import DraftBatch
from headrace.speculate.head import HeadDrafter

NUM_TOKENS, DEPTH = 8, 3
TEXTS = (tiny.PROMPT, tiny.PROMPT[3:9])


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[PackedModel, MtpHead]:
    blas.install("exact")
    model = tiny.build("qwen3_5")
    trunk = PackedModel(model, choose_levels(model), Kernels("exact", "cpu"))
    folder: Path = tmp_path_factory.mktemp("tiny")
    tiny_head.save_with_head("qwen3_5", folder, tiny_head.prefixed(tiny_head.draw("qwen3_5")))
    weights = find_head(read_files("tiny", folder))
    assert weights is not None
    trunk.keep_hidden(True)
    return trunk, load_head(trunk, weights, "auto", "cpu", 10**9)


@pytest.fixture(scope="module")
def truth() -> list[list[int]]:
    """Each text and what the untouched model says after it."""
    model = tiny.build("qwen3_5")
    texts = [list(ids) for ids in TEXTS]
    for ids in texts:
        for _ in range(NUM_TOKENS + DEPTH):
            ids.append(int(mx.argmax(tiny.reference(model, ids)[-1])))
    return texts


def drafting(truth: list[list[int]], is_accepted: list[bool], patch: pytest.MonkeyPatch) -> None:
    """The head processes its inputs as usual, but its drafts are made up: right or wrong by their depth."""
    original = HeadDrafter.draft

    def draft(self: HeadDrafter, rows: Sequence[DraftRow]) -> DraftBatch:
        mx.eval(original(self, rows).arrays)
        drafts = []
        for row in rows:
            known = list(row.token_ids)
            text = next(ids for ids in truth if ids[: len(known)] == known)
            following = text[len(known) : len(known) + DEPTH]
            drafts.append([token + (not right) for token, right in zip(following, is_accepted, strict=True)])
        return DraftBatch([mx.array(of_depth, dtype=mx.int32) for of_depth in zip(*drafts, strict=True)])

    patch.setattr(HeadDrafter, "draft", draft)


@pytest.mark.parametrize(
    ("is_accepted", "num_accepted", "gained"),
    [
        ([True, True, True], (16, 16, 16), (2.0, 3.0, 4.0)),
        ([True, False, True], (16, 0, 0), (2.0, 2.0, 2.0)),
        ([False, True, True], (0, 0, 0), (1.0, 1.0, 1.0)),
    ],
)
def test_drafts_count_as_long_as_all_before_them_are_right(
    is_accepted: list[bool],
    num_accepted: tuple[int, ...],
    gained: tuple[float, ...],
    loaded: tuple[PackedModel, MtpHead],
    truth: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafting(truth, is_accepted, monkeypatch)
    found = measure_acceptance(*loaded, TEXTS, NUM_TOKENS, DEPTH)
    assert found == Acceptance(len(TEXTS) * NUM_TOKENS, num_accepted)
    assert tuple(found.tokens_per_step(depth) for depth in range(1, DEPTH + 1)) == gained


def test_an_untrained_head_is_hardly_ever_right(loaded: tuple[PackedModel, MtpHead]) -> None:
    assert measure_acceptance(*loaded, TEXTS, NUM_TOKENS, DEPTH).first < 0.2


def test_shares_are_of_the_drafts_whose_forerunners_were_right() -> None:
    found = Acceptance(20, (10, 5, 0, 0))
    assert found.first == 0.5
    assert [found.share(depth) for depth in (1, 2, 3, 4)] == [0.5, 0.5, 0.0, 0.0]
    assert found.tokens_per_step(2) == 1.75
