"""Slots hold what was written, grow without losing it, and give their memory back."""

import math
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest

from headrace.backend.cuda.put import Part, put
from headrace.backend.operations import num_launches, operations
from headrace.state import slabs
from headrace.state.attention import KVRecord, SlidingAttentionState
from headrace.state.delta import Stops
from headrace.state.records import SequenceRecord
from headrace.state.sequence import SequenceState
from headrace.state.slabs import SMALLEST_CAPACITY, StatePool, slot_capacity

LAYER = (0,)


@pytest.fixture(params=["ranges", "batches"])
def pool(request: pytest.FixtureRequest) -> StatePool:
    return StatePool(has_batches=request.param == "batches")


def tokens(start: int, end: int, num_heads: int = 2, head_dim: int = 4) -> tuple[mx.array, mx.array]:
    """Keys whose every element is the token's index, values its negative."""
    index = mx.arange(start, end, dtype=mx.float32)[None, None, :, None]
    keys = mx.broadcast_to(index, (1, num_heads, end - start, head_dim))
    return keys, -keys


def test_rows_of_one_slab_do_not_see_each_other(pool: StatePool) -> None:
    first, second = pool.allocate(10), pool.allocate(10)
    assert first.slab is second.slab
    first.write(LAYER, 0, *tokens(0, 5))
    second.write(LAYER, 0, *tokens(100, 103))
    assert mx.array_equal(first.read(LAYER, 0, 5)[0], tokens(0, 5)[0])
    assert mx.array_equal(second.read(LAYER, 1, 3)[1], tokens(101, 103)[1])


def test_a_row_that_outgrows_its_slot_keeps_its_tokens(pool: StatePool) -> None:
    slot = pool.allocate(SMALLEST_CAPACITY)
    slot.write(LAYER, 0, *tokens(0, SMALLEST_CAPACITY))
    pool.grow(slot, SMALLEST_CAPACITY + 1, SMALLEST_CAPACITY)
    assert slot.capacity == 2 * SMALLEST_CAPACITY
    slot.write(LAYER, SMALLEST_CAPACITY, *tokens(SMALLEST_CAPACITY, SMALLEST_CAPACITY + 1))
    keys, values = slot.read(LAYER, 0, SMALLEST_CAPACITY + 1)
    assert mx.array_equal(keys, tokens(0, SMALLEST_CAPACITY + 1)[0])
    assert mx.array_equal(values, tokens(0, SMALLEST_CAPACITY + 1)[1])


