"""Gated delta layers with their states in a table, against float64; without CUDA the operations that stand for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np
import pytest
from backend.cuda.references import TOLERANCE, error
from backend.cuda.test_delta import HEADS, SORTS, Numbers, shape_of

from benchmarks import references as layer_references
from benchmarks.references import Float64, double
from headrace.backend.cuda import delta
from headrace.backend.cuda.shapes import (
    LONGEST_WINDOW,
    MANY_TOKENS,
    DeltaShape,
    DeltaTable,
    DeltaWeights,
    Prepared,
    Stash,
)

pytestmark = pytest.mark.gpu

CONTEXT = 3
NUM_SLOTS = 5
NUM_ADDED = 2
"""Padding tokens behind the last row's."""


def table_of(shape: DeltaShape, drawn: Numbers) -> DeltaTable:
    table = DeltaTable(
        drawn(NUM_SLOTS, shape.num_v_heads, shape.head_v_dim, shape.head_k_dim, dtype=mx.float32),
        drawn(2 * NUM_SLOTS, shape.kernel_size - 1 + LONGEST_WINDOW, shape.num_channels),
        *drawn.stash(2 * NUM_SLOTS, LONGEST_WINDOW - 1, shape),
    )
    mx.eval(table)
    return table


class Before:
    """A table's numbers before a kernel, in float64; rows that are not there are zeros."""

    def __init__(self, table: DeltaTable) -> None:
        self.state, self.raw = double(table.state), double(table.raw)
        self.stash = tuple(double(array) for array in table.stash)

    def state_of(self, slot: int, old: int) -> Float64:
        found: Float64 = self.state[slot] if slot >= 0 and old >= 0 else np.zeros_like(self.state[0])
        return found

    def context(self, end: int, old: int) -> Float64:
        found: Float64 = self.raw[old, end - CONTEXT : end] if old >= 0 else np.zeros_like(self.raw[0, :CONTEXT])
        return found

    def check_untouched(self, table: DeltaTable, slots: set[int], news: set[int]) -> None:
        """Whether all of a table but these rows is as it was."""
        slots_left = [slot for slot in range(NUM_SLOTS) if slot not in slots]
        rows_left = [row for row in range(2 * NUM_SLOTS) if row not in news]
        assert np.array_equal(double(table.state)[slots_left], self.state[slots_left])
        for array, old in zip((table.raw, *table.stash), (self.raw, *self.stash), strict=True):
            assert np.array_equal(double(array)[rows_left], old[rows_left])


# Per row: its tokens, the certain ones, replayed ones, where its context ends, its slot, its old and its new row.
ROWS = {
    "one token of one row": [(1, 1, 0, 3, 2, 4, 5)],
    "rows of any slots": [(1, 1, 0, 7, 4, 9, 8), (3, 1, 2, 5, 0, 0, 1), (4, 2, 3, 6, 3, 6, 7), (2, 2, 1, 4, 1, 3, 2)],
    "the longest window behind the longest replay": [(8, 1, 7, 11, 0, 1, 0), (1, 1, 0, 3, 1, 2, 3)],
    "a row's first tokens": [(5, 5, 0, 0, 3, -1, 6), (1, 0, 0, 0, 0, -1, 0), (2, 1, 0, 3, 2, 4, 5)],
    "nothing certain": [(1, 0, 1, 4, 1, 2, 3), (1, 0, 0, 4, 0, 0, 1), (3, 1, 3, 6, 2, 5, 4)],
    "padding": [(3, 1, 2, 5, 1, 2, 3), (0, 0, 0, 0, 0, 0, 0), (0, 0, 0, 0, -1, -1, -1)],
}


