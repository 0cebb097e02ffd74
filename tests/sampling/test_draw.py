"""Inverting the cumulative distribution, where the answers are known by arithmetic."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from headrace.sampling.draw import NO_TOKEN, draw

ALMOST_ONE = 1 - 2.0**-53


def draw_one(weights: list[float], place: float) -> int:
    """The token of one row."""
    (token_id,) = draw(mx.array([weights]), np.array([place])).tolist()
    return int(token_id)


@pytest.mark.parametrize(
    ("place", "token_id"),
    [(0, 0), (0.49, 0), (0.5, 1), (0.74, 1), (0.75, 2), (ALMOST_ONE, 2)],
)
@pytest.mark.parametrize("scale", [1.0, 0.125, 1024.0])
def test_each_token_owns_its_share_of_the_line(place: float, token_id: int, scale: float) -> None:
    assert draw_one([0.5 * scale, 0.25 * scale, 0.25 * scale], place) == token_id


@pytest.mark.parametrize(("place", "token_id"), [(0, 2), (0.5, 4), (0.25, 2), (ALMOST_ONE, 4)])
def test_a_token_without_weight_is_never_drawn(place: float, token_id: int) -> None:
    assert draw_one([0, 0, 0.5, 0, 0.5, 0, 0], place) == token_id


@pytest.mark.parametrize("place", [0, 0.3, ALMOST_ONE])
@pytest.mark.parametrize("token_id", [0, 511, 512, 1499])
def test_a_single_token_is_drawn_wherever_it_stands(place: float, token_id: int) -> None:
    weights = [0.0] * 1500
    weights[token_id] = 1e-30
    assert draw_one(weights, place) == token_id


@pytest.mark.parametrize(("step", "token_id"), [(0.5, 0), (1.5, 1), (2.5, 2), (3.5, 3)])
def test_places_finer_than_float32_are_told_apart(step: float, token_id: int) -> None:
    assert draw_one([2.0**-27, 2.0**-27, 2.0**-27, 1], step * 2.0**-27) == token_id


def test_the_tail_of_a_large_vocabulary_is_not_lost() -> None:
    num_tokens = 150_000
    tokens = np.array([0, 1, 511, 512, 74_999, 140_001, 149_998, 149_999])
    # Half a token from either border: one running float32 sum would be off by several tokens at the end.
    places = (tokens + 0.5) / num_tokens
    weights = mx.full((len(tokens), num_tokens), 1 / num_tokens, dtype=mx.float32)
    assert draw(weights, places).tolist() == tokens.tolist()


def test_evenly_spaced_places_give_each_token_its_share() -> None:
    num_tokens, num_positions, batch = 1300, 40_000, 1000
    weights = np.random.default_rng(4).gamma(0.3, size=num_tokens).astype(np.float32)
    expected = weights.astype(np.float64) / weights.astype(np.float64).sum() * num_positions
    counts = np.zeros(num_tokens)
    for first in range(0, num_positions, batch):
        places = (np.arange(first, first + batch) + 0.5) / num_positions
        drawn = draw(mx.broadcast_to(mx.array(weights), (batch, num_tokens)), places)
        counts += np.bincount(np.array(drawn), minlength=num_tokens)
    assert np.abs(counts - expected).max() < 1.1  # a border lies between two places; 0.1 for float32


def test_a_row_without_a_distribution_says_so_and_harms_no_other() -> None:
    weights = mx.array([[0.0, 1.0], [0.0, 0.0], [float("nan"), 1.0], [1.0, 0.0]])
    assert draw(weights, np.full(4, 0.7)).tolist() == [1, NO_TOKEN, NO_TOKEN, 0]
