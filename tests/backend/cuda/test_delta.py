"""Kernels of gated delta layers against float64; without CUDA the operations that stand for them."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from backend.cuda.references import TOLERANCE, error

from headrace.backend.cuda import delta
from headrace.backend.cuda.shapes import LONGEST_WINDOW, DeltaShape, Left, Stash, Weights
from headrace.backend.gated_delta import scan, scan_chunks
from headrace.perf import layer_references
from headrace.perf.references import double

pytestmark = pytest.mark.gpu

HEADS = [(1, 1, 64, 16), (2, 4, 128, 128), (2, 6, 64, 48), (1, 2, 256, 32), (1, 1, 256, 256), (1, 2, 64, 208)]
"""Key heads, value heads, and their dimensions."""
SORTS = [
    *((HEADS[0], mx.float32), (HEADS[0], mx.float16), (HEADS[1], mx.float32), (HEADS[1], mx.bfloat16)),
    *((HEADS[2], mx.float32), (HEADS[2], mx.bfloat16), (HEADS[3], mx.float16), (HEADS[4], mx.float32)),
    (HEADS[5], mx.bfloat16),
]


def shape_of(num_k_heads: int, num_v_heads: int, head_k_dim: int, head_v_dim: int) -> DeltaShape:
    channels, value_dim = 2 * num_k_heads * head_k_dim + num_v_heads * head_v_dim, num_v_heads * head_v_dim
    b_at = channels + value_dim
    width = b_at + 2 * num_v_heads
    return DeltaShape(num_k_heads, num_v_heads, head_k_dim, head_v_dim, 4, width, channels, b_at, b_at + num_v_heads)


class Numbers:
    """Random arrays of a type."""

    def __init__(self, seed: int, dtype: mx.Dtype) -> None:
        self._random = np.random.default_rng(seed)
        self._dtype = dtype

    def __call__(self, *shape: int, dtype: mx.Dtype | None = None) -> mx.array:
        drawn = mx.array(self._random.standard_normal(shape).astype(np.float32))
        return drawn.astype(dtype or self._dtype)

    def gates(self, *shape: int) -> mx.array:
        """Within 0 and 1, float32."""
        return mx.sigmoid(self(*shape, dtype=mx.float32) + 1)

    def keys(self, *shape: int) -> mx.array:
        """Of length 1."""
        drawn = self(*shape, dtype=mx.float32)
        return (drawn / mx.sqrt((drawn * drawn).sum(axis=-1, keepdims=True))).astype(self._dtype)

    def weights(self, shape: DeltaShape) -> Weights:
        heads = shape.num_v_heads
        return Weights(
            0.3 * self(shape.num_channels, shape.kernel_size),
            mx.abs(self(heads, dtype=mx.float32)),
            self(heads),
            1 + 0.1 * self(shape.head_v_dim),
            mx.array([1e-6]),
        )

    def stash(self, rows: int, num_tokens: int, shape: DeltaShape) -> Stash:
        return Stash(
            self.keys(rows, num_tokens, shape.num_k_heads, shape.head_k_dim),
            self(rows, num_tokens, shape.num_v_heads, shape.head_v_dim),
            self.gates(rows, num_tokens, shape.num_v_heads),
            self.gates(rows, num_tokens, shape.num_v_heads),
        )


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("heads", "rows", "num_tokens", "keep"),
    [(HEADS[1], 1, 37, 20), (HEADS[0], 2, 5, 0), (HEADS[3], 1, 70, 70), (HEADS[2], 3, 1, 1), (HEADS[2], 1, 33, None)],
)
def test_a_scan_is_the_rule_token_by_token(
    heads: tuple[int, int, int, int], rows: int, num_tokens: int, keep: int | None, dtype: mx.Dtype
) -> None:
    drawn = Numbers(num_tokens, dtype)
    num_k_heads, num_v_heads, head_k_dim, head_v_dim = heads
    q = drawn(rows, num_tokens, num_k_heads, head_k_dim) / head_k_dim
    k = drawn.keys(rows, num_tokens, num_k_heads, head_k_dim)
    v = drawn(rows, num_tokens, num_v_heads, head_v_dim)
    g, beta = drawn.gates(rows, num_tokens, num_v_heads), drawn.gates(rows, num_tokens, num_v_heads)
    state = drawn(rows, num_v_heads, head_v_dim, head_k_dim, dtype=mx.float32)
    got = scan("cuda", q, k, v, g, beta, state, keep=keep)
    assert got.y.dtype == dtype and got.end_state.dtype == mx.float32
    for row in range(rows):
        y, end, kept = layer_references.scan(*(double(x)[row] for x in (q, k, v, g, beta, state)), keep)
        assert error(got.y[row], y) < TOLERANCE[dtype]
        assert error(got.end_state[row], end) < TOLERANCE[mx.float32]
        if keep is None:
            assert got.kept_state is None
        else:
            assert got.kept_state is not None
            assert error(got.kept_state[row], kept) < TOLERANCE[mx.float32]


NUM_ADDED = 2
"""Padding tokens behind the last row's."""

