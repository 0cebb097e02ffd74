"""Bans, bias and penalties against float64 arithmetic done here, token by token."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling.distributions import distribution

from headrace.sampling.adjustment import adjust
from headrace.sampling.draw import NO_TOKEN
from headrace.sampling.history import History, needs_history
from headrace.sampling.rows import SamplingRow
from headrace.sampling.sampler import sample
from headrace.types.request import SamplingParams

NAN, INF = float("nan"), float("inf")
PLAIN = SamplingParams(temperature=1, top_p=1, top_k=0, min_p=0, seed=0)
PENALTIES = {"repetition_penalty": 2.0, "frequency_penalty": 0.5, "presence_penalty": 0.25}
Floats = npt.NDArray[np.float64]


def row(
    num_tokens: int,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    stop: frozenset[int] = frozenset(),
    **changes: Any,
) -> SamplingRow:
    """A row that stands after this text, of plain sampling with some settings changed."""
    params = replace(PLAIN, **changes)
    history = None
    if needs_history(params):
        history = History(prompt, num_tokens)
        history.append(output)
    return SamplingRow(params, len(output), history, stop)


def reference(
    logits: Floats, params: SamplingParams, prompt: Sequence[int], output: Sequence[int], stop: frozenset[int]
) -> Floats:
    """The adjusted logits by definition, one token after the other."""
    text = [*prompt, *output]
    result = []
    for token, value in enumerate(logits.tolist()):
        ends_word = any(
            word[-1] == token and text[len(text) - len(word) + 1 :] == list(word[:-1])
            for word in params.banned_sequences
            if len(word) <= len(text) + 1
        )
        is_allowed = params.allowed_token_ids is None or token in params.allowed_token_ids
        is_early_stop = len(output) < params.min_tokens and token in stop
        if not is_allowed or token in params.banned_token_ids or ends_word or is_early_stop:
            value = -INF
        value += sum(amount for named, amount in params.logit_bias if named == token)
        if token in text:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        count = output.count(token)
        value -= count * params.frequency_penalty + (count > 0) * params.presence_penalty
        result.append(value)
    return np.array(result)


def adjusted(logits: Sequence[float], *args: Any, **kwargs: Any) -> list[float]:
    """One row's adjusted logits."""
    (result,) = adjust(mx.array([list(logits)]), [row(len(logits), *args, **kwargs)]).tolist()
    return list(result)


LOGITS = [2.0, -1.0, 0.5, 0.0, -4.0]
STOP = frozenset({1, 4})


@pytest.mark.parametrize(
    ("prompt", "output", "changes", "expected"),
    [
        ([], [], {"allowed_token_ids": frozenset({1, 3})}, [-INF, -1, -INF, 0, -INF]),
        ([], [], {"banned_token_ids": frozenset({1, 3})}, [2, -INF, 0.5, -INF, -4]),
        ([], [], {"allowed_token_ids": STOP, "banned_token_ids": frozenset({4})}, [-INF, -1, -INF, -INF, -INF]),
        ([], [], {"min_tokens": 1}, [2, -INF, 0.5, 0, -INF]),
        ([], [0, 0], {"min_tokens": 3}, [2, -INF, 0.5, 0, -INF]),
        ([], [0, 0, 0], {"min_tokens": 3}, LOGITS),
        ([], [], {"logit_bias": ((0, -3.0), (4, 100.0))}, [-1, -1, 0.5, 0, 96]),
        ([], [], {"logit_bias": ((2, 1.0), (2, 0.25))}, [2, -1, 1.75, 0, -4]),
        ([0, 1, 1], [], {"repetition_penalty": 2.0}, [1, -2, 0.5, 0, -4]),
        ([0], [0, 3, 4], {"repetition_penalty": 2.0}, [1, -1, 0.5, 0, -8]),
        ([0, 1], [], {"repetition_penalty": 0.5}, [4, -0.5, 0.5, 0, -4]),
        ([0, 1], [1, 2, 1, 1], {"frequency_penalty": 0.5}, [2, -2.5, 0, 0, -4]),
        ([0, 1], [1, 2, 1, 1], {"frequency_penalty": -0.5}, [2, 0.5, 1, 0, -4]),
        ([0, 1], [1, 2, 1, 1], {"presence_penalty": 0.5}, [2, -1.5, 0, 0, -4]),
        ([0, 1], [1, 2, 1, 1], {"presence_penalty": 0.5, "frequency_penalty": 1.0}, [2, -4.5, -1, 0, -4]),
    ],
)
def test_each_stage_follows_its_formula(
    prompt: list[int], output: list[int], changes: dict[str, Any], expected: list[float]
) -> None:
    assert adjusted(LOGITS, prompt, output, STOP, **changes) == expected