@pytest.mark.parametrize(("heads", "dtype"), SORTS, ids=str)
@pytest.mark.parametrize("case", ROWS)
def test_a_step_goes_on_from_a_slot_and_leaves_it_there(
    case: str, heads: tuple[int, int, int, int], dtype: mx.Dtype
) -> None:
    shape, drawn = shape_of(*heads), Numbers(len(case), dtype)
    starts = np.cumsum([0, *(row[0] for row in ROWS[case])]).tolist()
    plan = [(lo, *row) for lo, row in zip(starts, ROWS[case], strict=False)]
    weights, projected = drawn.weights(shape), drawn(1, starts[-1] + NUM_ADDED, shape.width)
    table = table_of(shape, drawn)
    before = Before(table)
    out = delta.step(shape, weights, mx.array(plan, dtype=mx.int32), projected, table)
    mx.eval(out)
    assert out.dtype == dtype
    said = []
    for lo, num_tokens, num_certain, num_replay, end, slot, old, new in plan:
        if not num_tokens:
            continue
        y, kept, raw, *stash = layer_references.window(
            shape,
            weights,
            (0, num_tokens, num_certain, num_replay, CONTEXT, 0),
            double(projected)[0, lo : lo + num_tokens],
            before.context(end, old)[None],
            Stash(*(mx.array(array[max(old, 0)][None].astype(np.float32)) for array in before.stash)),
            before.state_of(slot, old)[None],
        )
        said.append(y)
        assert error(table.state[slot], kept) < TOLERANCE[dtype]
        assert error(table.raw[new, : CONTEXT + num_tokens], raw) == 0
        for array, wanted in zip(table.stash, stash, strict=True):
            assert error(array[new, : num_tokens - num_certain], wanted) < TOLERANCE[dtype]
    wanted = layer_references.gated_norm(shape, weights, np.concatenate(said), double(projected)[0, : starts[-1]])
    assert error(out[:, : starts[-1]], wanted) < TOLERANCE[dtype]
    real = [row for row in plan if row[1]]
    before.check_untouched(table, {row[5] for row in real}, {row[7] for row in real})


# Per row: its tokens, the certain ones, where its context ends, its slot, its old and its new row, and its stops.
CHUNKS = {
    "one token": [(1, 1, 3, 0, 0, 1, (1,))],
    "one row and no stop": [(150, 150, 5, 1, 2, 3, ())],
    "rows of any lengths": [
        (3, 3, 3, 2, 5, 4, (3,)),
        (70, 70, 6, 0, 0, 1, (64, 70)),
        (1, 1, 4, 3, 6, 7, ()),
        (33, 33, 5, 1, 3, 2, (0, 1, 2, 30, 33)),
    ],
    "lengths about those of groups": [
        (4, 4, 3, 0, 0, 1, (3, 4)),
        (5, 3, 0, 1, -1, 2, (2,)),
        (31, 31, 5, 2, 4, 5, (31,)),
        (33, 32, 4, 3, 6, 7, (4, 32)),
        (7, 1, 0, 4, -1, 9, (0, 1)),
    ],
    "uncertain tokens": [(9, 2, 4, 1, 2, 3, (0,)), (65, 60, 3, 0, 0, 1, (5, 60)), (4, 3, 3, 2, 4, 5, ())],
    "a row's first tokens": [(2, 1, 0, 1, -1, 2, ()), (40, 40, 0, 4, -1, 9, (0, 2, 39))],
    "states copied out, and padding": [
        (20, 20, 3, 1, 2, 3, (4, 20)),
        (0, 0, 7, 4, 9, 8, (0,)),
        (0, 0, 0, 3, -1, 7, (0,)),
        (0, 0, 0, 0, 0, 0, ()),
        (0, 0, 0, -1, -1, -1, ()),
    ],
    "nothing that the table is to keep": [(5, 3, 0, -1, -1, -1, (3,)), (2, 2, 3, 2, 4, 5, ())],
    "only states copied out": [(0, 0, 3, 2, 4, 5, (0,))],
}


