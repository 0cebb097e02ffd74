"""Immutable copies of a sequence's state, or of a part of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from headrace.state.attention import KVRecord, joined
from headrace.state.layer import LayerKey, LayerRecord


@dataclass(frozen=True, slots=True)
class SequenceRecord:
    """Immutable copy of layers of a sequence's state at `length` tokens.

    All layers make a checkpoint, windowed and opaque layers only a *snapshot*.
    """

    length: int
    layers: Mapping[LayerKey, LayerRecord]

    @property
    def num_bytes(self) -> int:
        return sum(record.num_bytes for record in self.layers.values())


@dataclass(frozen=True, slots=True)
class SpanRecord:
    """Immutable keys and values of all full attention layers for the tokens `start` to `end`.

    groups: by the layers that a record has.
    """

    start: int
    end: int
    groups: Mapping[tuple[LayerKey, ...], KVRecord]

    @property
    def num_bytes(self) -> int:
        return sum(record.num_bytes for record in self.groups.values())

    @property
    def layers(self) -> dict[LayerKey, KVRecord]:
        """Views of the groups' records."""
        records: dict[LayerKey, KVRecord] = {}
        for keys, record in self.groups.items():
            records.update(zip(keys, record.by_layer(len(keys)), strict=True))
        return records

    def part(self, start: int, end: int) -> SpanRecord:
        """The tokens `start` to `end`, which the record has: a copy, or the record itself for all of them."""
        if (start, end) == (self.start, self.end):
            return self
        groups = {keys: record.part(start, end) for keys, record in self.groups.items()}
        mx.async_eval([record.arrays for record in groups.values()])
        return SpanRecord(start, end, groups)


def joined_record(length: int, spans: Sequence[SpanRecord], snapshot: SequenceRecord | None) -> SequenceRecord:
    """One record of the state at `length`, from consecutive spans and a snapshot."""
    if not spans and snapshot is not None:
        return snapshot
    by_layer = [span.layers for span in spans]
    layers: dict[LayerKey, LayerRecord] = {}
    for key in by_layer[0] if by_layer else ():
        layers[key] = joined([records[key] for records in by_layer]).part(0, length)
    mx.eval([record.arrays for record in layers.values()])
    return SequenceRecord(length, {**layers, **(snapshot.layers if snapshot is not None else {})})
