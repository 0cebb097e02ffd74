"""A few numbers reach the device as they are, and come back."""

from __future__ import annotations

import math
import re

import mlx.core as mx
import pytest

from headrace.backend.transfer import (
    MOST_KERNELS,
    MOST_NUMBERS,
    MOST_READ,
    Fetched,
    fetch_source,
    place_source,
    to_device,
)

COUNTS = [0, 1, 2, 3, 15, 16, 17, 100, 999, MOST_NUMBERS, MOST_NUMBERS + 1, MOST_KERNELS * MOST_NUMBERS + 1]
only_cuda = pytest.mark.skipif(not mx.cuda.is_available(), reason="its kernels need a GPU")


@pytest.mark.parametrize("count", COUNTS)
def test_integers_arrive_in_their_order(count: int) -> None:
    numbers = [(-1) ** i * i * 7919 % (2**31 - 1) - (i % 3) for i in range(count)]
    array = to_device(numbers, mx.int32)
    assert array.dtype == mx.int32 and array.shape == (count,)
    assert array.tolist() == numbers


def test_the_largest_and_the_smallest_integers_arrive() -> None:
    assert to_device((-(2**31), 2**31 - 1, 0), mx.int32).tolist() == [-(2**31), 2**31 - 1, 0]


@pytest.mark.parametrize("count", [1, 5, 200])
def test_floats_arrive_rounded_to_single_precision(count: int) -> None:
    numbers = [1 / (i + 3) for i in range(count)]
    array = to_device([*numbers, math.inf, -math.inf, 0.0], mx.float32)
    assert array.dtype == mx.float32
    assert array.tolist() == [*mx.array(numbers, mx.float32).tolist(), math.inf, -math.inf, 0.0]


def test_arrays_that_are_made_one_after_the_other_hold_their_own_numbers() -> None:
    arrays = [to_device([i, i + 1, i + 2], mx.int32) for i in range(50)]
    assert [array.tolist() for array in arrays] == [[i, i + 1, i + 2] for i in range(50)]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 8, 9, MOST_READ, MOST_READ + 1])
def test_what_is_fetched_is_what_was_there(count: int) -> None:
    fetched = Fetched(mx.arange(count, dtype=mx.int32) * 3 - 5)
    mx.eval(fetched.arrays)
    assert fetched.read() == [3 * i - 5 for i in range(count)]


def test_a_part_of_an_array_is_fetched_alone() -> None:
    fetched = Fetched(mx.arange(40, dtype=mx.int32)[::4])
    mx.eval(fetched.arrays)
    assert fetched.read() == list(range(0, 40, 4))


@only_cuda
def test_few_numbers_are_no_array_of_the_host() -> None:
    assert len(Fetched(mx.zeros(8, mx.int32)).arrays) == 4
    assert all(array.nbytes == 8 for array in Fetched(mx.zeros(8, mx.int32)).arrays)


@pytest.mark.parametrize("room", [16, 1024])
def test_a_placing_kernel_writes_each_parameter_to_its_own_place(room: int) -> None:
    source = place_source(room).decode()
    moved = re.findall(r"ld\.param\.b32 %x,\[p(\d+)\];st\.global\.b32 \[%to\+(\d+)\],%x;", source)
    assert [(int(at), int(to)) for at, to in moved] == [(i, 4 * i) for i in range(room)]
    assert re.findall(r"\.param \.b32 p(\d+)", source) == [str(i) for i in range(room)]


def test_a_fetching_kernel_writes_no_number_that_is_not_there() -> None:
    source = fetch_source(4).decode()
    moved = re.findall(r"setp\.gt\.u32 %is,%n,(\d+);@%is ld\.global\.b32 %x,\[%from\+(\d+)\];@%is st", source)
    assert [(int(at), int(place)) for at, place in moved] == [(i, 4 * i) for i in range(8)]
