"""Kernels from their sources on a CPU: the tests of gpu-marked files, and what only an emulation can vary."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import mlx.core as mx
import numpy as np
import pytest
from backend.cuda import test_activations as activation_tests
from backend.cuda import test_attention as attention_tests
from backend.cuda import test_delta as delta_tests
from backend.cuda import test_delta_table as table_tests
from backend.cuda import test_matmul as matmul_tests
from backend.cuda import test_norm as norm_tests
from backend.cuda import test_put as put_tests
from backend.cuda.emulated import emulation
from backend.cuda.test_delta import HEADS, SORTS

from headrace.backend.cuda import attention
from headrace.backend.cuda.kernel import CudaKernel
from headrace.backend.cuda.shapes import HeadShape, Prepared

FEW_BLOCKS = 3
"""So that each has several splits, rows and tiles."""


@contextmanager
def in_blocks(number: int) -> Iterator[None]:
    """Every kernel is launched with so many blocks."""
    launch = CudaKernel.__call__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            CudaKernel,
            "__call__",
            lambda self, inputs, template, _, *rest: launch(self, inputs, template, (number, 1, 1), *rest),
        )
        yield


@pytest.mark.parametrize("case", table_tests.ROWS)
def test_a_step_of_a_gated_delta_layer(case: str) -> None:
    with emulation(seed=len(case)):
        table_tests.test_a_step_goes_on_from_a_slot_and_leaves_it_there(case, HEADS[2], mx.bfloat16)


@pytest.mark.parametrize("in_blocks", [False, True])
@pytest.mark.parametrize("case", table_tests.CHUNKS)
def test_chunks_of_a_gated_delta_layer(case: str, in_blocks: bool) -> None:
    with emulation(seed=len(case)):
        table_tests.test_chunks_go_on_from_slots_and_leave_them_there(case, HEADS[2], mx.bfloat16, in_blocks)


@pytest.mark.parametrize("in_blocks", [False, True])
def test_stashed_tokens_are_settled(in_blocks: bool) -> None:
    with emulation():
        table_tests.test_stashed_tokens_are_settled_by_a_scan(HEADS[2], mx.bfloat16, in_blocks)


@pytest.mark.parametrize("change", table_tests.HARD_TOKENS)
def test_blocks_of_hard_tokens(change: Callable[[Prepared], Prepared]) -> None:
    with emulation():
        table_tests.test_states_are_precise_whatever_the_tokens_are(change, mx.bfloat16, True)


@pytest.mark.parametrize(
    "heads",
    [
        pytest.param((1, 2, 64, 16), marks=pytest.mark.slow),
        (1, 1, 64, 32),
        pytest.param((1, 2, 64, 48), marks=pytest.mark.slow),
        pytest.param((1, 1, 128, 64), marks=pytest.mark.slow),
    ],
)
def test_rows_of_few_tokens_go_token_by_token(heads: tuple[int, int, int, int]) -> None:
    with emulation():
        table_tests.test_rows_of_few_tokens_find_the_same_bits_in_any_company(heads, mx.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "dtype"), [sort for sort in SORTS if sort[1] != mx.float32], ids=str)
def test_blocks_of_heads_of_all_sizes(heads: tuple[int, int, int, int], dtype: mx.Dtype) -> None:
    with emulation():
        for case in table_tests.CHUNKS:
            table_tests.test_chunks_go_on_from_slots_and_leave_them_there(case, heads, dtype, True)


NOT_FULL = HEADS[5], mx.bfloat16
"""Heads that leave some of a warp's lanes without a channel."""
OTHERS = [pytest.param(*sort, marks=pytest.mark.slow) for sort in SORTS if sort != NOT_FULL]


@pytest.mark.parametrize(("heads", "dtype"), [NOT_FULL, *OTHERS], ids=str)
def test_parts_of_layers_of_all_sizes(heads: tuple[int, int, int, int], dtype: mx.Dtype) -> None:
    with emulation():
        case = "lengths about those of groups"
        table_tests.test_chunks_go_on_from_slots_and_leave_them_there(case, heads, dtype, False)
        for kernel_size in (4, 3):
            table_tests.test_steps_and_chunks_make_the_same_bits_of_a_token(heads, dtype, kernel_size)
            delta_tests.test_the_norm_has_the_bits_of_a_steps(heads, dtype, kernel_size)
        delta_tests.test_the_norm_of_the_output_is_gated(heads, dtype)


