"""A draft model drafts what it would say alone, whatever befalls the states that it keeps."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

import mlx.core as mx
import mlx.nn as nn
import pytest
from models import tiny

from headrace.backend import blas
from headrace.backend.kernels import Kernels
from headrace.models.levels import choose_levels
from headrace.models.packed import PackedModel
from headrace.sampling.rows import GREEDY_ROW
from headrace.speculate import model as model_module
from headrace.speculate.drafter import DraftRow
from headrace.speculate.model import MOST_DRAFTS, ModelDrafter
from headrace.state.sequence import SequenceState
from headrace.state.slabs import StatePool

KINDS = {"dense": "llama", "sliding window": "gpt_oss", "hybrid": "qwen3_5", "module": "lfm2"}
VOCAB = 97
CHUNK_TOKENS = 256


@cache
def built(kind: str) -> nn.Module:
    return tiny.build(KINDS[kind])


@cache
def packed(kind: str) -> PackedModel:
    blas.install("exact")
    model = tiny.build(KINDS[kind])
    return PackedModel(model, choose_levels(model), Kernels("exact", "cpu"))


def drafter(kind: str, most_tokens: int = 256) -> ModelDrafter:
    model = packed(kind)
    return ModelDrafter(
        "small", 0, model, model, StatePool(has_batches=model.kernels.attends_in_batches), most_tokens, CHUNK_TOKENS
    )


@cache
def continued(kind: str, text: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    """What mlx-lm's own model continues a text with, greedily."""
    ids = list(text)
    for _ in range(num_tokens):
        ids.append(int(mx.argmax(tiny.reference(built(kind), ids)[-1]).item()))
    return tuple(ids[len(text) :])


def texts(number: int, length: int) -> list[tuple[int, ...]]:
    dice = random.Random(number)
    return [tuple(dice.randrange(VOCAB) for _ in range(length + 7 * each)) for each in range(number)]


def row(state: SequenceState, text: Sequence[int], num_drafts: int) -> DraftRow:
    return DraftRow(state, text, num_drafts, GREEDY_ROW)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_drafted_for_together_as_each_alone_whatever_was_rejected(kind: str) -> None:
    """Of four drafts each time some are accepted, or none, or the text goes on without any."""
    dice, own = random.Random(3), drafter(kind)
    states = [SequenceState(StatePool()) for _ in range(3)]
    known = texts(3, 12)
    for turn in range(5):
        numbers = [4, 1 + turn % 4, 1]
        drafts = own.draft([row(state, text, each) for state, text, each in zip(states, known, numbers, strict=True)])
        for place, (text, number) in enumerate(zip(known, numbers, strict=True)):
            said = drafts.read(place, number)
            assert said == continued(kind, text, number)
            known[place] = (*text, *said[: dice.randrange(number + 1)], dice.randrange(VOCAB))
        if turn == 2:
            known = [(*text, 5, 6, 7) for text in known]
    for state in states:
        state.release()
    assert own.pool is not None
    assert own.pool.num_bytes == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_is_begun_anew_at_its_latest_tokens_when_the_state_is_full(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_module, "LATEST_TOKENS", 12)
    own, state, text = drafter(kind, 24 + MOST_DRAFTS), SequenceState(StatePool()), texts(1, 40)[0]
    starts = []
    for _ in range(20):
        (draft,) = own.draft([row(state, text, 1)]).read(0, 1)
        assert state.draft_model is not None
        assert state.draft_model.end == len(text)
        assert state.draft_model.state.length <= 24
        starts.append(state.draft_model.start)
        assert (draft,) == continued(kind, text[starts[-1] :], 1)
        text = (*text, (draft + 1) % VOCAB)
    # of 24 tokens, 12 are the text's latest
    assert starts == [28] * 13 + [41] * 7


def test_a_text_that_went_on_without_drafts_is_begun_anew_where_that_is_less_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model_module, "LATEST_TOKENS", 12)
    own, state, text = drafter("dense"), SequenceState(StatePool()), texts(1, 60)[0]
    own.draft([row(state, text[:20], 1)])
    assert state.draft_model is not None
    assert state.draft_model.start == 8
    own.draft([row(state, text[:32], 1)])
    assert state.draft_model.start == 8
    own.draft([row(state, text[:45], 1)])
    assert state.draft_model.start == 33


@pytest.mark.parametrize("kind", KINDS)
def test_long_texts_are_computed_before_in_chunks_that_a_step_can_wait_for(kind: str) -> None:
    own = drafter(kind, 2048)
    own.time_prefill(texts(1, 64)[0])
    states = [SequenceState(StatePool()) for _ in range(3)]
    known = [text[:length] for text, length in zip(texts(3, 300), (300, 8, 9), strict=True)]
    rows = list(zip(states, known, strict=True))
    assert [own.prefill_s(state, len(text)) > 0 for state, text in rows] == [True, False, True]
    own.prefill(rows)
    # in order, as far as a chunk goes; the last token is left for the draft
    assert [each.draft_model and each.draft_model.end for each in states] == [CHUNK_TOKENS, None, None]
    own.prefill(rows)
    assert [each.draft_model and each.draft_model.end for each in states] == [299, 7, 8]
    assert [own.prefill_s(state, len(text)) for state, text in rows] == [0.0, 0.0, 0.0]
    drafts = own.draft([row(state, text, 1) for state, text in rows])
    assert [drafts.read(place, 1) for place in range(3)] == [continued(kind, text, 1) for text in known]


def test_a_state_that_is_brought_back_has_none_of_the_draft_model_s() -> None:
    """It may be at another length; what the draft model needs is computed again."""
    own, state = drafter("dense"), SequenceState(StatePool())
    text = texts(1, 20)[0]
    record = state.checkpoint()
    own.draft([row(state, text, 2)])
    assert own.pool is not None
    assert own.pool.num_bytes > 0
    state.restore(record)
    assert (state.draft_model, own.pool.num_bytes) == (None, 0)
