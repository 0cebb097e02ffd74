"""The stream of random numbers against the published cipher."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.sampling.draw import uniform, uniforms

WORD = (1 << 64) - 1


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox-4x64-10 in plain integers, from the paper."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        low = 0xD2E7470EE14C6C93 * c0
        high = 0xCA5A826395121157 * c2
        c0, c1, c2, c3 = (high >> 64) ^ c1 ^ k0, high & WORD, (low >> 64) ^ c3 ^ k1, low & WORD
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & WORD, (k1 + 0xBB67AE8584CAA73B) & WORD
    return c0, c1, c2, c3


def test_the_reference_cipher_gives_the_published_answer() -> None:
    # The known answer for a counter and a key of zeros that comes with the authors' Random123.
    assert philox((0, 0, 0, 0), (0, 0)) == (
        0x16554D9ECA36314C,
        0xDB20FE9D672D0FDC,
        0xD7E772CEE186176B,
        0x7E68B68AEC7BA23B,
    )


@given(
    seed=st.one_of(st.integers(-(2**130), 2**130), st.integers(-3, 3)),
    output_index=st.integers(0, 2**32),
)
def test_a_draw_is_the_cipher_of_its_place_under_the_seed(seed: int, output_index: int) -> None:
    key = seed % 2**128
    word = philox((output_index + 1, 0, 0, 0), (key & WORD, key >> 64))[0]  # numpy counts up before it draws
    assert uniform(seed, output_index) == (word >> 11) / 2**53


def test_seeds_of_any_size_and_sign_have_streams_of_their_own() -> None:
    seeds = [0, 1, -1, 2**31, 2**63, -(2**63), 2**64 - 1, 2**64, 2**127]
    assert len({uniform(seed, 0) for seed in seeds}) == len(seeds)
    assert uniform(-1, 4) == uniform(2**128 - 1, 4)


def test_places_draw_independently() -> None:
    assert len({uniform(5, index) for index in range(100)}) == 100


def test_rows_are_drawn_as_if_alone() -> None:
    drawn = uniforms([3, -4, 3], [0, 9, 1])
    assert drawn.dtype == np.float64
    assert drawn.tolist() == [uniform(3, 0), uniform(-4, 9), uniform(3, 1)]
    assert uniforms([], []).shape == (0,)


def test_every_seed_needs_an_index() -> None:
    with pytest.raises(ValueError, match="shorter"):
        uniforms([1, 2], [0])


@pytest.mark.parametrize("along", ["index", "seed"])
def test_draws_are_spread_evenly(along: str) -> None:
    num_draws, num_bins = 20_000, 20
    places = range(num_draws)
    drawn = uniforms([9] * num_draws, places) if along == "index" else uniforms(places, [9] * num_draws)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    counts = np.histogram(drawn, bins=num_bins, range=(0, 1))[0]
    expected = num_draws / num_bins
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 43.8  # 19 degrees of freedom, one in a thousand
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 3.3 / num_draws**0.5
