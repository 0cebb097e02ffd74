"""Running states of gated delta layers for our kernels: tables with a slot for each sequence.

A step reads and writes them in place, see state/slabs.py. Uncertain tokens are kept as inputs of the recurrence, and
replayed by the next step once it is known how many of them count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import ClassVar

import mlx.core as mx

from headrace.backend.cuda import delta, put
from headrace.backend.cuda.shapes import LONGEST_WINDOW, DeltaShape, DeltaTable, Prepared, Stash
from headrace.backend.transfer import to_device
from headrace.state.layer import LayerCost, LayerKey, LayerRecord
from headrace.state.recurrent import RecurrentRecord


class DeltaTables:
    """The tables of all layers, each made at its first use. They double when there is no free slot."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._layers: dict[LayerKey, DeltaTable] = {}

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for table in self._layers.values() for array in arrays_of(table))

    @property
    def layers(self) -> Mapping[LayerKey, DeltaTable]:
        return self._layers

    @property
    def slot_bytes(self) -> Sequence[int]:
        """Bytes of a slot, by layer."""
        return [sum(array.nbytes for array in arrays_of(table)) // self._num_slots for table in self._layers.values()]

    def prepare(self, layer: LayerKey, shape: DeltaShape, dtype: mx.Dtype) -> DeltaTable:
        if layer not in self._layers:
            self._layers[layer] = _empty(shape, dtype, self._num_slots)
        return self._layers[layer]

    def allocate(self) -> int:
        """A slot, with another sequence's old contents."""
        if not self._free:
            self._grow()
        return self._free.pop()

    def free(self, slot: int) -> None:
        self._free.append(slot)

    def settle(self, plan: mx.array) -> list[mx.array]:
        """Replay tokens of the stash, its rows as packed tokens; plan: as in `delta.scan_chunks`."""
        arrays = [arrays_of(table) for table in self._layers.values()]
        return _settle(plan, arrays)

    def _grow(self) -> None:
        for layer, table in self._layers.items():
            doubled = [mx.concatenate([array, mx.zeros_like(array)]) for array in arrays_of(table)]
            mx.eval(doubled)
            state, raw, *stash = doubled
            self._layers[layer] = DeltaTable(state, raw, Stash(*stash))
        self._free += range(2 * self._num_slots - 1, self._num_slots - 1, -1)
        self._num_slots *= 2


def arrays_of(table: DeltaTable) -> tuple[mx.array, ...]:
    return (table.state, table.raw, *table.stash)


def _empty(shape: DeltaShape, dtype: mx.Dtype, num_slots: int) -> DeltaTable:
    rows, stashed = 2 * num_slots, LONGEST_WINDOW - 1
    key, value = (shape.num_k_heads, shape.head_k_dim), (shape.num_v_heads, shape.head_v_dim)
    gates = (rows, stashed, shape.num_v_heads)
    return DeltaTable(
        mx.zeros((num_slots, *value, shape.head_k_dim), mx.float32),
        mx.zeros((rows, shape.kernel_size - 1 + LONGEST_WINDOW, shape.num_channels), dtype),
        Stash(
            mx.zeros((rows, stashed, *key), dtype),
            mx.zeros((rows, stashed, *value), dtype),
            *(mx.zeros(gates, mx.float32) for _ in range(2)),
        ),
    )


def _replay(plan: mx.array, tables: Sequence[Sequence[mx.array]]) -> list[mx.array]:
    """One array per table, to be launched."""
    launched: list[mx.array] = []
    for state, _, *stash in tables:
        k, v, g, beta = (array.reshape(-1, *array.shape[2:]) for array in stash)
        launched.append(delta.scan_chunks(plan, mx.zeros((1,), mx.int32), Prepared(k, k, v, g, beta), state)[0])
    return launched


_settle = mx.compile(_replay) if mx.cuda.is_available() else _replay


def _collected(arrays: Sequence[mx.array], num_merged: int, at: int, number: int) -> list[mx.array]:
    """Of each array the rows `[number, …]` from `at` on, with its first axes merged; one launch copies all.

    Arrays of different shapes or types take one each.
    """
    shapes = {(array.shape, array.dtype) for array in arrays}
    groups = [list(arrays)] if len(shapes) == 1 else [[array] for array in arrays]
    found: list[mx.array] = []
    for group in groups:
        rest = group[0].shape[num_merged:]
        parts = put.collect(group, 1, prod(rest), at, number)
        # views: an index would copy each
        found += [part.reshape(number, *rest) for part in mx.split(parts, len(group))]
    return found


def _by_layer(
    layers: Iterable[LayerKey], states: Sequence[mx.array], contexts: Sequence[mx.array]
) -> dict[LayerKey, LayerRecord]:
    return {
        layer: RecurrentRecord(state, context) for layer, state, context in zip(layers, states, contexts, strict=True)
    }


@dataclass(frozen=True, slots=True)
class Stops:
    """What a step leaves at its rows' snapshot points: of each layer states and raw inputs `[num_stops, …]`."""

    states: dict[LayerKey, mx.array] = field(default_factory=dict)
    contexts: dict[LayerKey, mx.array] = field(default_factory=dict)

    def records(self, place: int) -> dict[LayerKey, LayerRecord]:
        """Copies of what is left at one of them."""
        states = _collected(list(self.states.values()), 1, place, 1)
        return _by_layer(self.states, states, _collected(list(self.contexts.values()), 1, place, 1))


@dataclass(frozen=True, slots=True)
class DeltaRow:
    """Where a step reads and writes a sequence, as in the plans of backend/cuda/delta.py.

    old: of the raw inputs and the stash, -1 before any token.
    """

    num_replay: int
    context_end: int
    slot: int
    old: int
    new: int


@dataclass(slots=True, eq=False)
class DeltaSlot:
    """A sequence's running states in all layers: one slot of the tables, and what changes from step to step.

    Opaque.
    end: where its raw inputs end; 0 before any token.
    num_uncertain: tokens in the stash.
    num_replay: those of them, the first ones, that count and are not in the state yet.
    pending: records to fill the tables from. snapshot_points: of the last window, each with what the step leaves there.
    """

    is_sliceable: ClassVar[bool] = False

    tables: DeltaTables
    index: int
    end: int = 0
    num_uncertain: int = 0
    num_replay: int = 0
    pending: dict[LayerKey, RecurrentRecord] = field(default_factory=dict)
    snapshot_points: dict[int, tuple[Stops, int]] = field(default_factory=dict)
    _parity: int = 0
    """Which of its two rows of raw inputs and stash the last step has written."""

    @property
    def _row(self) -> int:
        return 2 * self.index + self._parity

    def step(self, num_tokens: int, num_certain: int, end: int) -> DeltaRow:
        """Open a window. end: where the raw inputs will end after it."""
        old = self._row if self.end else -1
        self._parity = 1 - self._parity
        row = DeltaRow(self.num_replay, self.end, self.index, old, self._row)
        self.end, self.num_uncertain, self.num_replay = end, num_tokens - num_certain, num_tokens - num_certain
        return row

    def commit(self, num_kept: int, num_window: int) -> None:
        """Keep the first `num_kept` tokens; the next step replays those that are not in the state."""
        self.end -= num_window - num_kept
        self.num_replay = max(0, self.num_uncertain - (num_window - num_kept))

    def parts(self, layer: LayerKey) -> list[put.Part]:
        """What is to be written into a layer's table before the first step after a restore."""
        record, table = self.pending.pop(layer, None), self.tables.layers[layer]
        if record is None or record.state is None or record.context is None:
            return []
        context = record.context[:, LONGEST_WINDOW - table.raw.shape[1] :]
        raw = mx.pad(context, [(0, 0), (0, table.raw.shape[1] - context.shape[1]), (0, 0)])
        # the first row is what a first step reads
        return [put.Part(table.state, 0, self.index, record.state), put.Part(table.raw, 0, 2 * self.index, raw)]

    def settle(self) -> list[mx.array]:
        """Replay what is pending in all layers; returns what is to be launched before the next step."""
        count, row = self.num_replay, self._row
        self.num_replay = self.num_uncertain = 0
        if not count:
            return []
        first = row * (LONGEST_WINDOW - 1)
        plan = to_device([first, count, count, 0, self.index, row, row, 0, 0], mx.int32)[None]
        return self.tables.settle(plan)

    def checkpoint(self) -> dict[LayerKey, LayerRecord]:
        """Replay, then copy."""
        layers = self.tables.layers
        if not self.end:
            return {layer: RecurrentRecord(None, None) for layer in layers}
        if replayed := self.settle():
            mx.async_eval(replayed)
        num_inputs = next(iter(layers.values())).raw.shape[1]
        num_context = num_inputs - LONGEST_WINDOW
        states = _collected([table.state for table in layers.values()], 1, self.index, 1)
        at = self._row * num_inputs + self.end - num_context
        contexts = _collected([table.raw for table in layers.values()], 2, at, num_context)
        return _by_layer(layers, states, [context[None] for context in contexts])

    def take_snapshots(self) -> dict[int, dict[LayerKey, LayerRecord]]:
        """Copies of what the last window left at its snapshot points, by length and layer."""
        points, self.snapshot_points = self.snapshot_points, {}
        return {length: stops.records(place) for length, (stops, place) in points.items()}

    def cost(self) -> list[LayerCost]:
        """One slot per layer, the same at every length."""
        return [LayerCost(fixed=num_bytes) for num_bytes in self.tables.slot_bytes]

    def arrays(self) -> tuple[mx.array, ...]:
        """The tables, which all sequences share."""
        return tuple(array for table in self.tables.layers.values() for array in arrays_of(table))
