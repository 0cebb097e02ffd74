"""`attend`'s forms against attention written out in float64."""

import math

import mlx.core as mx
import numpy as np
import pytest

from headrace.backend import blas
from headrace.models.mixers import attention


@pytest.fixture(autouse=True)
def stock_blas() -> None:
    blas.install("exact")


def random(*shape: int) -> mx.array:
    return mx.array(np.random.default_rng(len(shape) + shape[2]).standard_normal(shape).astype(np.float32))


def written_out(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, window: int | None, bidirectional: bool = False
) -> np.ndarray:
    q, k, v = (np.array(array, dtype=np.float64)[0] for array in (queries, keys, values))
    num_heads, num_queries, _ = q.shape
    group, num_keys = num_heads // k.shape[0], k.shape[1]
    result = np.zeros((num_heads, num_queries, v.shape[-1]))
    for head in range(num_heads):
        for row in range(num_queries):
            own = num_keys - num_queries + row
            last = num_keys - 1 if bidirectional else own
            first = 0 if window is None else max(0, own - window + 1)
            scores = k[head // group, first : last + 1] @ q[head, row] * scale
            weights = np.exp(scores - scores.max())
            result[head, row] = weights / weights.sum() @ v[head // group, first : last + 1]
    return result


@pytest.mark.parametrize("window", [None, 1, 40, 200])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (1, 77), (5, 5), (130, 130), (129, 300), (300, 300)])
def test_both_forms_compute_causal_attention(num_queries: int, num_keys: int, window: int | None) -> None:
    queries, keys, values = random(1, 6, num_queries, 16), random(1, 2, num_keys, 16), random(1, 2, num_keys, 24)
    scale = 1 / math.sqrt(16)
    if window is not None:
        # a row's state holds no more than its first query can see
        oldest = max(0, num_keys - num_queries - window + 1)
        keys, values = keys[:, :, oldest:], values[:, :, oldest:]
    expected = written_out(queries, keys, values, scale, window)
    folded = attention._folded(queries, keys, values, scale, window)
    fused = attention._fused(queries, keys, values, scale, window, None)
    assert np.abs(np.array(folded)[0] - expected).max() < 1e-5
    assert np.abs(np.array(fused)[0] - expected).max() < 1e-5


@pytest.mark.parametrize("window", [None, 1, 40, 400])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 77), (5, 5), (130, 130), (129, 300)])
def test_both_forms_let_queries_see_all_that_is_behind_them_too(
    num_queries: int, num_keys: int, window: int | None
) -> None:
    queries, keys, values = random(1, 6, num_queries, 16), random(1, 2, num_keys, 16), random(1, 2, num_keys, 24)
    if window is not None:
        oldest = max(0, num_keys - num_queries - window + 1)
        keys, values = keys[:, :, oldest:], values[:, :, oldest:]
    expected = written_out(queries, keys, values, 0.25, window, bidirectional=True)
    folded = attention._folded(queries, keys, values, 0.25, window, bidirectional=True)
    fused = attention._fused(queries, keys, values, 0.25, window, None, bidirectional=True)
    assert np.abs(np.array(folded)[0] - expected).max() < 1e-5
    assert np.abs(np.array(fused)[0] - expected).max() < 1e-5


def test_blocks_of_queries_give_the_bits_of_one_query_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    queries, keys, values = random(1, 4, 200, 16), random(1, 2, 330, 16), random(1, 2, 330, 16)
    at_once = attention._folded(queries, keys, values, 0.25, None)
    monkeypatch.setattr(attention, "QUERY_BLOCK", 7)
    in_sevens = attention._folded(queries, keys, values, 0.25, None)
    one_by_one = [
        attention._folded(queries[:, :, i : i + 1], keys[:, :, : 131 + i], values[:, :, : 131 + i], 0.25, None)
        for i in range(200)
    ]
    assert mx.array_equal(at_once, in_sevens)
    assert mx.array_equal(at_once, mx.concatenate(one_by_one, axis=2))


@pytest.mark.parametrize("window", [1, 20, 60])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(2, 9), (130, 200)])
def test_windows_of_both_forms_count_positions_where_these_have_gaps(
    num_queries: int, num_keys: int, window: int
) -> None:
    queries, keys, values = random(1, 6, num_queries, 16), random(1, 2, num_keys, 16), random(1, 2, num_keys, 24)
    places = np.cumsum(np.random.default_rng(1).choice([1, 1, 1, 9, 30], num_keys))
    q, k, v = (np.array(array, dtype=np.float64)[0] for array in (queries, keys, values))
    expected = np.zeros((6, num_queries, 24))
    for row in range(num_queries):
        last = num_keys - num_queries + row
        seen = [key for key in range(last + 1) if places[key] > places[last] - window]
        for head in range(6):
            weights = np.exp(k[head // 3, seen] @ q[head, row] / 4)
            expected[head, row] = weights / weights.sum() @ v[head // 3, seen]
    positions = mx.array(places.astype(np.int32))
    folded = attention._folded(queries, keys, values, 0.25, window, positions)
    fused = attention._fused(queries, keys, values, 0.25, window, None, positions)
    assert np.abs(np.array(folded[0]) - expected).max() < 2e-6
    assert np.abs(np.array(fused[0]) - expected).max() < 2e-6
