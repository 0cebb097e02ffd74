"""A row in what a step has left of several rows stands for its layers' states, and gives them back whole."""

import mlx.core as mx
import pytest

from headrace.backend.kernels import Kernels
from headrace.state.recurrent import BatchRow, RecurrentState
from headrace.state.sequence import SequenceState
from headrace.state.slabs import SlabPool

LAYERS = ((0,), (2,))
CONTEXT = 3


def filled(*shape: int) -> mx.array:
    return mx.arange(mx.zeros(shape).size).reshape(shape).astype(mx.float32)


def left_by(num_rows: int, num_tokens: int) -> dict[tuple[int, ...], list[mx.array]]:
    """What a step leaves of each layer: memories, raw inputs, and the stash, all numbers different."""
    shapes = [(num_rows, 2, 4, 4), (num_rows, CONTEXT + num_tokens, 5)]
    shapes += [(num_rows, num_tokens, 1, 4), (num_rows, num_tokens, 2, 4), *[(num_rows, num_tokens, 2)] * 2]
    return {key: [filled(*shape) + 1000 * number for shape in shapes] for number, key in enumerate(LAYERS)}


def layer(state: SequenceState, key: tuple[int, ...]) -> RecurrentState:
    return state.layer(key, lambda: RecurrentState(Kernels("fast", "cpu")))


def joined(num_certain: int, num_tokens: int) -> tuple[SequenceState, dict[tuple[int, ...], list[mx.array]]]:
    """A sequence whose window was row 1 of 3."""
    state = SequenceState(SlabPool())
    for key in LAYERS:
        layer(state, key).advance(BatchRow(filled(1, 2, 4, 4), 0), BatchRow(filled(1, CONTEXT, 5), 0), None)
    state.begin(num_tokens, num_certain)
    left = left_by(3, num_tokens)
    state.join(LAYERS).advance(left, 1, CONTEXT + num_tokens, num_tokens - num_certain)
    return state, left


@pytest.mark.parametrize("num_kept", [2, 3, 5])
def test_layers_get_back_their_row_as_far_as_it_was_kept(num_kept: int) -> None:
    state, left = joined(num_certain=2, num_tokens=5)
    state.commit(num_kept)
    for key in LAYERS:
        memory, raw, *inputs = left[key]
        found = layer(state, key)
        assert found.state is not None and mx.array_equal(found.state.alone(), memory[1:2])
        context = found.context(CONTEXT)
        assert context is not None and mx.array_equal(context.alone(), raw[1:2, num_kept : num_kept + CONTEXT])
        pending = found.pending()
        assert (pending is None) is (num_kept == 2)
        if pending is not None:
            for own, of_rows in zip(pending, inputs, strict=True):
                assert mx.array_equal(own, of_rows[1, : num_kept - 2])


def test_layers_hold_nothing_of_their_own_meanwhile() -> None:
    state, left = joined(num_certain=1, num_tokens=1)
    assert {id(array) for array in state.arrays()} == {id(array) for arrays in left.values() for array in arrays}
    before = [layer(state, key) for key in LAYERS]
    state.join(LAYERS)
    assert not any(one.arrays() for one in before)


def test_a_restored_sequence_has_left_the_step() -> None:
    state, _ = joined(num_certain=1, num_tokens=1)
    state.commit(1)
    record = state.checkpoint()
    state.begin(1)
    state.join(LAYERS).advance(left_by(3, 1), 2, CONTEXT + 1, 0)
    state.commit(1)
    state.restore(record)
    assert state.joint is None
    for key in LAYERS:
        found = layer(state, key).state
        assert found is not None and mx.array_equal(found.alone(), record.layers[key].arrays[0])


def test_to_be_counted_is_not_to_part() -> None:
    state, left = joined(num_certain=1, num_tokens=1)
    counted = {id(array) for array in state.own_arrays()}
    assert counted == {id(array) for arrays in left.values() for array in arrays}
    assert state.joint is not None
