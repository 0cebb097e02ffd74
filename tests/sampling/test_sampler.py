"""Distributions and draws against float64 arithmetic done here, stage by stage."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sampling.distributions import distribution

from headrace.backend import device
from headrace.sampling import sampler, truncation
from headrace.sampling.draw import NO_TOKEN, draw, uniform, uniforms
from headrace.sampling.history import History
from headrace.sampling.rows import SamplingRow
from headrace.sampling.sampler import sample
from headrace.types.request import SamplingParams

NAN, INF = float("nan"), float("inf")
PLAIN = SamplingParams(temperature=1, top_p=1, top_k=0, min_p=0, seed=0)
Floats = npt.NDArray[np.float64]


def row(output_index: int = 0, **changes: Any) -> SamplingRow:
    """A row of plain sampling with some settings changed."""
    return SamplingRow(replace(PLAIN, **changes), output_index)


def reference(logits: Floats, params: SamplingParams) -> tuple[Floats, float]:
    """The distribution by definition, one token after the other; and how far top_p was from deciding otherwise."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    masses = np.exp((logits - logits.max()) / params.temperature)
    kept = [token for token in order if masses[token] >= params.min_p * masses.max()]
    kept = kept[: params.top_k] if params.top_k else kept
    total = float(masses[kept].sum())
    nucleus: list[int] = []
    before, margin = 0.0, INF
    for token in kept:
        if nucleus and params.top_p < 1:
            margin = min(margin, abs(before / total - params.top_p))
            if before / total >= params.top_p:
                break
        nucleus.append(token)
        before += float(masses[token])
    result = np.zeros(len(logits))
    result[nucleus] = masses[nucleus] / masses[nucleus].sum()
    return result, margin


def one(logits: list[float], **changes: Any) -> list[float]:
    """The distribution of one row."""
    (result,) = distribution(mx.array([logits]), [row(**changes)]).tolist()
    return list(result)


HALVES = [math.log(p) for p in (0.125, 0.5, 0.125, 0.25)]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [1 / 8, 1 / 2, 1 / 8, 1 / 4]),
        ({"temperature": 0.5}, [1 / 22, 16 / 22, 1 / 22, 4 / 22]),
        ({"temperature": 0}, [0, 1, 0, 0]),
        ({"temperature": 0.9e-5}, [0, 1, 0, 0]),
        ({"temperature": 1e-4}, [0, 1, 0, 0]),
        ({"temperature": 1e300}, [1 / 4, 1 / 4, 1 / 4, 1 / 4]),
        ({"min_p": 0.4}, [0, 2 / 3, 0, 1 / 3]),
        ({"min_p": 1.0}, [0, 1, 0, 0]),
        ({"min_p": 0.3, "temperature": 0.5}, [0, 1, 0, 0]),
        ({"top_k": 0}, [1 / 8, 1 / 2, 1 / 8, 1 / 4]),
        ({"top_k": -1}, [1 / 8, 1 / 2, 1 / 8, 1 / 4]),
        ({"top_k": 3}, [1 / 7, 4 / 7, 0, 2 / 7]),
        ({"top_k": 1}, [0, 1, 0, 0]),
        ({"top_k": 4}, [1 / 8, 1 / 2, 1 / 8, 1 / 4]),
        ({"top_k": 10**12}, [1 / 8, 1 / 2, 1 / 8, 1 / 4]),
        ({"top_p": 0.8}, [1 / 7, 4 / 7, 0, 2 / 7]),
        ({"top_p": 0.7}, [0, 2 / 3, 0, 1 / 3]),
        ({"top_p": 0.01}, [0, 1, 0, 0]),
        ({"top_p": 1e-30}, [0, 1, 0, 0]),
        ({"top_k": 2, "top_p": 0.7}, [0, 2 / 3, 0, 1 / 3]),  # top_p sees what top_k left: 2/3 < 0.7
        ({"top_k": 2, "top_p": 0.6}, [0, 1, 0, 0]),
        ({"min_p": 0.4, "top_p": 0.6}, [0, 1, 0, 0]),  # and what min_p left
    ],
)
def test_each_stage_gives_the_distribution_of_its_definition(changes: dict[str, Any], expected: list[float]) -> None:
    assert one(HALVES, **changes) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    "settings_", [{"top_k": 2}, {"top_p": 0.45}, {"top_p": 0.5}, {"min_p": 0.0, "top_k": 2, "top_p": 0.99}]
)
def test_equals_at_the_cut_stay_by_rising_id(settings_: dict[str, Any]) -> None:
    assert one([1.0, 1.0, 1.0, 1.0], **settings_) == pytest.approx([0.5, 0.5, 0, 0])


