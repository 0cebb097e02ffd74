"""A sequence's records as files of the disk tier: splits them into the files that are missing, and reads them back.

The engine's thread moves arrays off the device and onto it, in slices; other threads write and read the files.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from headrace.state.attention import KVRecord
from headrace.state.disk_folder import DiskFolder
from headrace.state.disk_index import BLOCK_TOKENS, DIGEST_BYTES, MARK_BYTES, Entry, NewFile
from headrace.state.layer import LayerKey
from headrace.state.record_file import BadFile, HostArray, join, mlx_array, read_file, to_host
from headrace.state.records import SequenceRecord, SpanRecord
from headrace.state.sequence import SequenceState
from headrace.state.stored_state import Description, StateLayout, describe, rebuild, span_name

HEAD_BYTES = 16_384
"""Upper estimate of a file's header."""


@dataclass(slots=True)
class Save:
    """Files to write, and the arrays to put into them: MLX's at first, `HostArray` after `to_host`.

    known: names of existing files that the state needs too.
    num_dropped: files that there was no room for.
    layers: those with keys and values. spans: start, end, and their arrays by name; rising, they may overlap.
    descriptions, snapshots: by length, the latter's arrays by name.
    """

    files: tuple[NewFile, ...]
    known: tuple[str, ...]
    num_dropped: int
    layers: Sequence[LayerKey]
    spans: list[tuple[int, int, dict[str, Any]]]
    descriptions: dict[int, Description]
    snapshots: dict[int, dict[str, Any]]

    @classmethod
    def of(
        cls,
        missing: Sequence[NewFile],
        known: Sequence[str],
        state: SequenceState,
        spans: Sequence[SpanRecord],
        snapshots: Mapping[int, SequenceRecord],
        room_bytes: int,
    ) -> Save:
        """As many of the missing files as fit `room_bytes`; tokens that no record has are copied from the state.

        Raises NotStorable.
        """
        descriptions: dict[int, Description] = {}
        arrays: dict[int, dict[str, mx.array]] = {}
        for length in sorted({file.end for file in missing if file.is_tail} & snapshots.keys()):
            descriptions[length], arrays[length] = describe(snapshots[length].layers)
        token_bytes = state.cost().token_bytes
        taken: list[NewFile] = []
        num_dropped = 0
        for file in missing:
            of_snapshot = arrays.get(file.end, {}).values() if file.is_tail else ()
            num_bytes = len(file.tokens) * token_bytes + sum(array.nbytes for array in of_snapshot)
            if num_bytes == 0:  # a state that ends with a block and has no snapshot needs no tail
                continue
            if num_bytes > room_bytes or num_dropped:
                num_dropped += 1
                continue
            room_bytes -= num_bytes
            taken.append(replace(file, num_bytes=num_bytes + HEAD_BYTES))
        covering = _covering(taken, state, spans) if token_bytes else []
        layers = list(covering[0].layers) if covering else []
        named = [(span.start, span.end, _named(span)) for span in covering]
        return cls(tuple(taken), tuple(known), num_dropped, layers, named, descriptions, arrays)

    def to_host(self) -> Iterator[None]:
        """Copy the arrays off the device, one per step. On the thread that owns arrays."""
        for arrays in (*(arrays for _, _, arrays in self.spans), *self.snapshots.values()):
            for name, array in arrays.items():
                arrays[name] = to_host(array)
                yield

    def contents(self, file: NewFile, entry: Entry) -> tuple[dict[str, Any], dict[str, HostArray]]:
        """JSON and arrays of a file, after `to_host`. On any thread."""
        arrays = dict(self.snapshots.get(file.end, {})) if file.is_tail else {}
        layers = self.layers if file.tokens else []
        for key in layers:
            for part in ("keys", "values"):
                arrays[span_name(key, part)] = self._rows(span_name(key, part), file.start, file.end)
        about = {
            "name": entry.name,
            "before": entry.before.hex(),
            "start": entry.start,
            "marks": entry.marks.hex(),
            "span": layers,
            "snapshot": self.descriptions.get(file.end, []) if file.is_tail else [],
        }
        return about, arrays

    def _rows(self, name: str, start: int, end: int) -> HostArray:
        """The tokens `start` to `end` of an array, out of the spans that have them."""
        parts = []
        for span_start, span_end, arrays in self.spans:
            low, high = max(start, span_start), min(end, span_end)
            if low < high:
                parts.append(arrays[name].rows(low - span_start, high - span_start))
                start = high
        return join(parts)


def _named(span: SpanRecord) -> dict[str, mx.array]:
    return {
        span_name(key, part): array
        for key, record in span.layers.items()
        for part, array in zip(("keys", "values"), record.arrays, strict=False)
    }