@pytest.mark.parametrize(
    ("logit", "changes", "expected"),
    [
        # The bias turns the sign, so repetition multiplies: (1 - 3) * 2; divided first it would be 0.5 - 3.
        (1.0, {"logit_bias": ((0, -3.0),), "repetition_penalty": 2.0}, -4.0),
        # Repetition divides before the output's penalties turn the sign: 1 / 2 - 2; after them it would be (1 - 2) * 2.
        (1.0, {"repetition_penalty": 2.0, "frequency_penalty": 1.0}, -1.5),
        (1.0, {"repetition_penalty": 2.0, "presence_penalty": 2.0}, -1.5),
        # All of them: (1 + 3) / 2 - (2 * 0.5 + 0.25).
        (1.0, {"logit_bias": ((0, 3.0),), **PENALTIES}, 0.75),
        (-1.0, {"logit_bias": ((0, -1.0),), **PENALTIES}, -5.25),
    ],
)
def test_bias_comes_before_repetition_and_repetition_before_the_output_penalties(
    logit: float, changes: dict[str, Any], expected: float
) -> None:
    assert adjusted([logit, 0.5], [1], [0, 0], **changes)[0] == expected


@pytest.mark.parametrize(
    "ban",
    [
        {"banned_token_ids": frozenset({0})},
        {"allowed_token_ids": frozenset({1, 2})},
        {"banned_sequences": ((2, 0),)},
        {"min_tokens": 9},
    ],
)
def test_nothing_brings_a_banned_token_back(ban: dict[str, Any]) -> None:
    help_ = {"logit_bias": ((0, 100.0),), "frequency_penalty": -2.0, "presence_penalty": -2.0}
    kept = adjusted([5.0, 1.0, 1.0], [0], [0, 0, 2], frozenset({0}), repetition_penalty=0.1, **help_, **ban)
    assert kept[0] == -INF
    assert math.isfinite(kept[1]) and math.isfinite(kept[2])


@pytest.mark.parametrize(
    ("prompt", "output", "banned"),
    [
        ([], [], []),
        ([5], [1], [2]),  # 1 2
        ([1], [], [2]),  # the word begins in the prompt
        ([], [1, 3], []),
        ([], [3, 1], [2, 4]),  # 1 2 and 3 1 4
        ([3], [1], [2, 4]),
        ([], [3, 1, 5], []),
        ([], [1, 1], [1, 2]),  # 1 2 and 1 1 1
        ([], [4], []),
    ],
)
def test_a_bad_word_loses_its_last_token_only_after_its_others(
    prompt: list[int], output: list[int], banned: list[int]
) -> None:
    words = ((1, 2), (3, 1, 4), (1, 1, 1))
    result = adjusted([0.0] * 6, prompt, output, banned_sequences=words)
    assert [token for token, value in enumerate(result) if value == -INF] == banned


def test_ids_outside_the_vocabulary_are_ignored() -> None:
    outside = (-1, 3, 10**12, 2**70)
    changes = {
        "allowed_token_ids": frozenset({0, 1, *outside}),
        "banned_token_ids": frozenset({1, *outside}),
        "logit_bias": tuple((token, 5.0) for token in (0, *outside)),
        "banned_sequences": tuple((0, token) for token in outside),
        "min_tokens": 9,
        **PENALTIES,
    }
    result = adjusted([1.0, 1.0, 1.0], [0, *outside], [2, *outside, 0], frozenset(outside), **changes)
    assert result == [(1 + 5) / 2 - 0.75, -INF, -INF]