# Per row: its tokens, where its context ends in the old raw inputs, its old row, and its stops.
CHUNKS = {
    "one token": [(1, 3, 0, (1,))],
    "one row": [(150, 5, 1, (150,))],
    "rows of any lengths": [(3, 3, 2, (3,)), (70, 6, 0, (64, 70)), (1, 4, 0, (1,)), (33, 5, 1, (1, 2, 30, 33))],
    "uncertain tokens behind the last stop": [(9, 4, 1, (0,)), (65, 3, 0, (5, 60))],
    "rows of no tokens behind them": [(20, 3, 1, (4, 20)), (0, 0, 0, ()), (0, 0, 0, ())],
}
NUM_OLD, ROOM = 3, 6
"""Rows of the old arrays, and raw inputs of each."""


@pytest.mark.parametrize(("heads", "dtype"), SORTS, ids=str)
@pytest.mark.parametrize("case", CHUNKS)
def test_chunks_are_prepared_and_scanned_row_by_row(
    case: str, heads: tuple[int, int, int, int], dtype: mx.Dtype
) -> None:
    shape, drawn, context = shape_of(*heads), Numbers(len(case), dtype), 3
    rows, ends, lo = [], [], 0
    for num_tokens, end, old, stops in CHUNKS[case]:
        rows.append((lo, num_tokens, end, old, len(ends), len(stops)))
        ends += stops
        lo += num_tokens
    weights, projected = drawn.weights(shape), drawn(1, lo + NUM_ADDED, shape.width)
    old_raw = drawn(NUM_OLD, ROOM, shape.num_channels)
    state = drawn(NUM_OLD, shape.num_v_heads, shape.head_v_dim, shape.head_k_dim, dtype=mx.float32)
    plan, stops = mx.array(rows, dtype=mx.int32), mx.array(ends, dtype=mx.int32)
    longest = max(num_tokens for _, num_tokens, *_ in rows)
    tokens, raw = delta.prepare(shape, weights, plan, stops, longest, projected, old_raw)
    y, states = scan_chunks(rows, ends, plan, stops, tokens, state)
    assert states.shape[0] == raw.shape[0] == len(ends)
    for lo, num_tokens, end, old, first, num_stops in rows:
        if not num_tokens:
            continue
        own, before = double(projected)[0, lo : lo + num_tokens], double(old_raw)[old, end - context : end]
        *wanted, inputs = layer_references.prepare(shape, weights, own, before)
        for name, array, other in zip(tokens._fields, tokens, wanted, strict=True):
            assert array.dtype == (mx.float32 if name in ("g", "beta") else dtype)
            assert error(array[lo : lo + num_tokens], other) < TOLERANCE[dtype], name
        for stop in range(first, first + num_stops):
            assert error(raw[stop], inputs[ends[stop] : ends[stop] + context]) == 0
            given = (double(array[lo : lo + num_tokens]) for array in tokens)
            said, _, kept = layer_references.scan(*given, double(state)[old], ends[stop])
            assert error(states[stop], kept) < TOLERANCE[mx.float32]
            assert error(y[lo : lo + num_tokens], said) < TOLERANCE[dtype]


