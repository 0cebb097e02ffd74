"""Computations in chunks: in order, within what is allowed, and the same in the end."""

from __future__ import annotations

import math
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from headrace.models.chunked import LEAST_ROWS, ChunkedEncoding, ChunkedRows, ChunkRecorder, Stages, by_rows


def test_as_many_chunks_are_computed_as_are_allowed_and_one_at_least() -> None:
    recorder = ChunkRecorder(chunk_work=10)

    def stages() -> Stages[str]:
        for works in ((3, 5, 4), (), (9, 0)):
            for work in works:
                recorder.record(mx.zeros(1), work)
            yield
        return "made"

    computation = ChunkedEncoding(stages(), recorder)
    assert [computation.compute(allowed) for allowed in (8, 3)] == [8, 4]
    assert not computation.is_done
    assert (computation.compute(9), computation.is_done, computation.result) == (9, True, "made")


def test_a_stage_is_built_when_the_chunks_before_it_are_computed() -> None:
    recorder, built = ChunkRecorder(chunk_work=10), []

    def stages() -> Stages[None]:
        for number in range(3):
            built.append(number)
            recorder.record(mx.zeros(1), 5)
            yield

    computation = ChunkedEncoding(stages(), recorder)
    assert built == []
    computation.compute(0)
    assert built == [0, 1]  # the next piece has to be there to know whether it fits
    computation.compute(math.inf)
    assert built == [0, 1, 2] and computation.is_done


def test_two_computations_with_one_recorder_keep_their_chunks_apart() -> None:
    recorder = ChunkRecorder(chunk_work=10)

    def stages(work: int) -> Stages[int]:
        for _ in range(3):
            recorder.record(mx.zeros(1), work)
            yield
        return work

    one, other = ChunkedEncoding(stages(2), recorder), ChunkedEncoding(stages(7), recorder)
    assert [one.compute(0), other.compute(0), one.compute(4), other.compute(14)] == [2, 7, 4, 14]
    assert (one.result, other.result) == (2, 7)


def computed(compute: Callable[[], mx.array], recorder: ChunkRecorder) -> ChunkedEncoding[mx.array]:
    """Of one stage."""

    def stages() -> Stages[mx.array]:
        made = compute()
        yield
        return made

    return ChunkedEncoding(stages(), recorder)


@pytest.mark.parametrize("num_rows", [1, LEAST_ROWS, 3 * LEAST_ROWS + 5, 7 * LEAST_ROWS])
def test_rows_in_chunks_give_what_all_rows_give(num_rows: int) -> None:
    row_work = 48 * 32
    recorder = ChunkRecorder(chunk_work=2 * LEAST_ROWS * row_work + 1)
    linear = nn.Linear(48, 32, bias=False)
    x = mx.random.normal((num_rows, 48))
    computation = computed(lambda: ChunkedRows(linear, row_work, recorder)(x), recorder)
    works = []
    while not computation.is_done:
        works.append(computation.compute(0))
    assert sum(works) == num_rows * row_work
    assert len(works) == math.ceil(num_rows / (2 * LEAST_ROWS)) and max(works) <= recorder.chunk_work
    assert np.abs(np.array(computation.result) - np.array(x) @ np.array(linear.weight).T).max() <= 1e-5


def test_chunks_are_no_thinner_than_matrix_products_like() -> None:
    recorder = ChunkRecorder(chunk_work=1)
    computation = computed(
        lambda: by_rows(lambda rows: rows * 2, mx.zeros((4 * LEAST_ROWS, 8)), 100, recorder), recorder
    )
    assert [computation.compute(0) for _ in range(4)] == [100 * LEAST_ROWS] * 4
    assert computation.is_done