@pytest.mark.parametrize("ban", [{"allowed_token_ids": frozenset()}, {"banned_token_ids": frozenset(range(4))}])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_any_token_left_is_marked_and_harms_no_other(ban: dict[str, Any], temperature: float) -> None:
    logits = mx.array([[0.0, 9.0, 0.0, 0.0]] * 3)
    rows = [row(4, temperature=temperature, top_k=1), row(4, temperature=temperature, **ban)]
    rows.append(row(4, temperature=temperature, allowed_token_ids=frozenset({2})))
    assert sample(logits, rows).tolist() == [1, NO_TOKEN, 2]
    shares = distribution(logits, rows).tolist()
    assert shares[0] == [0, 1, 0, 0] and shares[2] == [0, 0, 1, 0]
    assert np.isnan(shares[1]).all()


@pytest.mark.parametrize("broken", [NAN, INF])
@pytest.mark.parametrize(
    "ban",
    [
        {"banned_token_ids": frozenset({0})},
        {"allowed_token_ids": frozenset({1, 2})},
        {"banned_sequences": ((0, 0),)},
        {"repetition_penalty": 3.0},
        {"frequency_penalty": 1.0},
    ],
)
def test_a_ban_does_not_hide_that_the_model_is_broken(broken: float, ban: dict[str, Any]) -> None:
    logits = mx.array([[broken, 1.0, 0.0], [0.0, 5.0, 0.0]])
    rows = [row(3, [0], [0], **ban, temperature=0.0), row(3, temperature=0.0)]
    assert sample(logits, rows).tolist() == [NO_TOKEN, 1]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_a_batch_without_adjustments_passes_through(dtype: mx.Dtype) -> None:
    logits = mx.zeros((3, 5), dtype=dtype)
    rows = [row(5), row(5, temperature=0.0, top_k=3), row(5, output=[1, 2], min_tokens=2)]
    assert adjust(logits, rows) is logits


def test_the_given_logits_are_left_as_they_are() -> None:
    logits = mx.array([LOGITS])
    everything = row(5, [0], [1], STOP, min_tokens=5, logit_bias=((2, 1.0),), **PENALTIES)
    assert adjust(logits, [everything]).tolist() != [LOGITS]
    assert logits.tolist() == [LOGITS]


@pytest.mark.parametrize(
    "changes", [{"repetition_penalty": 1.5}, {"presence_penalty": 1.0}, {"banned_sequences": ((1, 2),)}]
)
def test_a_missing_history_is_an_error_that_names_the_row(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="row 1 .* no history"):
        sample(mx.zeros((2, 3)), [row(3), SamplingRow(replace(PLAIN, **changes), 0)])


NUM_TOKENS = 9
IDS = st.integers(-1, NUM_TOKENS)  # one more on either side than there is
TEXT = st.lists(st.integers(0, NUM_TOKENS - 1), max_size=12)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.0, 1.6]),
    top_p=st.just(1.0),
    top_k=st.just(0),
    min_p=st.just(0.0),
    seed=st.integers(0, 99),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.8]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.7, -1.1]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.3, -0.4]),
    logit_bias=st.one_of(st.just(()), st.lists(st.tuples(IDS, st.floats(-9, 9)), max_size=4).map(tuple)),
    allowed_token_ids=st.one_of(st.none(), st.none(), st.frozensets(IDS)),
    banned_token_ids=st.one_of(st.just(frozenset()), st.frozensets(IDS, max_size=3)),
    banned_sequences=st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=3).map(tuple), max_size=3).map(tuple),
    min_tokens=st.sampled_from([0, 0, 2, 8]),
)
CASE = st.tuples(PARAMS, TEXT, TEXT, st.frozensets(IDS, max_size=2))


