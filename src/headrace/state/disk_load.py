"""Loads records from files: one thread reads, another makes arrays in slices."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx

from headrace.state.attention import KVRecord
from headrace.state.disk_folder import DiskFolder
from headrace.state.disk_index import Entry
from headrace.state.disk_save import entry_of, span_name
from headrace.state.host_arrays import HostArray, join, to_device
from headrace.state.layer import LayerKey
from headrace.state.record_file import BadFile, read_file
from headrace.state.sequence import SequenceRecord, SpanRecord
from headrace.state.state_form import StateForm
from headrace.state.stored_layers import Description, rebuild


@dataclass(frozen=True, slots=True)
class LoadedState:
    """Records of a state at `num_tokens`. span: of the missing tokens; None without sliceable layers.

    snapshot: of windowed and opaque layers; None if the model has none.
    """

    num_tokens: int
    span: SpanRecord | None
    snapshot: SequenceRecord | None


@dataclass(slots=True)
class _HostState:
    """What was read. span: keys and values by layer."""

    span: dict[LayerKey, list[HostArray]]
    description: Description
    snapshot: dict[str, HostArray]


class Load:
    """A state being read from the disk.

    entries: the files to read.
    num_tokens: length of the state. deadline_s: monotonic seconds after which waiting for the read is pointless.
    is_over: the read has ended, successfully or not. current: name of the file being read.
    """

    def __init__(self, entries: Sequence[Entry], num_tokens: int, deadline_s: float) -> None:
        self.entries = tuple(entries)
        self.num_tokens = num_tokens
        self.deadline_s = deadline_s
        self.is_over = threading.Event()
        self.is_abandoned = False
        self.current = ""
        self.host: _HostState | None = None
        self.loaded: LoadedState | None = None
        """The records, once `advance` has made them."""
        self._steps: Iterator[LoadedState | None] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the files, and roughly of their arrays."""
        return sum(entry.num_bytes for entry in self.entries)

    def advance(self, seconds: float) -> bool:
        """Make arrays from what was read, for about this long. Returns whether there is more to do or to wait for."""
        if self.loaded is not None:
            return False
        if not self.is_over.is_set():
            return time.monotonic() < self.deadline_s
        if self.host is None:
            return False
        if self._steps is None:
            self._steps = _rebuild(self.host, self.entries[0].start, self.num_tokens)
        until = time.monotonic() + seconds
        for made in self._steps:
            if made is not None:
                self.loaded, self.host, self._steps = made, None, None
                return False
            if time.monotonic() >= until:
                break
        return True

    def abandon(self) -> None:
        """No request waits for it any more."""
        self.is_abandoned = True


def read_load(load: Load, folder: DiskFolder, form: StateForm) -> bool:
    """Read a load's files. Returns whether it was completed and not abandoned. Raises BadFile and OSError; see
    `load.current`.

    form: the required form of what is read.
    """
    parts: dict[LayerKey, tuple[list[HostArray], list[HostArray]]] = {}
    host = _HostState({}, [], {})
    for entry in load.entries:
        if load.is_abandoned:
            return False
        load.current = entry.name
        with folder.open(entry.name) as file:
            head, arrays = read_file(file, folder.key())
        if entry_of(entry.name, entry.num_bytes, head) != entry:
            raise BadFile("another file has taken its place")
        form.check(entry, head.about, arrays)
        for key in form.spans if entry.end > entry.start else ():
            both = parts.setdefault(key, ([], []))
            for one, part in zip(both, ("keys", "values"), strict=True):
                one.append(arrays[span_name(key, part)])
        host.description = head.about["snapshot"]
        host.snapshot = {name: array for name, array in arrays.items() if name.startswith("snapshot.")}
    num_rows = load.num_tokens - load.entries[0].start
    for key, both in parts.items():
        host.span[key] = [join(one).rows(0, num_rows) for one in both]
        both[0].clear()
        both[1].clear()
    load.host = host
    return True


def _rebuild(host: _HostState, start: int, end: int) -> Iterator[LoadedState | None]:
    """One array with each step; the last step gives the result, the others None."""
    layers: dict[LayerKey, KVRecord] = {}
    for key in list(host.span):
        arrays: list[mx.array] = []
        for array in host.span.pop(key):
            arrays.append(to_device(array))
            yield None
        layers[key] = KVRecord(start, *arrays)
    made: dict[str, mx.array] = {}
    for name in list(host.snapshot):
        made[name] = to_device(host.snapshot.pop(name))
        yield None
    span = SpanRecord(start, end, layers) if layers else None
    snapshot = SequenceRecord(end, rebuild(host.description, made)) if host.description else None
    yield LoadedState(end, span, snapshot)
