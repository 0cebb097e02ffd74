"""Tokens of a step whose drafts lie on the device."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx

from headrace.speculate.drafts import DraftBatch, Drafts, DraftSource, RankedDraft, packed_ids

BATCH = DraftBatch([mx.array(ids, dtype=mx.int32) for ids in ([1, 4], [2, 5], [3])])
"""1 2 3 for the first sequence, 4 5 for the second."""


def head_drafts(num_drafts: int, row: int) -> Drafts:
    ranked = tuple(RankedDraft(DraftSource.MODEL, grade, 0.5) for grade in range(num_drafts))
    return Drafts((), ranked, BATCH, row)


def test_each_window_gets_its_own_drafts() -> None:
    packed = packed_ids([((7,), head_drafts(2, 1)), ((8, 9), head_drafts(0, 0)), ((10,), head_drafts(3, 0))])
    assert packed is not None
    assert packed.tolist() == [7, 4, 5, 8, 9, 10, 1, 2, 3]


def test_drafts_of_several_batches_are_read_and_packed() -> None:
    other = replace(head_drafts(1, 0), batch=DraftBatch([mx.array([11], dtype=mx.int32)]))
    known = Drafts((9,), (RankedDraft(DraftSource.COPY, 0, 0.5),))
    packed = packed_ids([((8,), known), ((7,), other), ((6,), head_drafts(3, 0)), ((5,), head_drafts(2, 1))])
    assert packed is not None
    assert packed.tolist() == [8, 9, 7, 11, 6, 1, 2, 3, 5, 4, 5]
    assert [head_drafts(3, 0).read(), head_drafts(2, 1).read(), head_drafts(1, 1).read()] == [(1, 2, 3), (4, 5), (4,)]


def test_windows_whose_drafts_were_all_dropped_are_known_to_the_host() -> None:
    assert packed_ids([((7,), head_drafts(2, 0).first(0)), ((8,), head_drafts(0, 1))]) is None
    assert head_drafts(2, 0).first(0).read() == ()
