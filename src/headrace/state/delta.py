"""Running states of gated delta layers for our kernels: tables with a slot for each sequence.

A step reads and writes them in place, see state/slabs.py. Uncertain tokens are kept as inputs of the recurrence, and
replayed by the next step once it is known how many of them count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import mlx.core as mx

from headrace.backend.cuda import delta, put
from headrace.backend.cuda.shapes import LONGEST_WINDOW, DeltaShape, DeltaTable, Prepared
from headrace.backend.transfer import to_device
from headrace.state.layer import LayerCost, LayerKey
from headrace.state.recurrent import Records, RecurrentRecord, RecurrentState


class DeltaTables:
    """The tables of all layers, each made at its first use. They double when there is no free slot."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self.layers: dict[LayerKey, DeltaTable] = {}

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for table in self.layers.values() for array in table)

    def prepare(self, layer: LayerKey, shape: DeltaShape, dtype: mx.Dtype) -> DeltaTable:
        if layer not in self.layers:
            self.layers[layer] = _empty(shape, dtype, self.num_slots)
        return self.layers[layer]

    def allocate(self) -> int:
        """A slot, with another sequence's old contents."""
        if not self._free:
            self._grow()
        return self._free.pop()

    def free(self, slot: int) -> None:
        self._free.append(slot)

    def _grow(self) -> None:
        for layer, table in self.layers.items():
            doubled = [mx.concatenate([array, mx.zeros_like(array)]) for array in table]
            mx.eval(doubled)
            self.layers[layer] = DeltaTable(*doubled)
        self._free += range(2 * self.num_slots - 1, self.num_slots - 1, -1)
        self.num_slots *= 2


def _empty(shape: DeltaShape, dtype: mx.Dtype, num_slots: int) -> DeltaTable:
    rows, stashed = 2 * num_slots, LONGEST_WINDOW - 1
    key, value = (shape.num_k_heads, shape.head_k_dim), (shape.num_v_heads, shape.head_v_dim)
    gates = (rows, stashed, shape.num_v_heads)
    return DeltaTable(
        mx.zeros((num_slots, *value, shape.head_k_dim), mx.float32),
        mx.zeros((rows, shape.kernel_size - 1 + LONGEST_WINDOW, shape.num_channels), dtype),
        mx.zeros((rows, stashed, *key), dtype),
        mx.zeros((rows, stashed, *value), dtype),
        *(mx.zeros(gates, mx.float32) for _ in range(2)),
    )


def _replay(plan: mx.array, tables: Sequence[Sequence[mx.array]]) -> list[mx.array]:
    """Replay tokens of the stashes, their rows as packed tokens. Gives one array per table, to be launched.

    plan: as in `delta.scan_chunks`.
    """
    launched: list[mx.array] = []
    for state, _, *stash in tables:
        k, v, g, beta = (array.reshape(-1, *array.shape[2:]) for array in stash)
        launched.append(delta.scan_chunks(plan, mx.zeros((1,), mx.int32), Prepared(k, k, v, g, beta), state)[0])
    return launched


_compiled_replay = mx.compile(_replay) if mx.cuda.is_available() else _replay


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


def _by_layer(layers: Iterable[LayerKey], states: Sequence[mx.array], contexts: Sequence[mx.array]) -> Records:
    return dict(zip(layers, map(RecurrentRecord, states, contexts), strict=True))


@dataclass(frozen=True, slots=True)
class Stops:
    """What a step leaves at its rows' snapshot points: of each layer states and raw inputs `[num_stops, …]`."""

    states: dict[LayerKey, mx.array] = field(default_factory=dict)
    contexts: dict[LayerKey, mx.array] = field(default_factory=dict)

    def records(self, place: int) -> Records:
        """Copies of what is left at one of them."""
        states, contexts = (_collected(list(each.values()), 1, place, 1) for each in (self.states, self.contexts))
        return _by_layer(self.states, states, contexts)


class TableState(RecurrentState):
    """A slot of the tables.

    pending: records to fill the tables from. snapshot_points: of the last window, each with its place in `Stops`.
    """

    def __init__(self, tables: DeltaTables, num_context: int) -> None:
        """num_context: raw inputs of earlier tokens that a token needs."""
        super().__init__()
        self.tables = tables
        self.index = tables.allocate()
        self.pending: dict[LayerKey, RecurrentRecord] = {}
        self.snapshot_points: dict[int, tuple[Stops, int]] = {}
        self._num_context = num_context
        self._parity = 0
        """Which of its two rows of raw inputs and stash the last step has written."""

    @property
    def _row(self) -> int:
        return 2 * self.index + self._parity

    def advance(self, end: int, num_uncertain: int) -> tuple[int, int, int, int, int]:
        """A step starts. end: of the raw inputs, with all tokens of the step.

        Returns num_replay, end, slot, old and new, as in the plans of backend/cuda/delta.py.
        """
        old = self._row if self.end else -1
        self._parity = 1 - self._parity
        place = (self.num_replay, self.end, self.index, old, self._row)
        self.end, self.num_uncertain = end, num_uncertain
        return place

    def restore(self, records: Records) -> None:
        self.pending, self.end = dict(records), self._num_context if records else 0

    def parts(self, layer: LayerKey) -> list[put.Part]:
        """What is to be written into a layer's table before the first step after a restore."""
        record, table = self.pending.pop(layer, None), self.tables.layers[layer]
        if record is None:
            return []
        context = record.context[:, -self._num_context :]
        raw = mx.pad(context, [(0, 0), (0, table.raw.shape[1] - context.shape[1]), (0, 0)])
        # the first row is what a first step reads
        return [put.Part([table.state], 0, self.index, record.state), put.Part([table.raw], 0, 2 * self.index, raw)]

    def settle(self) -> list[mx.array]:
        """Replay what is pending in all layers; returns what is to be launched before the next step."""
        count, row = self.num_replay, self._row
        self.num_replay = self.num_uncertain = 0
        if not count:
            return []
        first = row * (LONGEST_WINDOW - 1)
        plan = to_device([first, count, count, 0, self.index, row, row, 0, 0], mx.int32)[None]
        return _compiled_replay(plan, list(map(tuple, self.tables.layers.values())))

    def checkpoint(self) -> Records:
        if not self.end:
            return {}
        if replayed := self.settle():
            mx.async_eval(replayed)
        layers = self.tables.layers
        num_inputs = next(iter(layers.values())).raw.shape[1]
        states = _collected([table.state for table in layers.values()], 1, self.index, 1)
        at = self._row * num_inputs + self.end - self._num_context
        contexts = _collected([table.raw for table in layers.values()], 2, at, self._num_context)
        return _by_layer(layers, states, [context[None] for context in contexts])

    def take_snapshots(self) -> Mapping[int, Records]:
        points, self.snapshot_points = self.snapshot_points, {}
        return {length: stops.records(place) for length, (stops, place) in points.items()}

    def cost(self) -> list[LayerCost]:
        """One slot per layer, the same at every length."""
        layers = self.tables.layers.values()
        return [LayerCost(fixed=sum(array.nbytes for array in table) // self.tables.num_slots) for table in layers]

    def arrays(self) -> list[mx.array]:
        """The tables, which all sequences share."""
        return [array for table in self.tables.layers.values() for array in table]

    def release(self) -> None:
        self.tables.free(self.index)
