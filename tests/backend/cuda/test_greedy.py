"""The most likely token of each row against float64; without CUDA the operations that stand for the kernel."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from benchmarks.references import Float64, double
from headrace.backend.cuda.row_kernels import most_likely

pytestmark = pytest.mark.gpu

OTHERWISE = -7
NAN, INF = float("nan"), float("inf")


def likeliest(logits: Float64) -> list[int]:
    """By definition, row by row."""
    largest = logits.max(axis=-1)  # NaN if there is one
    return [
        int(np.flatnonzero(row == top)[0]) if np.isfinite(top) else OTHERWISE
        for row, top in zip(logits, largest, strict=True)
    ]


DTYPES = (mx.float32, mx.float16, mx.bfloat16)
SHAPES = ((1, 1), (3, 7), (1, 32), (2, 1001), (9, 4096), (1, 70_003), (1500, 40), (33, 33_000), (1, 248_320))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_the_first_of_the_highest_in_any_place(shape: tuple[int, int], dtype: mx.Dtype) -> None:
    """Logits of few values have many equals; some rows are below zero, some mostly -inf, some zeros of both signs."""
    rng = np.random.default_rng(shape[1])
    logits = rng.integers(-30, 31, shape) * 0.25
    logits[::3] -= 20
    logits[1::4] = np.where(rng.random(logits[1::4].shape) < 0.9, -INF, logits[1::4])
    logits[1::4, rng.integers(shape[1])] = -3
    logits[2::5] = np.where(rng.random(logits[2::5].shape) < 0.5, -0.0, 0.0)
    given = mx.array(logits).astype(dtype)
    got = most_likely(given, OTHERWISE)
    assert got.dtype == mx.int32
    assert got.tolist() == likeliest(double(given))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [11, 5000, 151_936])
def test_rows_that_are_not_fit_are_told_and_harm_no_other(num_tokens: int, dtype: mx.Dtype) -> None:
    rng = np.random.default_rng(num_tokens)
    logits = rng.standard_normal((12, num_tokens))
    places = rng.integers(num_tokens, size=12)
    logits[0, places[0]], logits[1, places[1]], logits[2, places[2]] = NAN, INF, -INF
    logits[3, -1] = logits[4, 0] = np.copysign(NAN, -1.0)
    logits[5] = -INF
    logits[6], logits[6, places[6]] = -INF, NAN
    logits[7, 1], logits[7, -1] = -INF, INF
    logits[8], logits[8, places[8]] = -INF, -60_000
    logits[9] = np.where(np.arange(num_tokens) % 2, 60_000.0, -60_000.0)  # no sum of which is wanted
    given = mx.array(logits).astype(dtype)
    wanted = likeliest(double(given))
    assert [at for at, token in enumerate(wanted) if token == OTHERWISE] == [0, 1, 3, 4, 5, 6, 7]
    assert wanted[8] == places[8] and wanted[9] == 1
    for _ in range(2):  # nothing is left of the first time
        assert most_likely(given, OTHERWISE).tolist() == wanted


def test_sums_that_overflow_are_no_matter() -> None:
    assert most_likely(mx.array([[3e38, 3.1e38, -3e38, -INF], [-3e38, -3e38, -3.1e38, -3e38]]), 0).tolist() == [1, 0]


def test_rows_of_a_larger_array_are_read_where_they_are() -> None:
    """Also where their first logit is at no address that is a multiple of 16 bytes."""
    logits = mx.array(np.random.default_rng(0).standard_normal((7, 515))).astype(mx.bfloat16)
    assert most_likely(logits[3:6], OTHERWISE).tolist() == likeliest(double(logits)[3:6])


@pytest.mark.parametrize("num_rows", [1, 5])
def test_columns_that_were_cut_off_never_win(num_rows: int) -> None:
    logits = np.random.default_rng(1).standard_normal((num_rows, 515))
    logits[:, 509:] = 9
    given = mx.array(logits).astype(mx.bfloat16)[:, :509]
    assert most_likely(given, OTHERWISE).tolist() == likeliest(double(given))
