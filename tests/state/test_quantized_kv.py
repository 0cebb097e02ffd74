"""Keys and values in few bits: their error, their bytes, and that nothing changes them once they are written."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from headrace.state.attention import FullAttentionState
from headrace.state.quantized_kv import Quantizer, group_size, packed_bytes
from headrace.state.sequence import SequenceState
from headrace.state.slabs import SMALLEST_CAPACITY, StatePool

LAYER = (0,)
HEADS = 2
FORM = Quantizer(64, mx.float32, 8), Quantizer(32, mx.float32, 4)
"""Keys of 64 numbers and values of 32."""


def numbers(head_dim: int, num_tokens: int = 7, seed: int = 0) -> mx.array:
    """Groups far from zero, around it, and of one number."""
    random = np.random.default_rng(seed)
    drawn = random.standard_normal((1, HEADS, num_tokens, head_dim))
    drawn *= random.uniform(0.01, 30, (1, HEADS, num_tokens, 1))
    drawn[:, :, 1:2] += 100.0
    drawn[:, :, 2:3] = -3.25
    drawn[:, :, 3:4] = 0.0
    return mx.array(drawn.astype(np.float32))


@pytest.fixture(params=["ranges", "batches"])
def pool(request: pytest.FixtureRequest) -> StatePool:
    return StatePool(has_batches=request.param == "batches", kv_forms={LAYER: FORM})


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("head_dim", "group"), [(32, 32), (64, 64), (96, 32), (128, 64), (256, 64)])
def test_no_number_is_further_off_than_a_step(head_dim: int, group: int, bits: int, dtype: mx.Dtype) -> None:
    """A step is the range of a group, divided by the largest number of so many bits."""
    form = Quantizer(head_dim, dtype, bits)
    exact = numbers(head_dim).astype(dtype)
    packed = form.quantize(exact)
    found = form.dequantize(packed)
    assert found.dtype == dtype
    groups = np.array(exact.astype(mx.float32)).reshape(-1, group)
    back = np.array(found.astype(mx.float32)).reshape(-1, group)
    ranges = groups.max(axis=1) - groups.min(axis=1)
    # scale, bias and result are rounded to the type
    rounding = (
        4 * np.abs(groups).max(axis=1) * {mx.float32: 2.0**-23, mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}[dtype]
    )
    assert (np.abs(back - groups).max(axis=1) <= ranges / (2**bits - 1) + rounding + 1e-7).all()
    assert all(len(np.unique(each)) <= 2**bits for each in back)


@pytest.mark.parametrize("bits", [8, 4])
def test_the_usual_error_is_that_of_uniform_steps(bits: int) -> None:
    """A step's uniform error has a standard deviation of the step divided by the root of twelve."""
    exact = mx.array(np.random.default_rng(1).uniform(-1, 1, (1, 8, 500, 64)).astype(np.float32))
    form = Quantizer(64, mx.float32, bits)
    error = np.array(form.dequantize(form.quantize(exact)) - exact)
    step = 2 / (2**bits - 1)
    assert 0.5 * step / 12**0.5 < error.std() < 1.15 * step / 12**0.5


@pytest.mark.parametrize(
    ("head_dim", "bits", "dtype", "num_bytes"),
    [
        (64, 8, mx.float32, 64 + 8),  # a scale and a bias of four bytes
        (64, 8, mx.bfloat16, 64 + 4),
        (128, 4, mx.bfloat16, 64 + 8),  # two groups
        (128, 8, mx.float16, 128 + 8),
        (96, 4, mx.bfloat16, 48 + 12),  # three groups of 32
        (32, 4, mx.float32, 16 + 8),
    ],
)
def test_a_token_takes_its_bits_and_a_scale_and_a_bias_of_each_group(
    head_dim: int, bits: int, dtype: mx.Dtype, num_bytes: int
) -> None:
    packed = Quantizer(head_dim, dtype, bits).quantize(numbers(head_dim, 5).astype(dtype))
    assert packed.nbytes == HEADS * 5 * num_bytes
    assert packed_bytes(head_dim, bits, dtype.size) == num_bytes


def test_heads_of_no_whole_groups_have_no_form() -> None:
    assert [group_size(head_dim) for head_dim in (16, 80, 32, 192)] == [None, None, 32, 64]


@pytest.mark.parametrize("bits", [8, 4])
def test_what_a_token_becomes_does_not_depend_on_its_neighbours(bits: int) -> None:
    form, exact = Quantizer(64, mx.float32, bits), numbers(64, 40)
    together = form.quantize(exact)
    for start, end in ((0, 1), (1, 4), (4, 40)):
        assert mx.array_equal(form.quantize(exact[:, :, start:end]), together[:, :, start:end])
    assert mx.array_equal(form.quantize(exact[:, 1:]), together[:, 1:])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("bits", [8, 4])
