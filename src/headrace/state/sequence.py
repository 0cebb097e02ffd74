"""Everything that one sequence has computed: `checkpoint`, `restore`, `commit`, `rollback`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import mlx.core as mx

from headrace.state.attention import FullAttentionState
from headrace.state.layer import LayerKey, LayerRecord
from headrace.state.slabs import SlabPool

State = TypeVar("State")


@dataclass(frozen=True, slots=True)
class SequenceRecord:
    """Immutable copy of a sequence's state at `length` tokens."""

    length: int
    layers: Mapping[LayerKey, LayerRecord]

    @property
    def num_bytes(self) -> int:
        """Bytes that the record keeps alive."""
        return sum(record.num_bytes for record in self.layers.values())


class SequenceState:
    """State of one row.

    A step opens a window with `begin`, mixers write it, and `commit` or `rollback` closes it. Layer states are
    made when a mixer first asks for them, so the sequence needs no description of the model.
    """

    def __init__(self, pool: SlabPool, num_expected_tokens: int = 0) -> None:
        self._pool = pool
        self._slot = pool.allocate(max(1, num_expected_tokens))
        self._layers: dict[LayerKey, Any] = {}
        self._restored: SequenceRecord | None = None
        self.length = 0
        """Committed tokens."""
        self.num_open = 0
        """Tokens of the open window, 0 if none is open."""
        self.num_certain = 0
        """Tokens of the open window that can't be dropped."""

    def begin(self, num_tokens: int, num_certain: int | None = None) -> None:
        """Open a window of `num_tokens` behind the committed ones and make room for it.

        num_certain: how many of them will surely be kept; None means all.
        """
        if self.num_open:
            raise RuntimeError("the last window is still open: commit or roll back first")
        needed = self.length + num_tokens
        if needed > self._slot.capacity:
            self._pool.grow(self._slot, needed, self.length)
        self.num_open = num_tokens
        self.num_certain = num_tokens if num_certain is None else num_certain

    def layer(self, key: LayerKey, make: Callable[[], State]) -> State:
        """The state of one layer, made on first use and then filled from a record that was restored before."""
        if key not in self._layers:
            state: Any = make()
            if self._restored is not None and key in self._restored.layers:
                state.restore(self._restored.layers[key], self._restored.length)
            self._layers[key] = state
        found: State = self._layers[key]
        return found

    def full_attention(self, key: LayerKey) -> FullAttentionState:
        """The state of a full attention layer, in this row's slot."""
        return self.layer(key, lambda: FullAttentionState(key, self._slot))

    def commit(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` of the open window, drop the rest, close the window."""
        if not self.num_certain <= num_tokens <= self.num_open:
            raise ValueError(
                f"can't commit {num_tokens} tokens of a window of {self.num_open} with {self.num_certain} certain ones"
            )
        for state in self._layers.values():
            state.commit(num_tokens, self.num_open)
        self.length += num_tokens
        self.num_open = self.num_certain = 0
        self._restored = None

    def rollback(self, num_tokens: int) -> None:
        """Drop the last `num_tokens` of the open window, keep the rest, close the window."""
        self.commit(self.num_open - num_tokens)

    def checkpoint(self) -> SequenceRecord:
        """An immutable record at the committed length; evaluated, so that later writes stay in place."""
        if self.num_open:
            raise RuntimeError("a window is open: commit or roll back before a checkpoint")
        layers = {key: state.checkpoint(self.length) for key, state in self._layers.items()}
        mx.eval([record.arrays for record in layers.values()])
        return SequenceRecord(self.length, layers)

    def restore(self, record: SequenceRecord) -> None:
        """Become what the record holds, whatever was computed before."""
        self._layers.clear()
        self.length, self.num_open, self.num_certain, self._restored = record.length, 0, 0, record
        if record.length > self._slot.capacity:
            self._pool.grow(self._slot, record.length, 0)

    def arrays(self) -> list[mx.array]:
        """What the next step starts from."""
        return [array for state in self._layers.values() for array in state.arrays()]

    def release(self) -> None:
        """Give the slot back. The state can't be used afterwards."""
        self._pool.free(self._slot)
        self._layers.clear()
