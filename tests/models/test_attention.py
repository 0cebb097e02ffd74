"""`attend`'s forms against attention written out in float64."""

import math
from functools import partial

import mlx.core as mx
import numpy as np
import pytest

from headrace.backend import blas
from headrace.backend.kernels import Kernels
from headrace.models.mixers import attention

folded = partial(attention._attention, folds=True)
fused = partial(attention._attention, folds=False)


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


def seven_queries(keys: mx.array) -> int:
    """Bytes of the scores of seven queries and all keys, for six heads in float32."""
    return 7 * 6 * keys.shape[2] * 4


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
    by_matmuls = folded(queries, keys, values, scale, window)
    by_library = fused(queries, keys, values, scale, window)
    cut = fused(queries, keys, values, scale, window, score_bytes=seven_queries(keys))
    for form in (by_matmuls, by_library, cut):
        assert np.abs(np.array(form)[0] - expected).max() < 1e-5


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
    by_matmuls = folded(queries, keys, values, 0.25, window, bidirectional=True)
    by_library = fused(queries, keys, values, 0.25, window, bidirectional=True)
    cut = fused(queries, keys, values, 0.25, window, bidirectional=True, score_bytes=seven_queries(keys))
    for form in (by_matmuls, by_library, cut):
        assert np.abs(np.array(form)[0] - expected).max() < 1e-5


def test_blocks_of_queries_give_the_bits_of_one_query_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    queries, keys, values = random(1, 4, 200, 16), random(1, 2, 330, 16), random(1, 2, 330, 16)
    at_once = folded(queries, keys, values, 0.25, None)
    monkeypatch.setattr(attention, "QUERY_BLOCK", 7)
    in_sevens = folded(queries, keys, values, 0.25, None)
    one_by_one = [
        folded(queries[:, :, i : i + 1], keys[:, :, : 131 + i], values[:, :, : 131 + i], 0.25, None) for i in range(200)
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
    by_matmuls = folded(queries, keys, values, 0.25, window, positions)
    by_library = fused(queries, keys, values, 0.25, window, positions)
    cut = fused(queries, keys, values, 0.25, window, positions, score_bytes=seven_queries(keys))
    for form in (by_matmuls, by_library, cut):
        assert np.abs(np.array(form[0]) - expected).max() < 2e-6


def test_no_call_holds_more_scores_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a chunk of 2,048 tokens behind 126,976, with 16 heads of 256 channels: 8.6 GB of scores in bfloat16."""
    shapes: list[tuple[int, int]] = []

    def record(queries: mx.array, keys: mx.array, values: mx.array, **options: object) -> mx.array:
        assert options["mask"] == "causal"
        shapes.append((queries.shape[2], keys.shape[2]))
        return queries

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", record)
    queries, keys = mx.zeros((1, 16, 2048, 256), mx.bfloat16), mx.zeros((1, 2, 131072, 256), mx.bfloat16)
    limit = Kernels("fast", "metal").score_bytes(256, 2048)
    assert limit is not None
    output = fused(queries, keys, keys, 1.0, None, score_bytes=limit)
    assert output.shape == queries.shape
    assert sum(num_queries for num_queries, _ in shapes) == 2048
    assert max(16 * 2 * num_queries * num_keys for num_queries, num_keys in shapes) <= 512_000_000
    assert shapes[0][1] == 131072 - 2048 + shapes[0][0], "a block reads the keys up to its last query"
    assert shapes[-1][1] == 131072


def test_the_cut_lets_attention_stay_below_mlx_memory_limit() -> None:
    """On a CPU the library holds all scores, as on Metal for wide heads; at the limit MLX waits for calls."""
    queries, keys = random(1, 4, 512, 192), random(1, 1, 2048, 192)
    scores_bytes = 4 * 512 * 2048 * 4
    mx.eval(queries, keys)
    before, peaks = mx.get_active_memory(), []
    former = mx.set_memory_limit(before + scores_bytes // 4)
    try:
        for limit in (None, scores_bytes // 64):
            mx.reset_peak_memory()
            mx.eval(fused(queries, keys, keys, 0.1, None, score_bytes=limit))
            peaks.append(mx.get_peak_memory() - before)
    finally:
        mx.set_memory_limit(former)
    assert peaks[0] > scores_bytes
    assert peaks[1] < 0.75 * scores_bytes


@pytest.mark.parametrize(
    ("device", "accelerated", "head_dim", "num_queries", "limits"),
    [
        ("metal", False, 128, 2048, False),
        ("metal", False, 192, 2048, True),
        ("metal", False, 256, 2048, True),
        ("metal", True, 256, 2048, False),
        ("metal", True, 256, 512, True),
        ("metal", True, 512, 2048, True),
        ("cuda", False, 256, 2048, False),
        pytest.param("cpu", False, 256, 2048, False, marks=pytest.mark.cpu_forms("the CPU's own line of the table")),
    ],
)
def test_only_where_the_library_holds_scores_are_queries_cut(
    device: str, accelerated: bool, head_dim: int, num_queries: int, limits: bool
) -> None:
    kernels = Kernels("fast", device, has_accelerators=accelerated)
    assert (kernels.score_bytes(head_dim, num_queries) is not None) == limits
