"""The interface of a layer's state in a sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from headrace.backend.cuda.put import Part

LayerKey = tuple[int, ...]
"""A layer's place in the model's list of caches; a second number where one layer has several."""


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Bytes of a layer's state: `fixed` plus `per_token` for each token up to `max_tokens` (None: all).

    in_slots: the tokens are held in a slot, see `slot_capacity`.
    rollback: bytes of the state from before a window whose tokens may be dropped; in no record.
    unpacked_per_token: what a token of a quantised layer takes while a step reads it; of one layer at a time.
    """

    fixed: int = 0
    per_token: int = 0
    max_tokens: int | None = None
    in_slots: bool = False
    rollback: int = 0
    unpacked_per_token: int = 0

    def num_bytes(self, num_tokens: int) -> int:
        """Bytes where so many tokens are held, or have room."""
        num_counted = num_tokens if self.max_tokens is None else min(num_tokens, self.max_tokens)
        return self.fixed + self.per_token * num_counted


def copy_of(view: mx.array) -> mx.array:
    """The same values in separate memory, not evaluated.

    `mx.contiguous` isn't enough: it shares the memory of a view that is nearly all of its array, and that may be
    written in place; see state/slabs.py.
    """
    return view * mx.array(1, view.dtype)


class LayerRecord(Protocol):
    """Immutable copy of a layer's state at one length."""

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """The record's arrays, to be evaluated before the live state is written again."""
        ...

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


class LayerState(Protocol):
    """A layer's state in a sequence; each kind has its own methods for the mixer that writes a window of tokens.

    Until `commit` says how many of them are kept, the window's uncertain tokens can still be dropped.
    is_sliceable: valid at any length up to what was written; others only at the lengths of their records.
    """

    is_sliceable: bool

    def commit(self, num_kept: int, num_window: int) -> None:
        """Keep the first `num_kept` tokens of the window."""

    def take_snapshot(self, length: int) -> LayerRecord | None:
        """A copy of the state at a snapshot point of the last window, not evaluated; None if it is sliceable."""

    def checkpoint(self, length: int) -> LayerRecord:
        """A copy of the state at the committed length, not evaluated."""
        ...

    def restore(self, record: Any, length: int) -> list[Part] | None:
        """Become a record of the same kind, which stays as it is. Returns what is to be written before a step."""

    def arrays(self) -> tuple[mx.array, ...]:
        """The arrays that the next step starts from, and those of snapshots."""
        ...

    def cost(self) -> LayerCost: ...