def test_min_p_of_one_keeps_every_maximum() -> None:
    assert one([3.0, 1.0, 3.0], min_p=1.0) == pytest.approx([0.5, 0, 0.5])


def test_top_k_of_one_is_greedy_even_one_rounding_step_apart() -> None:
    lower = 20.0
    higher = float(np.nextafter(np.float32(lower), np.float32(INF)))
    assert one([lower, higher, lower], top_k=1, temperature=1e9) == [0, 1, 0]
    assert one([lower, higher, lower], temperature=0) == [0, 1, 0]


def test_extreme_logits_do_not_overflow() -> None:
    assert one([3e38, -3e38, 0.0], temperature=0.5, top_p=0.9, min_p=0.1) == [1, 0, 0]
    assert one([-INF, 1.0, -1.0], temperature=1e300) == pytest.approx([0, 0.5, 0.5])
    assert one([3e38, 3e38, -3e38], temperature=2e-5) == pytest.approx([0.5, 0.5, 0])


ROW_SETTINGS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.2, 0.7, 1.0, 1.7]),
    top_p=st.sampled_from([1.0, 0.95, 0.8, 0.5, 0.05]),
    top_k=st.sampled_from([0, 0, 1, 2, 5, 9, 1000]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.3]),
    seed=st.integers(0, 2**70),
)