# Per row: its tokens, the certain ones, replayed ones, where its context ends in the old window, its old row.
ROWS = {
    "one token of one row": ([(1, 1, 0, 3, 0)], 1, 1),
    "rows that stepped together before": ([(1, 1, 0, 7, 2), (3, 1, 2, 5, 0), (4, 2, 3, 6, 3), (2, 2, 1, 4, 1)], 4, 4),
    "the longest window behind the longest replay": ([(8, 1, 7, 11, 0), (1, 1, 0, 3, 1)], 2, 8),
    "nothing uncertain, no stash": ([(5, 5, 0, 3, 0), (2, 2, 0, 3, 0)], 1, 1),
    "nothing certain": ([(1, 0, 1, 4, 1), (1, 0, 0, 4, 0), (3, 1, 3, 6, 2)], 3, 5),
    "rows of no tokens behind them": ([(3, 1, 2, 5, 1), (0, 0, 0, 0, 0), (0, 0, 0, 0, 0)], 2, 3),
}


@pytest.mark.parametrize(("heads", "dtype"), SORTS, ids=str)
@pytest.mark.parametrize("case", ROWS)
def test_a_window_is_the_layer_between_its_projections(
    case: str, heads: tuple[int, int, int, int], dtype: mx.Dtype
) -> None:
    rows, num_old, old_longest = ROWS[case]
    shape, drawn = shape_of(*heads), Numbers(len(case), dtype)
    longest, context = LONGEST_WINDOW, shape.kernel_size - 1
    starts = np.cumsum([0, *(row[0] for row in rows)]).tolist()
    plan = [(lo, *row) for lo, row in zip(starts, rows, strict=False)]
    weights, projected = drawn.weights(shape), drawn(1, starts[-1] + NUM_ADDED, shape.width)
    old_raw = drawn(num_old, context + old_longest, shape.num_channels)
    old_stash = drawn.stash(num_old, max(old_longest - 1, 1), shape)
    state = drawn(num_old, shape.num_v_heads, shape.head_v_dim, shape.head_k_dim, dtype=mx.float32)
    table = mx.array(plan, dtype=mx.int32)
    got = delta.window(shape, weights, table, projected, old_raw, old_stash, state)
    assert got.out.dtype == dtype and got.state.dtype == mx.float32
    assert got.raw.shape == (len(rows), context + longest, shape.num_channels)
    assert [array.shape[:2] for array in got.stash] == [(len(rows), longest - 1)] * 4
    said = []
    for place, row in enumerate(plan):
        _, num_tokens, num_certain, *_ = row
        if not num_tokens:
            continue
        y, kept, raw, *stash = layer_references.window(
            shape, weights, row, double(projected)[0], double(old_raw), old_stash, double(state)
        )
        said.append(y)
        assert error(got.state[place], kept) < TOLERANCE[dtype]
        assert error(got.raw[place, : context + num_tokens], raw) == 0
        for array, wanted in zip(got.stash, stash, strict=True):
            assert error(array[place, : num_tokens - num_certain], wanted) < TOLERANCE[dtype]
    num_tokens = starts[-1]
    wanted = layer_references.gated_norm(shape, weights, np.concatenate(said), double(projected)[0, :num_tokens])
    assert error(got.out[:, :num_tokens], wanted) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("rooms", [[(3, 1)], [(11, 7), (3, 1)], [(4, 1), (11, 7), (5, 1), (9, 5), (7, 3)]], ids=str)