def test_a_row_for_whose_growth_memory_is_short_stays_where_it_is(
    pool: StatePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(self: StatePool, arrays: object) -> None:
        raise MemoryError

    slot = pool.allocate(SMALLEST_CAPACITY)
    slot.write(LAYER, 0, *tokens(0, 5))
    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(StatePool, "launch", no_memory)
        pool.grow(slot, SMALLEST_CAPACITY + 1, 5)
    assert slot.capacity == SMALLEST_CAPACITY
    assert mx.array_equal(slot.read(LAYER, 0, 5)[0], tokens(0, 5)[0])
    pool.free(slot)
    assert pool.num_bytes == 0, "the larger slot is free, too"


def test_a_pool_without_rows_holds_no_memory(pool: StatePool) -> None:
    slots = [pool.allocate(size) for size in (5, 5, 5, 5, 5, 600, 3000)]
    for slot in slots:
        slot.write(LAYER, 0, *tokens(0, 3))
    assert pool.num_bytes > 0
    for slot in slots:
        pool.free(slot)
    assert pool.num_bytes == 0


def overwrite(state: SequenceState) -> None:
    """As kernels do: the memory, without MLX's knowledge."""
    for array in state.full_attention(LAYER).arrays():
        np.array(array, copy=False)[...] = 7


@pytest.mark.parametrize("num_tokens", [1, 256, 1000, 1023, 1024, 2048])
def test_what_is_taken_of_a_slot_is_not_written_in_place(num_tokens: int, pool: StatePool) -> None:
    state = SequenceState(pool, num_tokens)
    state.begin(num_tokens)
    for start, end in ((0, num_tokens // 2), (num_tokens // 2, num_tokens)):
        if start < end:
            state.full_attention(LAYER).write(start, *tokens(start, end))
    mx.eval(state.arrays())
    state.commit(num_tokens)
    taken = [state.checkpoint().layers[LAYER], state.copy_span(0, num_tokens).layers[LAYER]]
    overwrite(state)
    assert float(state.full_attention(LAYER).read(0, 1)[0].max()) == 7
    for record in taken:
        assert all(mx.array_equal(*pair) for pair in zip(record.arrays, tokens(0, num_tokens), strict=True))


@pytest.mark.parametrize("num_tokens", [5, 1024])
def test_a_record_may_be_restored_any_number_of_times_while_slots_are_written_in_place(
    num_tokens: int, pool: StatePool
) -> None:
    record = SequenceRecord(num_tokens, {LAYER: KVRecord(0, *(mx.contiguous(one) for one in tokens(0, num_tokens)))})
    for _ in range(2):
        state = SequenceState(pool, num_tokens)
        state.restore(record)
        read = state.full_attention(LAYER).read(0, num_tokens)
        assert all(mx.array_equal(*pair) for pair in zip(read, tokens(0, num_tokens), strict=True))
        mx.eval(state.arrays())
        overwrite(state)


@pytest.mark.parametrize("num_tokens", [2, 5, 9, 10, 40])
def test_what_is_taken_of_a_sliding_buffer_is_not_written_in_place(num_tokens: int) -> None:
    window = 5
    state, first = SlidingAttentionState(window), max(0, num_tokens - window + 1)
    state.write(0, *tokens(0, num_tokens))
    kept = state.checkpoint(num_tokens)
    records = [state.take_snapshot(num_tokens), kept]
    mx.eval(state.arrays(), [record.arrays for record in records])
    for _ in range(2):
        for array in state.arrays():
            np.array(array, copy=False)[...] = 7
        assert float(state.read(num_tokens - 1, num_tokens)[0].max()) == 7
        for record in records:
            assert all(mx.array_equal(*pair) for pair in zip(record.arrays, tokens(first, num_tokens), strict=True))
        state.restore(kept, num_tokens)
        mx.eval(state.arrays())
        assert mx.array_equal(state.read(first, num_tokens)[0], tokens(first, num_tokens)[0])


def test_tokens_given_for_a_whole_sliding_buffer_stay_the_givers() -> None:
    state = SlidingAttentionState(2)
    given = tuple(mx.contiguous(one) for one in tokens(0, 40))
    state.write(0, *given)
    mx.eval(given, state.arrays())
    for array in state.arrays():
        np.array(array, copy=False)[...] = 7
    assert all(mx.array_equal(*pair) for pair in zip(given, tokens(0, 40), strict=True))


@pytest.mark.parametrize("num_tokens", [1025, 1500, 2049, 5000, 8192])
def test_a_long_row_takes_at_most_twice_its_tokens(num_tokens: int, pool: StatePool) -> None:
    slot = pool.allocate(num_tokens)
    slot.write(LAYER, 0, *tokens(0, num_tokens))
    used = sum(array.nbytes for array in tokens(0, num_tokens))
    assert pool.num_bytes < 2 * used


def test_a_freed_slot_is_used_again(pool: StatePool) -> None:
    kept, freed = pool.allocate(10), pool.allocate(10)
    pool.free(freed)
    again = pool.allocate(10)
    assert (again.slab, again.row, again.start) == (kept.slab, freed.row, freed.start)


def test_a_sliding_buffer_holds_the_window_through_moves() -> None:
    window = 6
    state = SlidingAttentionState(window)
    length = 0
    for num_tokens in [4, 1, 1, 1, 9, 1, 3, 1, 1, 1, 1, 1, 1, 7, 1, 1, 20, 1]:
        state.write(length, *tokens(length, length + num_tokens))
        oldest, length = max(0, length - window + 1), length + num_tokens
        keys, values = state.read(oldest, length)
        assert mx.array_equal(keys, tokens(oldest, length)[0])
        assert mx.array_equal(values, tokens(oldest, length)[1])
        assert state.arrays()[0].shape[2] == max(2 * window, length - oldest)


def test_dropped_tokens_of_a_sliding_buffer_are_overwritten() -> None:
    state = SlidingAttentionState(4)
    state.write(0, *tokens(0, 7))
    state.write(7, *tokens(900, 904))  # three of them are dropped
    state.write(8, *tokens(8, 9))
    keys, _ = state.read(5, 9)
    assert mx.array_equal(keys[0, 0, :, 0], mx.array([5, 6, 900, 8]))


def test_a_window_that_is_open_blocks_the_next_one_and_a_checkpoint() -> None:
    state = SequenceState(StatePool())
    state.begin(3)
    with pytest.raises(RuntimeError, match="still open"):
        state.begin(1)
    with pytest.raises(RuntimeError, match="is open"):
        state.checkpoint()


@pytest.mark.parametrize("num_tokens", [-1, 1, 5])
def test_only_uncertain_tokens_of_the_open_window_can_be_dropped(num_tokens: int) -> None:
    state = SequenceState(StatePool())
    state.begin(4, num_certain=2)
    with pytest.raises(ValueError, match="window of 4 with 2 certain"):
        state.commit(num_tokens)


def test_a_span_of_many_layers_is_copied_once() -> None:
    """Not again to take the layers apart: an index of an array copies."""
    state = SequenceState(StatePool(), 8)
    state.begin(8)
    layers = [(number,) for number in range(4)]
    for layer in layers:
        state.full_attention(layer).write(0, *tokens(0, 8))
    mx.eval(state.arrays())
    slot = state.full_attention(layers[0]).slot
    ((group, copied),) = slot.copies(layers, 2, 7).items()
    assert group == tuple(layers)
    records = KVRecord(2, *copied).by_layer(len(group))
    assert num_launches(operations([array for record in records for array in record.arrays])) == 1
    for record in records:
        assert all(mx.array_equal(*pair) for pair in zip(record.arrays, tokens(2, 7), strict=True))


@pytest.mark.parametrize("length", [90, 100])
def test_many_short_spans_are_restored_by_few_writes(length: int) -> None:
    """The last may hold more tokens than are restored."""
    pool = StatePool(1024)
    state = SequenceState(pool, 100)
    state.begin(100)
    layers = [(number,) for number in range(3)]
    for layer in layers:
        state.full_attention(layer).write(0, *tokens(layer[0], layer[0] + 100))
    state.commit(100)
    ends = [*range(4, 84, 4), 100]
    spans = [state.copy_span(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    launches: list[int] = []
    with pytest.MonkeyPatch.context() as patched:

        def counted(parts: Sequence[Part]) -> list[mx.array]:
            written = put(parts)
            launches.append(len(written))
            return written

        patched.setattr(slabs, "put", counted)
        restored = SequenceState(pool)
        restored.restore_parts(length, spans, None)
    assert len(launches) == 1 and launches[0] <= 2  # of the spans of 4 tokens, and of a longer one
    restored.begin(1)
    for layer in layers:
        keys, values = restored.full_attention(layer).read(0, length)
        assert mx.array_equal(keys, tokens(layer[0], layer[0] + length)[0])
        assert mx.array_equal(values, tokens(layer[0], layer[0] + length)[1])


def test_snapshots_of_delta_layers_are_copied_once() -> None:
    stops = Stops(
        {(layer,): mx.full((3, 2, 4, 4), layer) + mx.arange(3)[:, None, None, None] for layer in range(5)},
        {(layer,): mx.full((3, 6, 4), 10.0 * layer) for layer in range(5)},
    )
    mx.eval(list(stops.states.values()), list(stops.contexts.values()))
    records = stops.records(2)
    assert num_launches(operations([array for record in records.values() for array in record.arrays])) == 2
    for (layer,), record in records.items():
        state, context = record.arrays
        assert mx.array_equal(state, mx.full((1, 2, 4, 4), layer + 2))
        assert mx.array_equal(context, mx.full((1, 6, 4), 10.0 * layer))


def test_a_long_slot_wastes_an_eighth_at_most_where_capacities_are_fine() -> None:
    for num_tokens in (1, 256, 257, 4095, 4096, 4097, 33_000, 65_536, 65_537, 131_073, 1_000_001):
        coarse, fine = slot_capacity(num_tokens), slot_capacity(num_tokens, is_fine=True)
        assert num_tokens <= fine <= coarse == max(256, 2 ** math.ceil(math.log2(num_tokens)))
        assert fine <= (coarse if coarse <= 4096 else 1.125 * num_tokens)
    # 33,000 tokens are just over half of 65,536: an eighth of that octave has 4,096
    assert slot_capacity(33_000, is_fine=True) == 36_864


def test_a_slot_of_a_batch_grows_layer_by_layer() -> None:
    """Of 16 layers; without that the old slot, the new one and copies would be in memory together."""
    pool, layers = StatePool(has_batches=True), [(number,) for number in range(16)]
    slot = pool.allocate(8192)
    for layer in layers:
        for start in (0, 4096):
            slot.write(layer, start, *tokens(start, start + 4096, head_dim=8))
    mx.eval([*slot.slab.keys.values(), *slot.slab.values.values()])
    held, before = pool.num_bytes, mx.get_active_memory()
    mx.reset_peak_memory()
    pool.grow(slot, 8193, 8192)
    assert slot.capacity == 9216
    assert pool.num_bytes == held * 9216 // 8192
    assert mx.get_peak_memory() - before < pool.num_bytes - held + 3 * held / 16
    for layer in layers:
        assert mx.array_equal(slot.read(layer, 0, 8192)[0], tokens(0, 8192, head_dim=8)[0])
    pool.free(slot)
    assert pool.num_bytes == 0


def test_a_slot_that_shares_its_slab_leaves_the_others_theirs() -> None:
    pool = StatePool(has_batches=True)
    first, second = pool.allocate(5000), pool.allocate(5000)
    first.write(LAYER, 0, *tokens(0, 5))
    second.write(LAYER, 0, *tokens(100, 103))
    pool.grow(first, 6000, 5)
    assert mx.array_equal(first.read(LAYER, 0, 5)[0], tokens(0, 5)[0])
    assert mx.array_equal(second.read(LAYER, 0, 3)[0], tokens(100, 103)[0])


def test_a_state_that_found_no_room_for_what_was_restored_leaves_no_records(
    pool: StatePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise MemoryError

    monkeypatch.setattr(StatePool, "grow", full)
    state = SequenceState(pool)
    with pytest.raises(MemoryError):
        state.restore(SequenceRecord(SMALLEST_CAPACITY + 1, {}))
    with pytest.raises(RuntimeError, match="no layer of the state has been filled"):
        state.snapshot()
