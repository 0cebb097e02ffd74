"""Tokens of a step whose drafts lie on the device."""

from __future__ import annotations

import mlx.core as mx

from headrace.speculate.draft import Source
from headrace.speculate.guesses import Guesses, packed_ids
from headrace.speculate.ranking import Candidate, Place

BATCH = mx.array([[1, 2, 3], [4, 5, 6]], dtype=mx.int32)


def guesses(num_drafts: int, row: int) -> Guesses:
    places = tuple(Place(Source.HEAD, grade, 0.5) for grade in range(num_drafts))
    return Guesses(Candidate((), places), batch=BATCH, row=row)


def test_each_window_gets_its_own_drafts() -> None:
    packed = packed_ids([((7,), guesses(2, 1)), ((8, 9), guesses(0, 0)), ((10,), guesses(3, 0))])
    assert packed is not None
    assert packed.tolist() == [7, 4, 5, 8, 9, 10, 1, 2, 3]


def test_windows_whose_drafts_were_all_dropped_are_known_to_the_host() -> None:
    assert packed_ids([((7,), guesses(2, 0).first(0)), ((8,), guesses(0, 1))]) is None
    assert guesses(2, 0).first(0).read() == ()