@settings(max_examples=200, deadline=None)
@given(
    data=st.data(),
    num_tokens=st.integers(1, 30),
    params=st.lists(ROW_SETTINGS, min_size=1, max_size=5),
    head=st.sampled_from([2, 6, 1024]),
)
def test_any_mix_of_settings_follows_the_definition(
    data: st.DataObject, num_tokens: int, params: list[SamplingParams], head: int
) -> None:
    # Multiples of 0.37 give many ties; no two of their ratios stand on a min_p border.
    steps = st.lists(st.integers(-8, 8), min_size=num_tokens, max_size=num_tokens)
    logits = np.array([data.draw(steps) for _ in params]) * 0.37
    logits = logits.astype(np.float32).astype(np.float64)
    expected = [reference(values, settings_) for values, settings_ in zip(logits, params, strict=True)]
    assume(all(margin > 1e-5 for _, margin in expected))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(truncation, "TOP_TOKENS", head)
        given_out = distribution(mx.array(logits.astype(np.float32)), [SamplingRow(p, 0) for p in params])
    np.testing.assert_allclose(np.array(given_out), np.stack([e for e, _ in expected]), rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("spread", [0.05, 4.0])
def test_a_large_vocabulary_follows_the_definition(spread: float) -> None:
    logits = np.random.default_rng(1).normal(size=(6, 5000)).astype(np.float32) * np.float32(spread)
    logits = np.round(logits, 2)
    rows = [
        row(top_p=0.9),
        row(top_k=40, top_p=0.8),
        row(top_k=1024),
        row(top_k=2000, top_p=0.9),
        row(min_p=0.02, top_p=0.99),
        row(),
    ]
    expected = [reference(v.astype(np.float64), r.params) for v, r in zip(logits, rows, strict=True)]
    assert min(margin for _, margin in expected) > 1e-6
    actual = np.array(distribution(mx.array(logits), rows))
    np.testing.assert_array_equal(actual > 0, np.stack([e for e, _ in expected]) > 0)
    np.testing.assert_allclose(actual, np.stack([e for e, _ in expected]), rtol=1e-4, atol=1e-9)


def test_on_metal_nothing_is_read_back_to_truncate(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = np.random.default_rng(2).normal(size=(3, 5000)).astype(np.float32) * 4
    rows = [row(top_p=0.9), row(top_k=40, top_p=0.8), row(top_k=2000, top_p=0.9)]
    expected = [reference(v.astype(np.float64), r.params)[0] for v, r in zip(logits, rows, strict=True)]
    monkeypatch.setattr(device, "device_kind", lambda: "metal")
    with monkeypatch.context() as patch:
        patch.delattr(truncation, "np")
        found = distribution(mx.array(logits), rows)
    np.testing.assert_allclose(np.array(found), np.stack(expected), rtol=1e-4, atol=1e-9)


def test_a_large_vocabulary_is_summed_without_losing_digits() -> None:
    logits = (np.random.default_rng(5).normal(size=150_001) * 4).astype(np.float32)
    shares = np.exp(logits.astype(np.float64) - logits.max())
    shares /= math.fsum(shares)
    order = np.argsort(-shares)
    num_kept = 300
    before = shares[order[: num_kept - 1]].sum()
    after = before + shares[order[num_kept - 1]]
    assert after - before < 4e-4
    rows = [row(), row(top_p=float(before + after) / 2)]
    plain, cut = np.array(distribution(mx.array(np.stack([logits, logits])), rows))
    np.testing.assert_allclose(plain, shares, rtol=1e-5)
    assert sorted(np.flatnonzero(cut)) == sorted(order[:num_kept])


def test_draws_fall_as_the_distribution_says() -> None:
    num_draws, num_tokens = 120_000, 12
    logits = np.random.default_rng(7).normal(size=num_tokens).astype(np.float32) * 2
    params = replace(PLAIN, temperature=0.8, top_k=9, top_p=0.97, min_p=0.01, seed=42)
    expected, margin = reference(logits.astype(np.float64), params)
    assert margin > 1e-5
    rows = [SamplingRow(params, index) for index in range(num_draws)]
    drawn = np.array(sample(mx.broadcast_to(mx.array(logits), (num_draws, num_tokens)), rows))
    counts = np.bincount(drawn, minlength=num_tokens)
    support = expected > 0
    assert 2 < support.sum() < num_tokens
    assert counts[~support].sum() == 0
    due = expected[support] * num_draws
    chi_square = float(((counts[support] - due) ** 2 / due).sum())
    assert chi_square < 29  # one in a thousand for 10 degrees of freedom; there are fewer


MIXED = [
    row(temperature=0),
    row(3, seed=1),
    row(0, seed=-5, top_k=20, top_p=0.9),
    row(9, temperature=0.7, top_p=0.8, seed=2**90),
    row(2, temperature=3.0, top_p=0.99, seed=8),
    row(1, min_p=0.05, temperature=1.5, seed=6),
    row(temperature=1e-7, top_k=3),
    row(5, top_k=1500, seed=7),
    row(7, top_k=1, seed=11),
]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("num_tokens", [50, 3000])
def test_a_row_in_a_batch_equals_the_row_alone(dtype: mx.Dtype, num_tokens: int) -> None:
    logits = mx.array(np.random.default_rng(2).normal(size=(len(MIXED), num_tokens)) * 3).astype(dtype)
    together = sample(logits, MIXED)
    assert together.dtype == mx.int32
    alone = [sample(logits[place : place + 1], [settings_]).item() for place, settings_ in enumerate(MIXED)]
    assert together.tolist() == alone
    backwards = sample(logits[::-1], MIXED[::-1])
    assert backwards.tolist() == alone[::-1]
    shares = distribution(logits, MIXED)
    for place, settings_ in enumerate(MIXED):
        assert mx.array_equal(shares[place : place + 1], distribution(logits[place : place + 1], [settings_])).item()


def test_a_sample_is_drawn_from_its_distribution() -> None:
    logits = mx.array(np.random.default_rng(3).normal(size=(len(MIXED), 3000)).astype(np.float32) * 3)
    places = uniforms([r.params.seed for r in MIXED], [r.output_index for r in MIXED])
    assert sample(logits, MIXED).tolist() == draw(distribution(logits, MIXED), places).tolist()


def test_the_draw_depends_on_seed_and_index_only() -> None:
    rows = [row(index, seed=seed) for seed in (1, 2) for index in (0, 1, 2)] * 2
    num_tokens = 1000
    drawn = sample(mx.zeros((len(rows), num_tokens)), rows).tolist()
    assert drawn[:6] == drawn[6:]
    assert drawn == [int(uniform(r.params.seed, r.output_index) * num_tokens) for r in rows]


def test_greedy_takes_the_first_of_equals() -> None:
    assert sample(mx.array([[0.0, 2.0, 2.0], [5.0, 5.0, 5.0]]), [row(temperature=0)] * 2).tolist() == [1, 0]


BROKEN = [[NAN, 1.0, 2.0], [0.0, 1.0, NAN], [NAN, NAN, NAN], [0.0, INF, 1.0], [-INF, -INF, -INF], [INF, NAN, -INF]]
HEALTHY = [[-INF, 3.0, -INF], [0.0, -INF, -INF]]
EVERY_KIND = [
    {"temperature": 0},
    {},
    {"top_k": 2},
    {"top_p": 0.9},
    {"min_p": 0.1},
    {"top_k": 2, "top_p": 0.5, "min_p": 1.0},
]


@pytest.mark.parametrize("kind", EVERY_KIND)
@pytest.mark.parametrize("width", [3, 1500])
def test_a_broken_row_is_marked_and_harms_no_other(kind: dict[str, Any], width: int) -> None:
    padding = [-INF] * (width - 3)
    logits = mx.array([values + padding for values in (*BROKEN, *HEALTHY)])
    rows = [row(**kind)] * len(logits)
    assert sample(logits, rows).tolist() == [NO_TOKEN] * len(BROKEN) + [1, 0]
    shares = np.array(distribution(logits, rows))
    assert np.isnan(shares[: len(BROKEN)]).all()
    assert shares[len(BROKEN) :, :3].tolist() == [[0, 1, 0], [1, 0, 0]]


def test_half_precision_logits_with_a_large_sum_are_healthy() -> None:
    logits = mx.full((2, 4000), 60_000, dtype=mx.float16)
    logits[:, 3999] = -INF
    assert NO_TOKEN not in np.array(sample(logits, [row(temperature=0), row()]))


def test_a_vocabulary_of_one_token_leaves_no_choice() -> None:
    rows = [row(**kind) for kind in EVERY_KIND]
    assert sample(mx.zeros((len(rows), 1)), rows).tolist() == [0] * len(rows)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", (0.0, 5e-324, 1e-300, 1e-40, 1e-6, 1e-5, 2.0)),
        ("top_p", (5e-324, 1e-300, 1e-40, 1e-8, 1.0)),
        ("min_p", (0.0, 5e-324, 1e-300, 1e-40, 1.0)),
        ("top_k", (-1, 0, 1, 2**31 - 1)),
        ("seed", (-(2**63), 2**63 - 1)),
        ("repetition_penalty", (0.01, 100.0)),
        ("frequency_penalty", (-2.0, -5e-324, 1e-300, 2.0)),
        ("presence_penalty", (-2.0, -5e-324, 1e-300, 2.0)),
        ("logit_bias", (((0, -100.0),), ((0, 1e-300), (1, -5e-324)), ((0, 100.0),))),
    ],
)
def test_every_value_that_a_request_may_have_draws_a_token(name: str, values: tuple[Any, ...]) -> None:
    logits = mx.array([[40.0, -40.0, 0.0, 1e-30, -1e4], [1e4, 9e3, -1e4, 0.0, 0.0]])
    history = History((0, 1, 2), 5)
    history.append((0, 1))
    for value in values:
        params = replace(PLAIN, **{name: value})
        drawn = sample(logits, [SamplingRow(params, 3, history), SamplingRow(params, 3, history)])
        assert NO_TOKEN not in np.array(drawn), (name, value)


