"""Faults that our packed forms might have, put in on purpose: the self-check has to find each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import wraps
from typing import Any

import mlx.core as mx
import pytest

from headrace.models.levels import Level
from headrace.models.mixers import attention
from headrace.models.mixers.attention_batches import Batch, SlabTokens
from headrace.models.mixers.gated_delta import GatedDeltaMixer
from headrace.models.mixers.rowwise import RowwiseMixer
from headrace.models.step import PackedStep, View
from headrace.state.module import ModuleState
from headrace.state.recurrent import BatchedState, PastRows

Fault = Callable[[pytest.MonkeyPatch], None]


def _positions_of_the_first_row(patch: pytest.MonkeyPatch) -> None:
    def counted_on(view: View) -> mx.array:
        positions = view.step.positions
        return positions[:1] + mx.arange(positions.shape[-1], dtype=positions.dtype)

    patch.setattr(View, "offset", property(counted_on))


def _one_position_for_a_chunk(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(View, "offset", property(lambda view: view.step.positions * 0 + view.step.positions.min()))


def _another_rows_keys(patch: pytest.MonkeyPatch) -> None:
    states, together = attention.states_of, attention.read_together
    patch.setattr(attention, "states_of", lambda *arguments: states(*arguments)[::-1])

    def of_another_row(step: PackedStep, batch: Batch, *arguments: Any) -> mx.array:
        return together(step, replace(batch, tokens=batch.tokens[::-1]), *arguments)

    patch.setattr(attention, "read_together", of_another_row)


def _written_to_another_row(patch: pytest.MonkeyPatch) -> None:
    """Where rows are written by one call only."""
    together = attention.write_together

    def to_another_row(step: PackedStep, one: SlabTokens, *arguments: Any) -> None:
        together(step, replace(one, places=one.places[::-1]), *arguments)

    patch.setattr(attention, "write_together", to_another_row)


def _later_tokens(patch: pytest.MonkeyPatch) -> None:
    right = attention._attention

    def both_ways(*args: Any, bidirectional: bool = False, **kwargs: Any) -> mx.array:
        return right(*args, bidirectional=True, **kwargs)

    patch.setattr(attention, "_attention", both_ways)


def _no_first_key(patch: pytest.MonkeyPatch) -> None:
    right = attention.reach

    def without_first(*arguments: Any) -> Any:
        first, positions = right(*arguments)
        return max(first, min(1, arguments[1])), positions

    patch.setattr(attention, "reach", without_first)


def _decay_forgotten(patch: pytest.MonkeyPatch) -> None:
    right = GatedDeltaMixer._gates

    def gates(*arguments: Any) -> Any:
        decay, beta = right(*arguments)
        return decay * 0 + 1, beta

    patch.setattr(GatedDeltaMixer, "_gates", gates)


def _no_context(patch: pytest.MonkeyPatch) -> None:
    right = PastRows.contexts
    patch.setattr(PastRows, "contexts", lambda *arguments: right(*arguments) * 0)


def _keeps_what_is_dropped(state: type[Any]) -> Fault:
    def put_in(patch: pytest.MonkeyPatch) -> None:
        right = state.commit
        patch.setattr(state, "commit", lambda self, num_kept, num_window: right(self, num_window, num_window))

    return put_in


def _drops_what_is_kept(state: type[Any]) -> Fault:
    def put_in(patch: pytest.MonkeyPatch) -> None:
        right = state.commit

        @wraps(right)
        def commit(self: Any, num_kept: int, num_window: int) -> None:
            right(self, num_kept if num_kept == num_window else 0, num_window)

        patch.setattr(state, "commit", commit)

    return put_in


def _another_rows_state(mixer: type[Any]) -> Fault:
    """Rows change places in the layer's input and output, not in its states."""

    def put_in(patch: pytest.MonkeyPatch) -> None:
        right = mixer.__call__

        def swapped(self: Any, *args: Any, **kwargs: Any) -> mx.array:
            given = {**dict(enumerate(args)), **kwargs}
            (view,) = (one for one in given.values() if isinstance(one, View))
            name = next(name for name, one in given.items() if isinstance(one, mx.array))
            rows = view.step.rows
            if len({row.num_tokens for row in rows}) > 1:
                order = mx.arange(view.step.num_tokens)
            else:
                order = mx.array([token for row in reversed(rows) for token in range(row.lo, row.hi)])
            given[name] = given[name][:, order]
            result: mx.array = right(self, *(given.pop(place) for place in range(len(args))), **given)
            return result[:, order]

        patch.setattr(mixer, "__call__", swapped)

    return put_in


FAULTS: Mapping[Level, Mapping[str, Fault]] = {
    Level.ADAPTER: {
        "positions of the first row": _positions_of_the_first_row,
        "one position for a chunk": _one_position_for_a_chunk,
        "another row's keys": _another_rows_keys,
        "later tokens": _later_tokens,
        "no first key": _no_first_key,
    },
    Level.PACKED: {
        "no decay": _decay_forgotten,
        "no context of the convolution": _no_context,
        "keeps what is dropped": _keeps_what_is_dropped(BatchedState),
        "drops what is kept": _drops_what_is_kept(BatchedState),
        "another row's state": _another_rows_state(GatedDeltaMixer),
    },
    Level.ROWS: {
        "keeps what is dropped": _keeps_what_is_dropped(ModuleState),
        "another row's state": _another_rows_state(RowwiseMixer),
    },
}
"""By the level whose forms are wrong then, what they do wrong."""
OF_BATCHES: Mapping[str, Fault] = {"written to another row": _written_to_another_row}
"""Of adapters where rows of one slab go through attention together."""