def test_what_is_no_number_makes_none_of_its_group(bad: float, bits: int) -> None:
    form, exact = Quantizer(64, mx.float32, bits), np.array(numbers(64))
    exact[0, 1, 3, 5] = bad
    found = np.array(form.dequantize(form.quantize(mx.array(exact))))
    is_finite = np.isfinite(found).all(axis=-1)[0]
    assert not np.isfinite(found[0, 1, 3]).any()
    assert is_finite.sum() == is_finite.size - 1


def write(state: SequenceState, keys: mx.array, values: mx.array, *, num_kept: int | None = None) -> None:
    num_tokens = keys.shape[2]
    state.begin(num_tokens, 1)
    state.full_attention(LAYER).write(state.length, keys, values)
    mx.eval(state.arrays())
    state.commit(num_tokens if num_kept is None else num_kept)


def read(state: SequenceState) -> list[np.ndarray]:
    return [np.array(array) for array in state.full_attention(LAYER).read(0, state.length)]


def test_words_are_the_same_through_growth_rollback_records_and_restores(pool: StatePool) -> None:
    """Each token is packed once, when it is written."""
    num_tokens = SMALLEST_CAPACITY + 40
    keys, values = numbers(64, num_tokens), numbers(32, num_tokens, seed=1)
    expected = [
        np.array(form.dequantize(form.quantize(array))) for form, array in zip(FORM, (keys, values), strict=True)
    ]
    state, other = SequenceState(pool, 10), SequenceState(pool, 10)
    write(other, keys[:, :, ::-1], values[:, :, ::-1])
    for start, end in ((0, 5), (5, SMALLEST_CAPACITY - 3), (SMALLEST_CAPACITY - 3, num_tokens)):
        junk = mx.full((1, HEADS, 3, 64), 9.0), mx.full((1, HEADS, 3, 32), -9.0)
        new = [
            mx.concatenate([keys[:, :, start:end], junk[0]], 2),
            mx.concatenate([values[:, :, start:end], junk[1]], 2),
        ]
        write(state, *new, num_kept=end - start)
    spans = [state.copy_span(0, 100), state.copy_span(100, num_tokens)]
    record = state.checkpoint()
    assert record.num_bytes == num_tokens * HEADS * (64 + 8 + 16 + 8)
    from_spans, from_record = SequenceState(pool), SequenceState(pool)
    from_spans.restore_parts(num_tokens, spans, None)
    from_record.restore(record)
    for each in (state, from_spans, from_record):
        for found, wanted in zip(read(each), expected, strict=True):
            np.testing.assert_array_equal(found, wanted)


def test_a_state_costs_what_it_stores_and_what_a_step_reads_of_one_layer(pool: StatePool) -> None:
    state = SequenceState(pool)
    write(state, numbers(64), numbers(32))
    cost = state.cost()
    stored = HEADS * (64 + 8 + 16 + 8)
    assert cost.record_bytes(1000) == 1000 * stored
    assert cost.num_bytes(1024) == 1024 * (stored + HEADS * 4 * (64 + 32))
    assert (cost.fixed_bytes, cost.token_bytes) == (0, stored)


def test_numbers_of_another_type_are_held_in_the_layers_own() -> None:
    """As an adapter in float32 makes them in a model of half precision."""
    form, exact = Quantizer(64, mx.bfloat16, 8), numbers(64)
    found = form.dequantize(form.quantize(exact))
    assert found.dtype == mx.bfloat16
    assert mx.array_equal(found, form.dequantize(form.quantize(exact.astype(mx.bfloat16))))


def test_a_layer_without_a_form_stays_exact(pool: StatePool) -> None:
    state = SequenceState(pool)
    state.begin(7)
    other = state.full_attention((1,))
    other.write(0, numbers(64), numbers(32))
    assert isinstance(other, FullAttentionState)
    assert all(mx.array_equal(*pair) for pair in zip(other.read(0, 7), (numbers(64), numbers(32)), strict=True))


@pytest.mark.parametrize("place", ["keys", "values"])
def test_a_state_that_lost_its_numbers_is_known_by_its_last_token(place: str, pool: StatePool) -> None:
    state = SequenceState(pool)
    write(state, numbers(64), numbers(32))
    assert state.is_finite()
    keys, values = np.array(numbers(64, 1)), np.array(numbers(32, 1))
    (keys if place == "keys" else values)[0, 1, 0, 3] = np.nan
    write(state, mx.array(keys), mx.array(values))
    assert not state.is_finite()