def test_no_rows_give_no_tokens() -> None:
    assert sample(mx.zeros((0, 7)), []).shape == (0,)


def test_rows_and_logits_must_match() -> None:
    with pytest.raises(ValueError, match=r"\(2, 7\) do not fit 1 rows"):
        sample(mx.zeros((2, 7)), [row()])
    with pytest.raises(ValueError, match=r"\(7,\) do not fit 7 rows"):
        distribution(mx.zeros((7,)), [row()] * 7)


def test_only_rows_with_a_cut_are_sorted_and_greedy_rows_draw_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    num_sorted: list[int] = []
    num_drawn: list[int] = []

    def spy_sort(logits: mx.array, axis: int) -> mx.array:
        num_sorted.append(logits.shape[0])
        return sort(logits, axis=axis)

    def spy_uniforms(seeds: list[int], indices: list[int]) -> Floats:
        num_drawn.append(len(seeds))
        return uniforms(seeds, indices)

    sort = mx.sort
    monkeypatch.setattr(mx, "sort", spy_sort)
    monkeypatch.setattr(sampler, "uniforms", spy_uniforms)
    sample(mx.zeros((3, 5)), [row(temperature=0)] * 3)
    assert (num_sorted, num_drawn) == ([], [])
    sample(mx.zeros((5, 5)), [row(temperature=0), row(), row(min_p=0.2), row(top_k=2), row(top_p=0.5)])
    assert (num_sorted, num_drawn) == ([2], [4])
