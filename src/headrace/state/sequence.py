"""Everything that one sequence has computed, changed by `begin`, `commit`, `rollback` and `restore` only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import mlx.core as mx

from headrace.state.attention import FullAttentionState, KVRecord
from headrace.state.delta import TableState
from headrace.state.layer import LayerCost, LayerKey, LayerRecord, LayerState
from headrace.state.records import SequenceRecord, SpanRecord, joined_record
from headrace.state.recurrent import BatchedState, RecurrentRecord
from headrace.state.slabs import Run, StatePool, slot_capacity

State = TypeVar("State", bound=LayerState)
Recurrent = TypeVar("Recurrent", BatchedState, TableState)


@dataclass(frozen=True, slots=True)
class StateCost:
    """The memory of a sequence's state, by its length. has_fine_slots: see `slot_capacity`."""

    layers: tuple[LayerCost, ...]
    has_fine_slots: bool = False

    @property
    def has_spans(self) -> bool:
        return any(layer.in_slots for layer in self.layers)

    @property
    def needs_snapshots(self) -> bool:
        return not all(layer.in_slots for layer in self.layers)

    @property
    def fixed_bytes(self) -> int:
        """Bytes that don't depend on the length."""
        return sum(layer.fixed for layer in self.layers)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in a slot."""
        return sum(layer.per_token for layer in self.layers if layer.in_slots)

    def num_bytes(self, num_tokens: int) -> int:
        capacity = slot_capacity(num_tokens, is_fine=self.has_fine_slots)
        held = sum(layer.num_bytes(capacity if layer.in_slots else num_tokens) for layer in self.layers)
        read = num_tokens * max((layer.unpacked_per_token for layer in self.layers), default=0)
        return held + read + sum(layer.rollback for layer in self.layers)

    def record_bytes(self, num_tokens: int) -> int:
        return sum(layer.num_bytes(num_tokens) for layer in self.layers)


@dataclass(frozen=True, slots=True)
class DraftModelState:
    """A draft model's state of a sequence, of its tokens from `start` on."""

    state: SequenceState
    start: int

    @property
    def end(self) -> int:
        return self.start + self.state.length


