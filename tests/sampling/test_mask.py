"""Masks of a grammar between the bias and the penalties."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from sampling.distributions import distribution

from headrace.sampling.adjustment import adjust
from headrace.sampling.draw import NO_TOKEN
from headrace.sampling.history import History
from headrace.sampling.rows import Mask, SamplingRow
from headrace.sampling.sampler import sample
from headrace.speculate.verify import window_rows
from headrace.types.request import SamplingParams

PLAIN = SamplingParams(temperature=1, top_p=1, top_k=0, min_p=0, seed=0)
GREEDY = replace(PLAIN, temperature=0)
INF = float("inf")


def mask_of(ids: Iterable[int], num_words: int = 3) -> Mask:
    mask = np.zeros(num_words, dtype=np.uint32)
    for token_id in ids:
        mask[token_id // 32] |= np.uint32(1 << token_id % 32)
    return mask


def logits_of(num_rows: int, num_tokens: int) -> mx.array:
    return mx.array(np.random.default_rng(num_tokens).normal(size=(num_rows, num_tokens)).astype(np.float32))


@pytest.mark.parametrize("num_tokens", [33, 64, 70, 96, 150])
def test_only_tokens_with_a_bit_may_come_and_padding_may_not(num_tokens: int) -> None:
    ids = {0, 5, 31, 32, 63, 69, 95}
    logits = logits_of(1, num_tokens)
    got = np.array(adjust(logits, [SamplingRow(PLAIN, 0, mask=mask_of(ids))]))[0]
    for token_id in range(num_tokens):
        expected = float(logits[0, token_id]) if token_id in ids else -INF
        assert got[token_id] == np.float32(expected)


def test_rows_without_a_mask_are_left_alone() -> None:
    logits = logits_of(4, 70)
    rows = [SamplingRow(PLAIN, 0), SamplingRow(GREEDY, 0, mask=mask_of({7})), SamplingRow(PLAIN, 0)]
    rows.append(SamplingRow(PLAIN, 0, mask=mask_of({1, 2, 40})))
    got = distribution(logits, rows)
    for index, row in enumerate(rows):
        assert mx.array_equal(got[index], distribution(logits[index][None], [row])[0])
    assert sample(logits, rows).tolist()[1] == 7
    assert mx.array_equal(got[0], distribution(logits[:1], rows[:1])[0])
    assert np.flatnonzero(np.array(got[3])).tolist() == [1, 2, 40]


def test_bias_comes_before_the_mask_and_penalties_behind_it() -> None:
    history = History((), 70)
    history.append([3, 3])
    params = replace(PLAIN, logit_bias=((3, 2.0), (4, 50.0)), frequency_penalty=0.5)
    got = np.array(adjust(mx.zeros((1, 70)), [SamplingRow(params, 2, history, mask=mask_of({3}))]))[0]
    assert got[3] == 2.0 - 2 * 0.5
    assert got[4] == -INF


def test_other_bans_hold_beside_a_mask() -> None:
    params = replace(GREEDY, banned_token_ids=frozenset({1}), allowed_token_ids=frozenset({1, 2, 3}))
    logits = mx.arange(70)[None].astype(mx.float32)
    assert sample(logits, [SamplingRow(params, 0, mask=mask_of({1, 2, 69}))]).tolist() == [2]
    assert sample(logits, [SamplingRow(params, 0, mask=mask_of({1, 69}))]).tolist() == [NO_TOKEN]


def test_an_output_that_can_only_end_ends_before_min_tokens() -> None:
    params = replace(GREEDY, min_tokens=9)
    stops = frozenset({5, 200})
    logits = logits_of(1, 70)
    assert sample(logits, [SamplingRow(params, 3, None, stops, mask_of({5}))]).tolist() == [5]
    assert sample(logits, [SamplingRow(params, 3, None, stops, mask_of({5, 6}))]).tolist() == [6]
    assert sample(logits, [SamplingRow(params, 9, None, stops, mask_of({5, 6}))]).tolist() == [
        5 if logits[0, 5] > logits[0, 6] else 6
    ]


@pytest.mark.parametrize("broken", [float("nan"), INF])
@pytest.mark.parametrize("params", [PLAIN, GREEDY])
def test_a_mask_does_not_hide_that_the_model_is_broken(broken: float, params: SamplingParams) -> None:
    logits = np.zeros((1, 70), dtype=np.float32)
    logits[0, 60] = broken
    assert sample(mx.array(logits), [SamplingRow(params, 0, mask=mask_of({1, 2}))]).tolist() == [NO_TOKEN]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_half_precision_logits_are_masked_too(dtype: mx.Dtype) -> None:
    logits = logits_of(2, 70).astype(dtype)
    rows = [SamplingRow(GREEDY, 0, mask=mask_of({11})), SamplingRow(PLAIN, 0, mask=mask_of({12}))]
    assert sample(logits, rows).tolist() == [11, 12]


def test_each_place_of_a_window_has_its_own_mask() -> None:
    masks = [mask_of({1}), None, mask_of({2})]
    rows = window_rows(SamplingRow(GREEDY, 0), (1, 9), masks)
    assert [row.mask for row in rows] == masks
    assert [row.mask for row in window_rows(SamplingRow(GREEDY, 0), (1,))] == [None, None]