@pytest.mark.parametrize("kernel_size", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_layers_of_odd_widths(kernel_size: int) -> None:
    with emulation():
        table_tests.test_steps_and_chunks_leave_what_the_other_goes_on_from(mx.bfloat16, kernel_size)


def test_numbers_are_rounded_and_activated() -> None:
    with emulation():
        activation_tests.test_several_numbers_get_the_bits_that_each_gets_alone()
        activation_tests.test_numbers_are_rounded_as_the_library_rounds_them(mx.bfloat16)
        for gate in (-np.inf, -1000.0, -88.5, -64.5, 64.5, np.inf, np.nan):
            activation_tests.test_gates_at_the_ends_of_the_range_leave_others_as_they_are(gate, 8)


@pytest.mark.parametrize("shape", activation_tests.SHAPES, ids=str)
def test_gates_of_widths_of_all_kinds(shape: tuple[int, int, int]) -> None:
    with emulation():
        activation_tests.test_gates_are_the_first_half(shape, mx.bfloat16)


def test_sums_are_normed() -> None:
    with emulation():
        for width in (96, 1001, 2560):
            norm_tests.test_the_sum_is_rounded_and_then_normed(width, mx.bfloat16)


@pytest.mark.parametrize("case", ["keys of one slot", "odd widths", "more runs than blocks"])
def test_parts_are_put(case: str) -> None:
    with emulation():
        put_tests.test_a_part_is_written_in_place(case)


@pytest.mark.slow
def test_parts_of_several_tables_are_put() -> None:
    with emulation():
        put_tests.test_parts_of_several_tables_are_written()
        put_tests.test_spans_of_many_lengths_are_written_into_all_tables(7, mx.bfloat16)


@pytest.mark.slow
def test_spans_of_many_layers_are_put() -> None:
    with emulation():
        put_tests.test_spans_of_many_layers_are_written_together()


def test_parts_are_collected() -> None:
    with emulation():
        put_tests.test_the_same_part_of_several_arrays_is_copied((1, 2, 70, 64), 2, 64, 25, 19, mx.bfloat16)


def test_splits_of_rows() -> None:
    with emulation():
        attention_tests.test_splits_follow_from_the_rows_own_length()


@pytest.mark.parametrize("num_blocks", [FEW_BLOCKS, pytest.param(264, marks=pytest.mark.slow)])
def test_new_heads_are_written_and_seen(num_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "BLOCKS_AT_ONCE", dict.fromkeys(attention.BLOCKS_AT_ONCE, num_blocks))
    with emulation(seed=num_blocks):
        attention_tests.test_new_heads_see_what_they_write("a part of a warp's channels", 300)


@pytest.mark.parametrize(
    "sort", [pytest.param(each, marks=[] if each == "sinks" else pytest.mark.slow) for each in attention_tests.SORTS]
)
def test_chunks_find_what_they_see(sort: str) -> None:
    if attention_tests.SORTS[sort][1] == mx.float32:
        pytest.skip("not a type that the kernels do")
    with emulation(seed=len(sort)):
        attention_tests.test_rows_find_what_they_see_in_their_slots(sort, 60)


@pytest.mark.slow
def test_a_key_behind_a_chunk_has_no_part() -> None:
    with emulation():
        attention_tests.test_a_key_that_nobody_may_see_has_no_part()


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(form, marks=pytest.mark.slow if number else [])
        for number, form in enumerate(attention_tests.COMPANY_FORMS)
    ],
    ids=str,
)
def test_a_chunk_is_the_same_however_it_is_cut(form: tuple[HeadShape, mx.Dtype, int]) -> None:
    with emulation():
        attention_tests.test_a_chunk_finds_the_same_bits_however_it_is_cut(*form)


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(form, marks=pytest.mark.slow if number else [])
        for number, form in enumerate(attention_tests.COMPANY_FORMS)
    ],
    ids=str,
)
@pytest.mark.usefixtures("short_parts")
def test_attention_of_an_invariant_token_is_the_same_in_any_row(form: tuple[HeadShape, mx.Dtype, int]) -> None:
    with emulation():
        attention_tests.test_an_invariant_token_finds_the_same_bits_in_any_row(*form)


@pytest.mark.slow
@pytest.mark.parametrize("most", [attention_tests.WINDOW, attention_tests.CHUNK])
@pytest.mark.parametrize("form", attention_tests.COMPANY_FORMS, ids=str)
def test_attention_of_a_row_is_the_same_in_any_company(form: tuple[HeadShape, mx.Dtype, int], most: int) -> None:
    with emulation():
        attention_tests.test_a_row_finds_the_same_bits_in_any_company(*form, most)
        attention_tests.test_a_row_finds_the_same_bits_wherever_its_keys_are(*form, most)


@pytest.mark.parametrize("most", [attention_tests.WINDOW, attention_tests.CHUNK])
def test_attention_of_a_row_is_the_same_however_blocks_share_the_work(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, dtype, window = attention_tests.COMPANY_FORMS[0]
    slabs, scale = attention_tests.slabs_of(shape, dtype), mx.array([0.125])
    plan = mx.array(attention_tests.plan_of(window, 1, attention_tests.COMPANY), dtype=mx.int32)
    queries = attention_tests.drawn(7, dtype, 14, shape.num_heads, shape.head_dim)
    found = []
    for num_blocks, most_parts in ((1, 1), (FEW_BLOCKS, FEW_BLOCKS), (FEW_BLOCKS, 264), (264, 264)):
        monkeypatch.setattr(attention, "_MOST_PARTS", most_parts)
        with emulation(seed=num_blocks), in_blocks(num_blocks):
            found.append(attention.attend(shape, plan, most, queries, slabs, scale, many_tokens=4))
    assert all(mx.array_equal(each, found[0]) for each in found)


@pytest.fixture
def short_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rows' keys are in so many parts that a chunk's first tokens see none of the last ones."""
    attention._attend_chunks.cache_clear()
    monkeypatch.setattr(attention, "_FEWEST_KEYS", 64)
    yield
    attention._attend_chunks.cache_clear()


@pytest.mark.parametrize("head_dim", [pytest.param(64, marks=pytest.mark.slow), 256])
@pytest.mark.usefixtures("short_parts")
def test_a_block_goes_on_from_parts_of_keys_that_its_tokens_do_not_see(head_dim: int) -> None:
    """Here a copy to a place to which another one is still under way ends the process."""
    shape, rows = HeadShape(2, 1, head_dim), ((0, 160, 40, 1, 0), (160, 1, 77, 0, 3), (161, 140, 0, 2, 0))
    with emulation(), in_blocks(FEW_BLOCKS):
        attention_tests.test_chunks_of_prompts_find_what_they_see(shape, rows)


@pytest.mark.slow
@pytest.mark.parametrize("form", matmul_tests.FORMS)
def test_products_of_odd_widths_and_in_any_company(form: tuple[int, int]) -> None:
    with emulation():
        matmul_tests.test_gates_act_on_rounded_values_behind_them(form, 51)
        matmul_tests.test_a_token_gets_the_same_product_in_any_company(form, 35)