@settings(max_examples=120, deadline=None)
@given(
    cases=st.lists(st.one_of(CASE, st.tuples(st.just(PLAIN), TEXT, TEXT, st.just(STOP))), min_size=1, max_size=5),
    data=st.data(),
)
def test_any_mix_of_rows_follows_the_definition_and_each_row_equals_itself_alone(
    cases: list[tuple[SamplingParams, list[int], list[int], frozenset[int]]], data: st.DataObject
) -> None:
    values = st.lists(st.floats(-12, 12, width=16), min_size=NUM_TOKENS, max_size=NUM_TOKENS)
    logits = np.array([data.draw(values) for _ in cases])
    rows = []
    for params, prompt, output, stop in cases:
        history = History(prompt, NUM_TOKENS)
        history.append(output)
        rows.append(SamplingRow(params, len(output), history if needs_history(params) else None, stop))
    expected = np.stack([reference(values, *case) for values, case in zip(logits, cases, strict=True)])
    given_ = mx.array(logits.astype(np.float32))
    np.testing.assert_allclose(np.array(adjust(given_, rows)), expected, rtol=1e-5, atol=2e-5)
    shares = np.array(distribution(given_, rows))
    for share, values_, params in zip(shares, expected, [case[0] for case in cases], strict=True):
        if np.isneginf(values_).all():
            assert np.isnan(share).all()
        elif params.temperature > 0:
            masses = np.exp((values_ - values_.max()) / params.temperature)
            np.testing.assert_allclose(share, masses / masses.sum(), rtol=2e-4, atol=1e-7)
        else:
            assert share.sum() == share.max() == 1
            assert values_[share.argmax()] >= values_.max() - 4e-5
    assert_rows_are_alone(given_, rows)


def assert_rows_are_alone(logits: mx.array, rows: Sequence[SamplingRow]) -> None:
    """Every row of the batch is, bit for bit, what it is without the others."""
    operations: list[Callable[[mx.array, Sequence[SamplingRow]], mx.array]] = [adjust, distribution, sample]
    for operation in operations:
        together = np.array(operation(logits, rows).astype(mx.float32))
        for place in range(len(rows)):
            one = slice(place, place + 1)
            alone = np.array(operation(logits[one], rows[one]).astype(mx.float32))
            assert together[one].tobytes() == alone.tobytes()


def special_rows(num_tokens: int) -> list[SamplingRow]:
    """Rows of every kind, plain ones between them."""
    prompt, output = list(range(0, num_tokens, 7)), [3, 5, 5, 11]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"frequency_penalty": 0.4, "top_p": 0.9},
        {"logit_bias": ((3, 50.0),), "temperature": 0.0},
        {"allowed_token_ids": frozenset(range(1, num_tokens, 2)), "min_p": 0.01},
        {"min_tokens": 9, "top_k": 40},
        {"banned_sequences": ((5, 11, 2), (11, 6)), "presence_penalty": -1.0, "repetition_penalty": 0.9},
        {"banned_token_ids": frozenset({0, 1, 2}), **PENALTIES, "logit_bias": ((8, -5.0), (3, 2.0))},
    ]
    rows = []
    for seed, kind in enumerate(kinds):
        rows += [row(num_tokens, prompt, output, STOP, seed=seed, **kind), row(num_tokens, seed=seed, top_k=50)]
    return [*rows, row(num_tokens, temperature=0.0)]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_special_and_plain_rows_of_a_mixed_batch_equal_themselves_alone(dtype: mx.Dtype) -> None:
    num_tokens = 3000
    rows = special_rows(num_tokens)
    logits = mx.array(np.random.default_rng(2).normal(size=(len(rows), num_tokens)) * 3).astype(dtype)
    together = np.array(adjust(logits, rows))
    for place, each in enumerate(rows):
        changed = np.array(logits[place].astype(mx.float32)).tobytes() != together[place].tobytes()
        assert changed is each.is_adjusted
    assert_rows_are_alone(logits, rows)