@pytest.mark.parametrize("in_blocks", [False, True])
@pytest.mark.parametrize(("heads", "dtype"), SORTS, ids=str)
@pytest.mark.parametrize("case", CHUNKS)
def test_chunks_go_on_from_slots_and_leave_them_there(
    case: str, heads: tuple[int, int, int, int], dtype: mx.Dtype, in_blocks: bool
) -> None:
    shape, drawn = shape_of(*heads), Numbers(len(case), dtype)
    plan, ends, lo = [], [], 0
    for *row, own_stops in CHUNKS[case]:
        plan.append((lo, *row, len(ends), len(own_stops)))
        ends += own_stops
        lo += row[0]
    num_stops = len(ends)
    weights, projected, table = drawn.weights(shape), drawn(1, lo + NUM_ADDED, shape.width), table_of(shape, drawn)
    before = Before(table)
    # behind them stops of no row
    stops, rows = mx.array([*ends, 0, 0], dtype=mx.int32), mx.array(plan, dtype=mx.int32)
    longest = max(row[1] for row in plan)
    tokens, raw = delta.prepare_chunks(shape, weights, rows, stops, longest, projected, table)
    y, states = delta.scan_chunks(rows, stops, tokens, table.state, in_blocks=in_blocks, least=1)
    mx.eval(tokens, raw, y, states)
    assert raw.shape == (num_stops + 2, CONTEXT, shape.num_channels)
    assert states.shape == (num_stops + 2, *table.state.shape[1:]) and states.dtype == mx.float32
    for lo, num_tokens, num_certain, end, slot, old, new, first, number in plan:
        context, state = before.context(end, old), before.state_of(slot, old)
        if not num_tokens:
            assert all(error(raw[stop], context) == 0 for stop in range(first, first + number))
            assert all(error(states[stop], state) == 0 for stop in range(first, first + number))
            continue
        *wanted, inputs = layer_references.prepare(shape, weights, double(projected)[0, lo : lo + num_tokens], context)
        given = [double(array[lo : lo + num_tokens]) for array in tokens]
        for stop in range(first, first + number):
            assert error(raw[stop], inputs[ends[stop] : ends[stop] + CONTEXT]) == 0
            _, _, kept = layer_references.scan(*given, state, ends[stop])
            assert error(states[stop], kept) < TOLERANCE[mx.float32]
        for name, array, other in zip(tokens._fields, tokens, wanted, strict=True):
            assert error(array[lo : lo + num_tokens], other) < TOLERANCE[dtype], name
        said, _, kept = layer_references.scan(*given, state, num_certain)
        assert error(y[lo : lo + num_tokens], said) < TOLERANCE[dtype]
        if slot >= 0:
            assert error(table.state[slot], kept) < TOLERANCE[mx.float32]
        if new >= 0:
            num_uncertain = num_tokens - num_certain
            assert error(table.raw[new, : CONTEXT + num_uncertain], inputs[num_certain:]) == 0
            for array, prepared in zip(table.stash, tokens[1:], strict=True):
                assert mx.array_equal(array[new, :num_uncertain], prepared[lo + num_certain : lo + num_tokens])
    real = [row for row in plan if row[1]]
    before.check_untouched(table, {row[4] for row in real}, {row[6] for row in real})


@pytest.mark.parametrize("kernel_size", [4, 3])
@pytest.mark.parametrize(("heads", "dtype"), SORTS, ids=str)
def test_steps_and_chunks_make_the_same_bits_of_a_token(
    heads: tuple[int, int, int, int], dtype: mx.Dtype, kernel_size: int
) -> None:
    shape, drawn = shape_of(*heads, kernel_size), Numbers(6, dtype)
    weights, projected = drawn.weights(shape), drawn(1, 9, shape.width)
    by_step, by_chunk = (table_of(shape, Numbers(7, dtype)) for _ in range(2))
    # a row with 7 uncertain tokens, which both leave in the stash, and one of a certain token
    out = delta.step(shape, weights, table_plan((0, 8, 1, 0, 3, 1, 2, 3), (8, 1, 1, 0, 3, 2, 5, 4)), projected, by_step)
    plan = table_plan((0, 8, 1, 3, 1, 2, 3, 0, 0), (8, 1, 1, 3, 2, 5, 4, 0, 0))
    tokens, _ = delta.prepare_chunks(shape, weights, plan, mx.array([0]), 8, projected, by_chunk)
    y, _ = delta.scan_chunks(plan, mx.array([0]), tokens, by_chunk.state)
    mx.eval(out, y)
    assert mx.array_equal(by_step.state, by_chunk.state)
    for array, other in zip(by_step.stash, by_chunk.stash, strict=True):
        assert mx.array_equal(array[3], other[3])


def table_plan(*rows: tuple[int, ...]) -> mx.array:
    return mx.array(rows, dtype=mx.int32)


def gates_that_hardly_decay(tokens: Prepared) -> Prepared:
    return tokens._replace(g=1 - 1e-4 * tokens.g)


def keys_that_are_almost_the_same(tokens: Prepared) -> Prepared:
    """The triangular system of a block is then the hardest to solve."""
    k = 1 + 0.5 * tokens.k.astype(mx.float32)
    k = k / mx.sqrt((k * k).sum(axis=-1, keepdims=True))
    return tokens._replace(k=k.astype(tokens.k.dtype), g=mx.full(tokens.g.shape, 0.9999), beta=0.999 + 0 * tokens.beta)


def gates_that_forget_all(tokens: Prepared) -> Prepared:
    places = mx.arange(len(tokens.g))[:, None]
    return tokens._replace(g=mx.where(places % 7 == 0, 0.0, mx.where(places % 5 == 1, 1e-30, tokens.g)))


HARD_TOKENS = [gates_that_hardly_decay, keys_that_are_almost_the_same, gates_that_forget_all]