class SequenceState:
    """State of one row.

    A step opens a window with `begin`, mixers write it, and `commit` or `rollback` closes it. Layer states are
    made when a mixer first asks for them, so the sequence needs no description of the model.
    """

    def __init__(self, pool: StatePool, num_expected_tokens: int = 0) -> None:
        self.pool = pool
        self._slot = pool.allocate(max(1, num_expected_tokens))
        self._is_released = False
        self._layers: dict[LayerKey, LayerState] = {}
        self._recurrent: BatchedState | TableState | None = None
        """Of all gated delta layers."""
        self._closing: list[Any] | None = None
        """The states that are not sliceable, which `commit` closes; None after a change."""
        self._sources: dict[LayerKey, LayerRecord] = {}
        """Records from which layers are filled when a mixer first uses them."""
        self.is_untouched = False
        """Whether nothing was computed since the last restore: then layers are still in the records they came from."""
        self._restored: tuple[Sequence[SpanRecord], SequenceRecord | None] | None = None
        """The records restored last; None once a window is opened."""
        self.draft_model: DraftModelState | None = None
        """Dropped whenever this state is restored or released."""
        self.snapshot_points: tuple[int, ...] = ()
        """Lengths inside the open window at which windowed and opaque layers take a snapshot."""
        self.length = 0
        """Committed tokens."""
        self.num_open = 0
        """Tokens of the open window, 0 if none is open."""
        self.num_certain = 0
        """Tokens of the open window that can't be dropped."""

    def begin(self, num_tokens: int, num_certain: int | None = None, snapshot_points: tuple[int, ...] = ()) -> None:
        """Open a window of `num_tokens` after the committed ones and allocate it.

        num_certain: how many of them will surely be kept; None means all.
        snapshot_points: lengths inside the certain tokens, rising, of the snapshots for `take_snapshots`.
        """
        if self.num_open:
            raise RuntimeError("the last window is still open: commit or roll back first")
        num_certain = num_tokens if num_certain is None else num_certain
        start, end = self.length, self.length + num_certain
        if snapshot_points and not start < snapshot_points[0] <= snapshot_points[-1] < end:
            raise ValueError(f"snapshot points {snapshot_points} do not lie inside the tokens {start} to {end}")
        self._restored = None
        self.reserve(num_tokens)
        self.num_open, self.num_certain, self.snapshot_points = num_tokens, num_certain, snapshot_points

    def has_room(self, num_tokens: int) -> bool:
        """Whether so many tokens fit after the committed ones without a larger slot."""
        return self.length + num_tokens <= self._slot.capacity

    def reserve(self, num_tokens: int) -> None:
        needed = self.length + num_tokens
        if needed > self._slot.capacity:
            # a prediction head may hold an entry for the next token already
            self.pool.grow(self._slot, needed, min(self.length + 1, self._slot.capacity))

    def layer(self, key: LayerKey, make: Callable[[], State]) -> State:
        """The state of one layer, made on first use and then filled from a record that was restored before."""
        if key not in self._layers:
            state = make()
            if (record := self._sources.pop(key, None)) is not None:
                self.pool.fill(state.restore(record, self.length) or [])
            self._layers[key], self._closing = state, None
        found: State = self._layers[key]  # type: ignore[assignment]
        return found

    def has_layer(self, key: LayerKey) -> bool:
        return key in self._layers

    def recurrent(self, make: Callable[[], Recurrent]) -> Recurrent:
        """The running states of all gated delta layers, made and filled like a layer's."""
        if self._recurrent is None:
            self._recurrent, self._closing = make(), None
            records = {key: record for key, record in self._sources.items() if isinstance(record, RecurrentRecord)}
            for key in records:
                del self._sources[key]
            self._recurrent.restore(records)
        found: Recurrent = self._recurrent  # type: ignore[assignment]
        return found

    def _holders(self) -> list[Any]:
        return [*self._layers.values(), *([] if self._recurrent is None else [self._recurrent])]

    def full_attention(self, key: LayerKey, first: int = 0) -> FullAttentionState:
        """The state of a full attention layer, in this row's slot; `first` says where a new one begins."""
        return self.layer(key, lambda: FullAttentionState(key, self._slot, first, self.pool.kv_forms.get(key)))

    def commit(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` of the open window, drop the rest, close the window."""
        if not self.num_certain <= num_tokens <= self.num_open:
            raise ValueError(
                f"can't commit {num_tokens} tokens of a window of {self.num_open} with {self.num_certain} certain ones"
            )
        if self._closing is None:
            # of sliceable layers a length is moved, and nothing else
            self._closing = [holder for holder in self._holders() if not holder.is_sliceable]
        for holder in self._closing:
            holder.commit(num_tokens, self.num_open)
        self.length += num_tokens
        self.num_open = self.num_certain = 0
        self.is_untouched = False
        self._sources.clear()

    def rollback(self, num_tokens: int) -> None:
        """Drop the last `num_tokens` of the open window, keep the rest, close the window."""
        self.commit(self.num_open - num_tokens)

    def checkpoint(self) -> SequenceRecord:
        """An immutable record at the committed length; evaluated, so that later writes stay in place."""
        if self._restored is not None:
            record = joined_record(self.length, *self._restored)
            self._restored = (), record
            return record
        return self._record(sliceable=True)

    def _record(self, *, sliceable: bool) -> SequenceRecord:
        """sliceable: include layers that are sliceable."""
        if self.num_open:
            raise RuntimeError("a window is open: commit or roll back before a checkpoint")
        self._check_layers()
        recorded = {key: state for key, state in self._layers.items() if sliceable or not state.is_sliceable}
        layers = {key: state.checkpoint(self.length) for key, state in recorded.items()}
        if self._recurrent is not None:
            layers.update(self._recurrent.checkpoint())
        self.pool.launch([array for record in layers.values() for array in record.arrays])
        return SequenceRecord(self.length, layers)

    def take_snapshots(self) -> dict[int, SequenceRecord]:
        """The snapshots of the last window, by length; to be taken before the next one is opened."""
        if not self.snapshot_points:
            return {}
        snapshots: dict[int, dict[LayerKey, LayerRecord]] = {length: {} for length in self.snapshot_points}
        for length, records in snapshots.items():
            taken = {key: state.take_snapshot(length) for key, state in self._layers.items()}
            records.update({key: record for key, record in taken.items() if record is not None})
        if self._recurrent is not None:
            for length, of_recurrent in self._recurrent.take_snapshots().items():
                snapshots[length].update(of_recurrent)
        self.pool.launch(
            [array for records in snapshots.values() for record in records.values() for array in record.arrays]
        )
        self.snapshot_points = ()
        return {length: SequenceRecord(length, layers) for length, layers in snapshots.items()}

    def snapshot(self) -> SequenceRecord:
        """A record of the windowed and opaque layers at the committed length. Raises RuntimeError if `is_untouched`."""
        return self._record(sliceable=False)

    def copy_span(self, start: int, end: int) -> SpanRecord:
        """A copy of the keys and values of full attention layers for the committed tokens `start` to `end`.

        Raises RuntimeError if `is_untouched`.
        """
        self._check_layers()
        layers = [key for key, state in self._layers.items() if isinstance(state, FullAttentionState)]
        written = [key for key in layers if start < end and self._slot.has(key)]
        copies = self._slot.copies(written, start, end)
        groups = {keys: KVRecord(start, *copied) for keys, copied in copies.items()}
        if unwritten := tuple(key for key in layers if key not in written):
            groups[unwritten] = KVRecord(start, None, None)
        self.pool.launch([array for record in groups.values() for array in record.arrays])
        return SpanRecord(start, end, groups)

    def _check_layers(self) -> None:
        if self.is_untouched:
            raise RuntimeError("no layer of the state has been filled since its restore")

    def is_finite(self) -> bool:
        """Whether the last token's state is finite in all layers: a NaN or infinity of an earlier one propagates to it.

        Waits for the device. Raises RuntimeError if `is_untouched`; not at length 0.
        """
        span = self.copy_span(self.length - 1, self.length).layers
        arrays = [array for key, record in span.items() for array in self._dequantized(key, record)]
        arrays += [array for record in self.snapshot().layers.values() for array in record.arrays]
        finite = [mx.isfinite(array).all() for array in arrays]
        return not finite or bool(mx.stack(finite).all().item())

    def _dequantized(self, key: LayerKey, record: KVRecord) -> tuple[mx.array, ...]:
        """Keys and values of a span's record, if there are any."""
        if record.keys is None or record.values is None:
            return ()
        return self.full_attention(key).dequantized(record.keys, record.values)

    def restore(self, record: SequenceRecord) -> None:
        self.restore_parts(record.length, (), record)

    def restore_parts(self, length: int, spans: Sequence[SpanRecord], snapshot: SequenceRecord | None) -> None:
        """Become the state at `length` from consecutive spans from token 0 on, and a snapshot there."""
        self._clear()
        self._restored = spans, snapshot
        self.length, self.num_open, self.num_certain, self.snapshot_points = length, 0, 0, ()
        self.is_untouched = length > 0
        if length > self._slot.capacity:
            self.pool.grow(self._slot, length, 0)
        runs: dict[tuple[LayerKey, ...], list[Run]] = {}
        for span in spans:
            for layers, record in span.groups.items():
                runs.setdefault(layers, []).extend(record.runs(length))
        self._sources = {} if snapshot is None else dict(snapshot.layers)
        if parts := [part for layers, found in runs.items() for part in self._slot.parts(layers, found)]:
            self.pool.fill(parts)

    def own_arrays(self) -> list[mx.array]:
        """The layers' arrays that don't lie in a pool, and a draft model's; rows of a batch may share some of them."""
        own = (state for state in self._layers.values() if not state.cost().in_slots)
        arrays = [array for state in own for array in state.arrays()]
        arrays += self._recurrent.arrays() if isinstance(self._recurrent, BatchedState) else []
        return arrays if self.draft_model is None else arrays + self.draft_model.state.own_arrays()

    def cost(self) -> StateCost:
        """The memory of such a state at any length. Call it after the first window."""
        recurrent = [] if self._recurrent is None else self._recurrent.cost()
        return StateCost((*(state.cost() for state in self._layers.values()), *recurrent), self.pool.has_batches)

    def arrays(self) -> list[mx.array]:
        """All arrays that the next step starts from, and those of snapshots."""
        return [array for holder in self._holders() for array in holder.arrays()]

    def release(self) -> None:
        """Free the slot, unless that was done. Any other later use fails: another sequence may have the slot."""
        if not self._is_released:
            self._is_released = True
            self.pool.free(self._slot)
            self._clear()
            del self._slot

    def drop_draft_model(self) -> None:
        if self.draft_model is not None:
            self.draft_model.state.release()
            self.draft_model = None

    def _clear(self) -> None:
        self.drop_draft_model()
        self._layers.clear()
        if self._recurrent is not None:
            self._recurrent.release()
        self._recurrent = self._closing = self._restored = None
        self._sources, self.is_untouched = {}, False
