"""Rows of one slab go through attention by one call, and get what each gets alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from models import tiny

from headrace.backend.kernels import Kernels
from headrace.models.levels import choose_levels
from headrace.models.mixers import attention
from headrace.models.packed import PackedModel
from headrace.models.step import Row
from headrace.state.sequence import SequenceState
from headrace.state.slabs import SMALLEST_CAPACITY, BatchSlab, StatePool

VOCAB = 97


@cache
def packed(name: str, device: str) -> PackedModel:
    model = tiny.build(name)
    return PackedModel(model, choose_levels(model), Kernels("fast", device))


@dataclass
class Sentence:
    """A sequence, and the logits that the model gives for it alone, on the CPU's forms."""

    seed: int
    state: SequenceState
    ids: list[int] = field(init=False)
    expected: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.ids = np.random.default_rng(self.seed).integers(0, VOCAB, 320).tolist()

    def compute(self, name: str) -> None:
        state = SequenceState(StatePool())
        state.begin(len(self.ids))
        logits = packed(name, "cpu").forward([Row(state, self.ids)], range(len(self.ids)))
        self.expected = np.array(logits.astype(mx.float32))


def step(model: PackedModel, windows: list[tuple[Sentence, int, int]]) -> None:
    """One step of rows: of each so many tokens, of which the last may be wrong, and so many that are kept."""
    rows, before = [], []
    for one, num_tokens, num_kept in windows:
        start = one.state.length
        right = one.ids[start : start + num_kept]
        one.state.begin(num_tokens, min(1, num_kept))
        rows.append(
            Row(one.state, [*right, *((token + 1) % VOCAB for token in one.ids[start + num_kept :])][:num_tokens])
        )
        before.append(start)
    total = sum(len(row.token_ids) for row in rows)
    logits = model.forward(rows, range(total))
    mx.eval(logits, model.unevaluated(rows))
    found, lo = np.array(logits.astype(mx.float32)), 0
    for (one, num_tokens, num_kept), start in zip(windows, before, strict=True):
        one.state.commit(num_kept)
        expected = one.expected[start : start + num_kept]
        np.testing.assert_allclose(found[lo : lo + num_kept], expected, rtol=1e-3, atol=2e-3)
        lo += num_tokens


@pytest.mark.parametrize("name", ["llama", "qwen3_5", "gpt_oss", "gemma4_text"])
def test_rows_that_join_leave_grow_and_lose_drafts_get_what_each_gets_alone(name: str) -> None:
    model, pool, random = packed(name, "metal"), StatePool(has_batches=True), np.random.default_rng(3)
    sentences = [Sentence(seed, SequenceState(pool, 10 + seed)) for seed in range(6)]
    for one in sentences:
        one.compute(name)
    for number, one in enumerate(sentences):
        # the last of them outgrow their slots on the way
        length = 3 + 40 * number if number < 4 else SMALLEST_CAPACITY - 4 + number
        step(model, [(one, length, length)])
    for _ in range(12):
        chosen = random.permutation(len(sentences))[: random.integers(1, len(sentences) + 1)]
        windows = []
        for number in chosen:
            num_tokens = int(random.integers(1, 4))
            windows.append(
                (sentences[number], num_tokens, int(random.integers(0 if num_tokens > 1 else 1, num_tokens + 1)))
            )
        step(model, windows)
    sentences.pop(1).state.release()
    late = Sentence(7, SequenceState(pool, 5))
    late.compute(name)
    # a prompt beside rows that decode, in the slot that was left
    step(model, [(sentences[0], 1, 1), (late, 30, 30), *((one, 1, 1) for one in sentences[1:])])
    step(model, [(late, 1, 1), *((one, 1, 1) for one in sentences)])


def test_one_call_reads_all_rows_of_a_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    model, pool = packed("llama", "metal"), StatePool(has_batches=True)
    sentences = [Sentence(seed, SequenceState(pool, 10)) for seed in range(8)]
    for one in sentences:
        one.compute("llama")
        step(model, [(one, 5, 5)])
    calls: list[tuple[int, ...]] = []
    library = mx.fast.scaled_dot_product_attention

    def noted(queries: mx.array, *arguments: Any, **others: Any) -> mx.array:
        calls.append(queries.shape)
        return library(queries, *arguments, **others)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", noted)
    step(model, [(one, 1, 1) for one in sentences])
    num_layers = len(model.model.layers)
    assert [shape[0] for shape in calls] == [8] * num_layers
    # of two rows at both ends of eight, the six between would be computed for nothing
    calls.clear()
    step(model, [(sentences[0], 1, 1), (sentences[7], 1, 1)])
    assert [shape[0] for shape in calls] == [1] * 2 * num_layers


def test_layers_with_windows_share_the_masks_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = packed("gpt_oss", "metal"), list[tuple[Any, ...]]()
    visible = attention._visible

    def noted(*arguments: Any) -> mx.array:
        calls.append(arguments)
        return visible(*arguments)

    sentence = Sentence(1, SequenceState(StatePool(has_batches=True)))
    sentence.compute("gpt_oss")
    monkeypatch.setattr(attention, "_visible", noted)
    step(model, [(sentence, 40, 40)])
    assert calls and len(calls) == len(set(calls))


def test_a_slab_gets_rows_as_sequences_join_and_gives_them_back() -> None:
    pool, layer = StatePool(has_batches=True), (0,)
    slots = []
    for number in range(9):
        slots.append(pool.allocate(10))
        part = mx.full((1, 2, 3, 4), float(number))
        slots[-1].write(layer, 1, part, -part)
    (slab,) = {id(slot.slab): slot.slab for slot in slots}.values()
    assert isinstance(slab, BatchSlab) and 9 <= slab.num_rows <= 9 * 5 / 4
    for slot in slots[3:8]:
        pool.free(slot)
    for number in (0, 2, 8):
        assert all(
            mx.all(part == sign * number) for part, sign in zip(slots[number].read(layer, 1, 4), (1, -1), strict=True)
        )
    pool.free(slots[8])
    assert slab.num_rows == 3
    assert pool.allocate(SMALLEST_CAPACITY).row == 3
    assert mx.all(slots[2].read(layer, 1, 4)[0] == 2)