@pytest.mark.parametrize("in_blocks", [False, True])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("change", HARD_TOKENS)
def test_states_are_precise_whatever_the_tokens_are(
    change: Callable[[Prepared], Prepared], dtype: mx.Dtype, in_blocks: bool
) -> None:
    num_tokens, drawn = 150, Numbers(1, dtype)
    key, value = (num_tokens, 1, 128), (num_tokens, 2, 128)
    gates = drawn.gates(num_tokens, 2), drawn.gates(num_tokens, 2)
    tokens = change(Prepared(drawn.keys(*key) / 8, drawn.keys(*key), drawn(*value), *gates))
    state = drawn(1, 2, 128, 128, dtype=mx.float32)
    given = [double(array) for array in tokens]
    said, wanted, kept = layer_references.scan(*given, double(state)[0], 70)
    plan = mx.array([(0, num_tokens, num_tokens, 0, 0, 0, 0, 0, 1)], dtype=mx.int32)
    y, states = delta.scan_chunks(plan, mx.array([70], dtype=mx.int32), tokens, state, in_blocks=in_blocks, least=1)
    mx.eval(y, states)
    assert error(y, said) < TOLERANCE[dtype]
    assert error(state[0], wanted) < TOLERANCE[mx.float32]
    assert error(states[0], kept) < TOLERANCE[mx.float32]


@pytest.mark.parametrize("in_blocks", [False, True])
@pytest.mark.parametrize(("heads", "dtype"), SORTS, ids=str)
def test_stashed_tokens_are_settled_by_a_scan(
    heads: tuple[int, int, int, int], dtype: mx.Dtype, in_blocks: bool
) -> None:
    shape, drawn = shape_of(*heads), Numbers(5, dtype)
    table = table_of(shape, drawn)
    before, stashed = Before(table), LONGEST_WINDOW - 1
    k, v, g, beta = (array.reshape(-1, *array.shape[2:]) for array in table.stash)
    # slot 3 has two pending tokens in its second row, slot 0 all that fit in its first
    plan = [(7 * stashed, 2, 2, 0, 3, 7, -1, 0, 0), (0, stashed, stashed, 0, 0, 0, -1, 0, 1), (0,) * 9]
    stops = mx.array([stashed], dtype=mx.int32)
    tokens = Prepared(k, k, v, g, beta)
    _, states = delta.scan_chunks(
        mx.array(plan, dtype=mx.int32), stops, tokens, table.state, in_blocks=in_blocks, least=1
    )
    mx.eval(states)
    for slot, row, number in ((3, 7, 2), (0, 0, stashed)):
        key, *rest = (array[row, :number] for array in before.stash)
        _, wanted, _ = layer_references.scan(key, key, *rest, before.state[slot], None)
        assert error(table.state[slot], wanted) < TOLERANCE[mx.float32]
    assert mx.array_equal(states[0], table.state[0])
    before.check_untouched(table, {3, 0}, set())