def test_a_plain_request_after_special_ones_is_unchanged() -> None:
    num_tokens = 500
    logits = mx.array(np.random.default_rng(4).normal(size=(1, num_tokens)).astype(np.float32))
    plain = [row(num_tokens, seed=5, top_p=0.9)]
    before = np.array(distribution(logits, plain)).tobytes()
    for special in special_rows(num_tokens)[:10]:
        sample(logits, [special])
        assert np.array(distribution(logits, plain)).tobytes() == before


def test_draws_fall_as_the_adjusted_distribution_says() -> None:
    num_draws, num_tokens = 100_000, 8
    logits = np.random.default_rng(9).normal(size=num_tokens).astype(np.float32)
    prompt, output, stop = [1, 2, 2, 5], [3, 5, 3], frozenset({7})
    params = replace(
        PLAIN,
        temperature=0.9,
        logit_bias=((0, 0.8), (4, -0.5)),
        banned_sequences=((5, 3, 6),),
        min_tokens=10**6,
        **PENALTIES,
    )
    values = reference(logits.astype(np.float64), params, prompt, output, stop) / params.temperature
    expected = np.exp(values - values.max()) / np.exp(values - values.max()).sum()
    assert np.flatnonzero(expected == 0).tolist() == [6, 7]
    history = History(prompt, num_tokens)
    history.append(output)
    rows = [SamplingRow(params, index, history, stop) for index in range(num_draws)]
    drawn = np.array(sample(mx.broadcast_to(mx.array(logits), (num_draws, num_tokens)), rows))
    counts = np.bincount(drawn, minlength=num_tokens)
    assert counts[expected == 0].sum() == 0
    due = expected[expected > 0] * num_draws
    chi_square = float(((counts[expected > 0] - due) ** 2 / due).sum())
    assert chi_square < 20.5  # one in a thousand for 5 degrees of freedom


def test_rows_of_one_prompt_keep_histories_of_their_own() -> None:
    num_tokens, prompt = 12, [3, 4, 3]
    steps = np.random.default_rng(12).normal(size=(6, num_tokens)).astype(np.float32)
    params = [replace(PLAIN, seed=seed, repetition_penalty=1.4, frequency_penalty=0.6) for seed in (1, 2)]
    histories, outputs = [History(prompt, num_tokens) for _ in params], [list[int](), list[int]()]
    for index, logits in enumerate(steps):
        rows = [SamplingRow(params[choice], index, histories[choice]) for choice in (0, 1)]
        both = mx.broadcast_to(mx.array(logits), (2, num_tokens))
        exact = logits.astype(np.float64)
        expected = [reference(exact, params[choice], prompt, outputs[choice], frozenset()) for choice in (0, 1)]
        np.testing.assert_allclose(np.array(adjust(both, rows)), np.stack(expected), rtol=1e-5, atol=1e-6)
        for choice, token in enumerate(np.array(sample(both, rows)).tolist()):
            histories[choice].append([token])
            outputs[choice].append(token)
    assert outputs[0] != outputs[1]


def test_the_work_in_python_does_not_grow_with_the_vocabulary() -> None:
    assert num_steps_in_python(150_000) == num_steps_in_python(200)


def num_steps_in_python(num_tokens: int) -> int:
    """Instructions of this project's code that one call of `adjust` takes."""
    text = list(range(100))
    everything = row(
        num_tokens, text, text, STOP, **PENALTIES, min_tokens=200, logit_bias=((1, 2.0),), banned_sequences=((99, 3),)
    )
    rows = [everything, row(num_tokens, allowed_token_ids=frozenset({5, 6})), row(num_tokens)]
    logits = mx.zeros((3, num_tokens))
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if "headrace" not in frame.f_globals["__name__"]:
            return None
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        mx.eval(adjust(logits, rows))
    finally:
        sys.settrace(before)
    assert count > 0
    return count
