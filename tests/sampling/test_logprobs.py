"""Log-probabilities and ranks against float64 and a plain sort."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.sampling import rows
from headrace.sampling.logprobs import read_logprobs, token_logprobs
from headrace.sampling.rows import SamplingRow
from headrace.sampling.sampler import sample
from headrace.types.events import TokenLogprobs
from headrace.types.request import SamplingParams

NAN, INF = float("nan"), float("inf")
PLAIN = SamplingParams(temperature=1, top_p=1, top_k=0, min_p=0, seed=0)
Floats = npt.NDArray[np.float64]


def log_softmax(logits: Floats) -> Floats:
    """By definition, of one row."""
    shifted = logits - logits.max()
    return np.asarray(shifted - math.log(math.fsum(np.exp(shifted))), dtype=np.float64)


def ranked(logits: Floats) -> list[int]:
    """All ids by falling logit, equals by rising id."""
    return list(np.lexsort((np.arange(len(logits)), -logits)).tolist())


def check(found: TokenLogprobs, logits: Floats, token_id: int, num_top: int) -> None:
    """Compare one answer with the definition."""
    expected, order = log_softmax(logits), ranked(logits)
    assert found.token_id == token_id
    assert found.logprob == pytest.approx(expected[token_id], rel=1e-6, abs=3e-6)
    assert found.rank == order.index(token_id) + 1
    assert [each for each, _ in found.top] == order[:num_top]
    assert [value for _, value in found.top] == pytest.approx(expected[order[:num_top]], rel=1e-6, abs=3e-6)


def test_a_row_by_hand() -> None:
    logits = mx.array([[math.log(p) for p in (0.125, 0.5, 0.125, 0.25)]])
    (found,) = read_logprobs(token_logprobs(logits, mx.array([2]), 3), [3])
    assert (found.token_id, found.rank) == (2, 4)  # token 0 is as likely and comes first
    assert found.logprob == pytest.approx(math.log(1 / 8), abs=1e-6)
    assert [token for token, _ in found.top] == [1, 3, 0]
    assert [value for _, value in found.top] == pytest.approx([math.log(p) for p in (1 / 2, 1 / 4, 1 / 8)], abs=1e-6)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), num_tokens=st.integers(1, 40), num_rows=st.integers(1, 4), block=st.sampled_from([1, 2, 5, 512]))
def test_any_row_follows_the_definition(data: st.DataObject, num_tokens: int, num_rows: int, block: int) -> None:
    values = st.one_of(st.integers(-3, 3).map(float), st.sampled_from([-INF, -0.0, 0.0]))
    steps = st.lists(values, min_size=num_tokens, max_size=num_tokens).filter(lambda row: max(row) > -INF)
    logits = np.array([data.draw(steps) for _ in range(num_rows)])
    tokens = data.draw(st.lists(st.integers(0, num_tokens - 1), min_size=num_rows, max_size=num_rows))
    num_top = data.draw(st.integers(0, num_tokens + 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "BLOCK_TOKENS", block)
        found = token_logprobs(mx.array(logits.astype(np.float32)), mx.array(tokens), num_top)
        mx.eval(found.arrays())
    for answer, row, token in zip(read_logprobs(found, [num_top] * num_rows), logits, tokens, strict=True):
        check(answer, row, token, num_top)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize(("spread", "offset"), [(0.1, 0.0), (4.0, -30.0), (15.0, 200.0)])
def test_a_large_vocabulary_follows_the_definition(dtype: mx.Dtype, spread: float, offset: float) -> None:
    values = np.random.default_rng(5).normal(size=(3, 150_001)) * spread + offset
    logits = mx.array(values).astype(dtype)
    exact = np.array(logits.astype(mx.float32)).astype(np.float64)
    tokens = [150_000, 7, int(exact[2].argmax())]
    found = read_logprobs(token_logprobs(logits, mx.array(tokens), 20), [20, 1, 5])
    for answer, row, token, num_top in zip(found, exact, tokens, [20, 1, 5], strict=True):
        check(answer, row, token, num_top)
    assert found[2].rank == 1


def test_large_logits_keep_the_digits_of_their_differences() -> None:
    logits = mx.array([[16384.0, 16383.0, 16000.0]])
    (found,) = read_logprobs(token_logprobs(logits, mx.array([1]), 1), [1])
    assert found.logprob == pytest.approx(-1 - math.log1p(math.exp(-1)), abs=1e-6)
    assert found.top == ((0, pytest.approx(-math.log1p(math.exp(-1)), abs=1e-6)),)


def test_each_row_gets_as_many_alternatives_as_it_asked_for() -> None:
    logits = mx.broadcast_to(mx.array([1.0, 3.0, 2.0]), (4, 3))
    found = read_logprobs(token_logprobs(logits, mx.array([0, 1, 2, 0]), 5), [0, 2, 5, 1])
    assert [[token for token, _ in each.top] for each in found] == [[], [1, 2], [1, 2, 0], [1]]
    assert [each.rank for each in found] == [3, 1, 2, 3]


def test_a_token_that_cannot_come_has_no_probability() -> None:
    (found,) = read_logprobs(token_logprobs(mx.array([[-INF, 0.0, -INF]]), mx.array([2]), 3), [3])
    assert found == TokenLogprobs(2, -INF, 3, ((1, 0.0), (0, -INF), (2, -INF)))


BROKEN = [[NAN, 1.0, 2.0], [-NAN, -NAN, -NAN], [0.0, INF, 1.0], [-INF, -INF, -INF]]


@pytest.mark.parametrize("repeats", [1, 300])
def test_a_broken_row_is_not_a_number_and_harms_no_other(repeats: int) -> None:
    healthy = [0.0, 1.0, 2.0] * repeats
    logits = mx.array([*(row * repeats for row in BROKEN), healthy])
    found = read_logprobs(token_logprobs(logits, mx.array([1] * len(logits)), 2), [2] * len(logits))
    for each in found[:-1]:
        assert math.isnan(each.logprob)
        assert all(0 <= token < len(healthy) and math.isnan(value) for token, value in each.top)
    check(found[-1], np.array(healthy), 1, 2)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_row_in_a_batch_equals_the_row_alone(dtype: mx.Dtype) -> None:
    logits = mx.array(np.random.default_rng(6).normal(size=(6, 30_000)) * 3).astype(dtype)
    tokens = mx.array([5, 4, 3, 29_999, 0, 77])
    together = read_logprobs(token_logprobs(logits, tokens, 9), [9] * 6)
    for place in range(6):
        one = slice(place, place + 1)
        assert read_logprobs(token_logprobs(logits[one], tokens[one], 9), [9]) == [together[place]]
        (fewer,) = read_logprobs(token_logprobs(logits[one], tokens[one], 2), [2])
        assert fewer.top == together[place].top[:2]


def test_tokens_and_their_logprobs_come_with_one_wait() -> None:
    logits = mx.array(np.random.default_rng(8).normal(size=(5, 50)).astype(np.float32))
    tokens = sample(logits, [SamplingRow(PLAIN, index) for index in range(5)])
    found = token_logprobs(logits, tokens, 2)
    mx.eval(tokens, found.arrays())
    for place, answer in enumerate(read_logprobs(found, [2] * 5)):
        check(answer, np.array(logits[place]).astype(np.float64), int(tokens[place].item()), 2)


def test_no_rows_give_no_answers() -> None:
    assert read_logprobs(token_logprobs(mx.zeros((0, 7)), mx.zeros((0,), dtype=mx.int32), 3), []) == []


def test_rows_and_tokens_must_match() -> None:
    with pytest.raises(ValueError, match=r"\(2, 7\) do not fit tokens of shape \(3,\)"):
        token_logprobs(mx.zeros((2, 7)), mx.array([1, 2, 3]), 0)
    found = token_logprobs(mx.zeros((2, 7)), mx.array([1, 2]), 0)
    with pytest.raises(ValueError, match="zip"):
        read_logprobs(found, [0])