FEW = MANY_TOKENS - 1


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("heads", [(1, 2, 64, 16), (1, 1, 64, 32), (1, 2, 64, 48), (1, 1, 128, 64)])
def test_rows_of_few_tokens_find_the_same_bits_in_any_company(
    heads: tuple[int, int, int, int], dtype: mx.Dtype
) -> None:
    """Those of a scan that goes token by token, at the stops, too; longer rows are the same in any company, too."""
    num_k_heads, num_v_heads, head_k_dim, head_v_dim = heads
    drawn, lengths = Numbers(7, dtype), (5, FEW + 1, FEW, 0, 1)
    los, total = np.cumsum([0, *lengths]).tolist(), sum(lengths)
    tokens = Prepared(
        drawn.keys(total, num_k_heads, head_k_dim) / 8,
        drawn.keys(total, num_k_heads, head_k_dim),
        drawn(total, num_v_heads, head_v_dim),
        *(drawn.gates(total, num_v_heads) for _ in range(2)),
    )
    before = drawn(len(lengths), num_v_heads, head_v_dim, head_k_dim, dtype=mx.float32)
    mx.eval(tokens, before)

    def scanned(rows: Sequence[int], *, in_blocks: bool) -> tuple[mx.array, mx.array, mx.array]:
        """Each row leaves its state after a third and two thirds of its tokens."""
        plan, stops = [], []
        for row in rows:
            plan.append((los[row], lengths[row], lengths[row], 0, row, 2 * row, -1, len(stops), 2))
            stops += [lengths[row] // 3, lengths[row] * 2 // 3]
        state = mx.array(np.array(before))
        arrays = mx.array(plan, dtype=mx.int32), mx.array(stops, dtype=mx.int32)
        y, states = delta.scan_chunks(*arrays, tokens, state, in_blocks=in_blocks)
        mx.eval(y, states)
        return y, states.reshape(len(rows), 2, *states.shape[1:]), state

    everything = range(len(lengths))
    y, states, after = scanned(everything, in_blocks=True)
    by_token = scanned(everything, in_blocks=False)
    for row in everything:
        own = slice(los[row], los[row + 1])

        def same_bits(others: tuple[mx.array, mx.array, mx.array], at: int, row: int = row, own: slice = own) -> bool:
            pairs = (y[own], others[0][own]), (states[row], others[1][at]), (after[row], others[2][row])
            return all(mx.array_equal(*pair) for pair in pairs)

        goes_in_blocks = lengths[row] > FEW and mx.cuda.is_available()
        assert same_bits(scanned([row], in_blocks=True), 0)
        assert same_bits(by_token, row) != goes_in_blocks
        if lengths[row]:
            given = [double(array[own]) for array in tokens]
            said, kept, stopped = layer_references.scan(*given, double(before)[row], lengths[row] // 3)
            assert error(y[own], said) < TOLERANCE[dtype]
            assert error(after[row], kept) < TOLERANCE[mx.float32]
            assert error(states[row, 0], stopped) < TOLERANCE[mx.float32]


@pytest.mark.parametrize("kernel_size", [4, 3, 2])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_steps_and_chunks_leave_what_the_other_goes_on_from(dtype: mx.Dtype, kernel_size: int) -> None:
    """25 tokens in a chunk with drafts behind it, two steps that take some of them, and a chunk again.

    With a convolution over three tokens, rows of the projection and of the weights are of odd widths.
    """
    shape, drawn = shape_of(*HEADS[2], kernel_size), Numbers(11, dtype)
    context = kernel_size - 1
    weights, table = drawn.weights(shape), table_of(shape, drawn)
    projected = drawn(1, 60, shape.width)
    wanted_out, wanted_state = whole(shape, weights, projected[:, :46])
    said = []

    def chunk(
        lo: int, num_tokens: int, num_certain: int, end: int, old: int, new: int, tokens: mx.array = projected
    ) -> None:
        plan = mx.array([(0, num_tokens, num_certain, end, 2, old, new, 0, 0)], dtype=mx.int32)
        own, stops = tokens[:, lo : lo + num_tokens], mx.array([0], dtype=mx.int32)
        prepared, _ = delta.prepare_chunks(shape, weights, plan, stops, num_tokens, own, table)
        y, _ = delta.scan_chunks(plan, stops, prepared, table.state)
        said.append(delta.gated_norm(shape, weights, y, own)[:, :num_certain])
        mx.eval(said)

    def step(lo: int, num_tokens: int, num_replay: int, end: int, old: int, new: int) -> None:
        plan = mx.array([(0, num_tokens, 1, num_replay, end, 2, old, new)], dtype=mx.int32)
        said.append(delta.step(shape, weights, plan, projected[:, lo : lo + num_tokens], table))
        mx.eval(said)

    # 25 certain tokens and four drafts, of which two are right
    wrong = mx.concatenate([projected[:, :27], projected[:, 50:52]], axis=1)
    chunk(0, 29, 25, 0, -1, 4, wrong)
    # the two, a token and three drafts; one is right
    step(27, 4, 2, context + 2, 4, 5)
    said[-1] = said[-1][:, :2]
    step(29, 1, 1, context + 2, 5, 4)
    chunk(30, 16, 16, context + 1, 4, 5)
    got = mx.concatenate(said, axis=1)
    wanted = np.concatenate([wanted_out[:, :25], wanted_out[:, 27:]], axis=1)
    assert error(got, wanted) < TOLERANCE[dtype]
    assert error(table.state[2], wanted_state) < TOLERANCE[dtype]


def whole(shape: DeltaShape, weights: DeltaWeights, projected: mx.array) -> tuple[Float64, Float64]:
    """Output and last state of one row's tokens, all at once."""
    own = double(projected)[0]
    *tokens, _ = layer_references.prepare(shape, weights, own, np.zeros((shape.kernel_size - 1, shape.num_channels)))
    nothing = np.zeros((shape.num_v_heads, shape.head_v_dim, shape.head_k_dim))
    y, state, _ = layer_references.scan(*tokens, nothing, None)
    return layer_references.gated_norm(shape, weights, y, own), state
