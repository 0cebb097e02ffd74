"""Computations in pieces: in order, within what is allowed, and the same in the end."""

from __future__ import annotations

import itertools
import math

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from headrace.models.pieces import LEAST_ROWS, Pieces, RowPieces, by_rows


def test_as_many_pieces_are_taken_as_are_allowed_and_one_at_least() -> None:
    pieces = Pieces(piece_work=10)
    for work in (3, 5, 4, 9, 0):
        pieces.note(mx.zeros(1), work)
    assert [pieces.compute(allowed) for allowed in (8, 3)] == [8, 4]
    assert not pieces.is_done
    assert (pieces.compute(9), pieces.is_done) == (9, True)


def test_what_is_taken_away_is_noted_here_no_more() -> None:
    pieces = Pieces(piece_work=10)
    pieces.note(mx.zeros(1), 3)
    taken = pieces.take()
    assert pieces.is_done and not taken.is_done
    assert taken.compute(math.inf) == 3


@pytest.mark.parametrize("num_rows", [1, LEAST_ROWS, 3 * LEAST_ROWS + 5, 7 * LEAST_ROWS])
def test_rows_in_pieces_give_what_all_rows_give(num_rows: int) -> None:
    row_work = 48 * 32
    pieces = Pieces(piece_work=2 * LEAST_ROWS * row_work + 1)
    linear = nn.Linear(48, 32, bias=False)
    x = mx.random.normal((num_rows, 48))
    result = RowPieces(linear, row_work, pieces)(x)
    works = list(iter(lambda: pieces.compute(0), 0)) if num_rows else []
    assert sum(works) == num_rows * row_work
    assert len(works) == math.ceil(num_rows / (2 * LEAST_ROWS)) and max(works) <= pieces.piece_work
    assert np.abs(np.array(result) - np.array(x) @ np.array(linear.weight).T).max() <= 1e-5


def test_pieces_are_no_thinner_than_matrix_products_like() -> None:
    pieces = Pieces(piece_work=1)
    by_rows(lambda rows: rows * 2, mx.zeros((4 * LEAST_ROWS, 8)), 100, pieces)
    assert list(itertools.repeat(100 * LEAST_ROWS, 4)) == [pieces.compute(0) for _ in range(4)]
    assert pieces.is_done


def test_nothing_is_computed_before_its_turn() -> None:
    pieces, order = Pieces(piece_work=1), []

    class Told(nn.Module):
        def __call__(self, x: mx.array) -> mx.array:
            order.append(x.shape[0])
            return x + 1

    result = RowPieces(Told(), 1, pieces)(mx.zeros((2 * LEAST_ROWS, 3)))
    assert order == [LEAST_ROWS, LEAST_ROWS] and not pieces.is_done
    while not pieces.is_done:
        pieces.compute(0)
    assert np.array_equal(np.array(result), np.ones((2 * LEAST_ROWS, 3)))