def test_rows_are_gathered_from_several_steps(rooms: list[tuple[int, int]], dtype: mx.Dtype) -> None:
    shape, drawn, num_rows = shape_of(*HEADS[2]), Numbers(len(rooms), dtype), 3
    sources = [
        Left(
            drawn(num_rows, shape.num_v_heads, shape.head_v_dim, shape.head_k_dim, dtype=mx.float32),
            drawn(num_rows, room, shape.num_channels),
            drawn.stash(num_rows, num_stashed, shape),
        )
        for room, num_stashed in rooms
    ]
    # every row of every source, the last sources first, as much of each as it has; in the end one that is no row
    rows = [
        (source, row, rooms[source][0] - row % 2, max(0, rooms[source][1] - row))
        for source in reversed(range(len(rooms)))
        for row in (2, 0, 1)
    ]
    got = delta.gather(shape, mx.array([*rows, (0, 0, 0, 0)], dtype=mx.int32), sources)
    longest = LONGEST_WINDOW
    assert got.raw.shape == (len(rows) + 1, shape.kernel_size - 1 + longest, shape.num_channels)
    assert [array.shape[:2] for array in got.stash] == [(len(rows) + 1, longest - 1)] * 4
    for place, (source, row, end, num_replay) in enumerate(rows):
        of = sources[source]
        assert mx.array_equal(got.state[place], of.state[row])
        assert mx.array_equal(got.raw[place, :end], of.raw[row, :end])
        for array, held in zip(got.stash, of.stash, strict=True):
            assert mx.array_equal(array[place, :num_replay], held[row, :num_replay])


@pytest.mark.parametrize("cut", [1, 2, 5])
def test_a_window_and_a_chunk_of_the_same_tokens_agree(cut: int) -> None:
    shape, drawn = shape_of(*HEADS[2]), Numbers(cut, mx.float32)
    num_tokens, context = LONGEST_WINDOW, shape.kernel_size - 1
    weights, projected = drawn.weights(shape), drawn(1, num_tokens, shape.width)
    before = drawn(1, context, shape.num_channels)
    state = drawn(1, shape.num_v_heads, shape.head_v_dim, shape.head_k_dim)
    row, ends = mx.array([(0, num_tokens, context, 0, 0, 1)], dtype=mx.int32), mx.array([num_tokens], dtype=mx.int32)
    chunk, _ = delta.prepare(shape, weights, row, ends, num_tokens, projected, before)
    wanted = scan("cuda", *(array[None] for array in chunk), state, keep=cut)
    plan = mx.array([(0, num_tokens, cut, 0, context, 0)], dtype=mx.int32)
    got = delta.window(shape, weights, plan, projected, before, drawn.stash(1, 1, shape), state)
    out = delta.gated_norm(shape, weights, wanted.y[0], projected)
    assert error(got.out, double(out)) < TOLERANCE[mx.float32]
    assert wanted.kept_state is not None
    assert error(got.state, double(wanted.kept_state)) < TOLERANCE[mx.float32]


@pytest.mark.parametrize(("heads", "dtype"), SORTS, ids=str)
def test_the_norm_of_the_output_is_gated(heads: tuple[int, int, int, int], dtype: mx.Dtype) -> None:
    shape, drawn = shape_of(*heads), Numbers(3, dtype)
    weights, projected = drawn.weights(shape), drawn(1, 9, shape.width)
    y = drawn(9, shape.num_v_heads, shape.head_v_dim)
    got = delta.gated_norm(shape, weights, y, projected)
    assert got.dtype == dtype
    assert error(got, layer_references.gated_norm(shape, weights, double(y), double(projected)[0])) < TOLERANCE[dtype]


def test_heads_that_the_kernels_can_not_do_are_named() -> None:
    assert delta.refusal(128, 128) is None
    assert delta.refusal(96, 128) == "a key head of 96"
    assert delta.refusal(128, 24) == "a value head of 24"
    assert delta.refusal(128, 272) == "a value head of 272"