def _covering(files: Sequence[NewFile], state: SequenceState, spans: Sequence[SpanRecord]) -> list[SpanRecord]:
    """Records that cover the files' tokens, rising; they may overlap."""
    records = list(spans)
    covered = sorted((span.start, span.end) for span in spans)
    for start, end in _merged(files):
        place = start
        for low, high in (*covered, (end, end)):
            if place < min(low, end):
                records.append(state.copy_span(place, min(low, end)))
            place = max(place, high)
    return sorted(records, key=lambda record: (record.start, record.end))


def _merged(files: Sequence[NewFile]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for start, end in sorted((file.start, file.end) for file in files if file.tokens):
        if runs and start <= runs[-1][1]:
            runs[-1] = (runs[-1][0], max(end, runs[-1][1]))
        else:
            runs.append((start, end))
    return runs


class Load:
    """A state being read from the disk; `span` and `snapshot` are its records once it `is_loaded`.

    entries: the files to read. num_tokens: length of the state.
    deadline_s: monotonic seconds after which waiting for the read is pointless.
    is_over: the read has ended, successfully or not. is_abandoned: no request waits for it any more.
    current: name of the file being read.
    span: of the missing tokens; None without sliceable layers.
    snapshot: of windowed and opaque layers; None if the model has none.
    """

    def __init__(self, entries: Sequence[Entry], num_tokens: int, deadline_s: float) -> None:
        self.entries = tuple(entries)
        self.num_tokens = num_tokens
        self.deadline_s = deadline_s
        self.is_over = threading.Event()
        self.is_abandoned = False
        self.current = ""
        self.is_loaded = False
        self.span: SpanRecord | None = None
        self.snapshot: SequenceRecord | None = None
        self._steps: Iterator[None] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the files, and roughly of their arrays."""
        return sum(entry.num_bytes for entry in self.entries)

    def read(self, folder: DiskFolder, layout: StateLayout) -> bool:
        """Read the files, which must have the layout. Returns whether that was completed. On the reader's thread.

        Raises BadFile and OSError; see `current`.
        """
        parts: dict[str, list[HostArray]] = {}
        description: Description = []
        snapshot: dict[str, HostArray] = {}
        for entry in self.entries:
            if self.is_abandoned:
                return False
            self.current = entry.name
            with folder.open(entry.name) as file:
                about, arrays = read_file(file, folder.key())
            if entry_of(entry.name, entry.num_bytes, about) != entry:
                raise BadFile("another file has taken its place")
            layout.check(entry, about, arrays)
            description, snapshot = about["snapshot"], {}
            for name, array in arrays.items():
                if name.startswith("snapshot."):
                    snapshot[name] = array
                else:
                    parts.setdefault(name, []).append(array)
        num_rows = self.num_tokens - self.entries[0].start
        spans: dict[str, HostArray] = {}
        for name in list(parts):
            spans[name] = join(parts.pop(name)).rows(0, num_rows)
        self._steps = self._to_device(list(layout.spans), spans, description, snapshot)
        return True

    def advance(self, seconds: float) -> bool:
        """Make arrays from what was read, for about this long. Returns whether there is more to do or to wait for."""
        if not self.is_over.is_set():
            return time.monotonic() < self.deadline_s
        until = time.monotonic() + seconds
        for _ in self._steps or ():
            if time.monotonic() >= until:
                return True
        self._steps = None
        return False

    def _to_device(
        self,
        layers: Sequence[LayerKey],
        spans: dict[str, HostArray],
        description: Description,
        snapshot: dict[str, HostArray],
    ) -> Iterator[None]:
        """Make the records, with an array per step; each array is dropped from the host then."""
        start, end = self.entries[0].start, self.num_tokens
        made: dict[str, mx.array] = {}
        for arrays in (spans, snapshot):
            for name in list(arrays):
                made[name] = mlx_array(arrays.pop(name))
                yield
        if layers and start < end:
            groups: dict[tuple[LayerKey, ...], KVRecord] = {
                (key,): KVRecord(start, made[span_name(key, "keys")], made[span_name(key, "values")]) for key in layers
            }
            self.span = SpanRecord(start, end, groups)
        self.snapshot = SequenceRecord(end, rebuild(description, made)) if description else None
        self.is_loaded = True


def entry_of(name: str, num_bytes: int, about: Mapping[str, Any]) -> Entry:
    """The entry of a file in the folder. Raises BadFile if its JSON doesn't match its name."""
    try:
        before, marks, start = bytes.fromhex(about["before"]), bytes.fromhex(about["marks"]), about["start"]
        is_own = about["name"] == name and start % BLOCK_TOKENS == 0
    except (KeyError, TypeError, ValueError) as error:
        raise BadFile(f"its header does not describe its tokens: {error}") from error
    if not is_own or len(before) != DIGEST_BYTES or len(marks) % MARK_BYTES:
        raise BadFile("its content does not match its name")
    *_, sort, digest = name.removesuffix(".safetensors").split("-")
    return Entry(name, before, bytes.fromhex(digest), start, marks, sort == "tail", num_bytes)
