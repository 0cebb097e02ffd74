"""The disk tier of the prefix cache: what prompts have computed, kept over restarts.

    tier.save(namespace, key, ends, state, spans, snapshots)   # what a sequence has computed; returns at once
    tier.advance(seconds)                                      # a slice of handing it to the thread that writes
    match = tier.match(namespace, key, limit)                  # the longest state on disk
    load = tier.load(match, num_held)                          # begins to read
    load.advance(seconds)                                      # a slice of making its records

The engine's thread owns arrays and calls all of this; two threads of the tier's own read and write files and see
NumPy arrays only. Nothing here waits for a disk, and nothing that goes wrong with one fails a request: what can't be
written is dropped, what can't be read is computed.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from headrace.isolation import isolated
from headrace.prefix.key import Namespace
from headrace.state.disk_folder import DiskFolder
from headrace.state.disk_index import Digests, DiskIndex, DiskMatch, Entry
from headrace.state.disk_records import Load, Save, entry_of
from headrace.state.disk_times import DiskTimes
from headrace.state.record_file import BadFile, read_about, write_file
from headrace.state.records import SequenceRecord, SpanRecord
from headrace.state.sequence import SequenceState
from headrace.state.stored_state import NotStorable, StateLayout
from headrace.types.status import DiskStatus

logger = logging.getLogger(__name__)

_COUNTED = "num_hits num_hit_tokens num_reads num_read_bytes num_writes num_written_bytes num_dropped".split()

FLUSH_S = 10.0
"""How long closing waits for pending writes."""


class DiskTier:
    """States of one model in a folder that several models may share."""

    def __init__(
        self,
        folder: Path,
        quota_bytes: int,
        weights: str,
        *,
        layout: StateLayout,
        prefill_tokens_per_s: float,
        max_pending_bytes: int,
        max_load_bytes: int,
    ) -> None:
        """Scans the folder, creating it if necessary. Raises OSError if it can't be created.

        weights: fingerprint of the weights and their format.
        layout: of the model's states.
        prefill_tokens_per_s: an estimate, see DiskTimes.
        max_pending_bytes: that may wait to be written.
        max_load_bytes: of the largest state that is restored.
        """
        self._folder = DiskFolder(folder, quota_bytes)
        self._folder.create()
        self._folder.remove_useless()
        self._layout = layout
        self.weights = weights
        self._digests = Digests(self._folder.key(), weights)
        self._index = DiskIndex(self._digests, has_spans=layout.has_spans, needs_snapshots=layout.needs_snapshots)
        self._times = DiskTimes(prefill_tokens_per_s)
        self._max_pending_bytes = max_pending_bytes
        self._max_load_bytes = max_load_bytes
        self.memory_bytes = max_pending_bytes + max_load_bytes
        """Bytes that may be in flight to and from the disk together; the engine's memory accounting may lower it."""
        self._counts: Counter[str] = Counter()
        self._staging: deque[tuple[Save, Iterator[None]]] = deque()
        self._pending: dict[str, int] = {}
        """Bytes of files on their way to the disk, by name. Items are set and removed whole, by any thread."""
        self._lock = threading.Lock()
        self._generation = 0
        """Counts calls of `clear`, which drops earlier saves."""
        self._warned: set[str] = set()
        self._scan()
        self._held = self._folder.held()
        self._writer = _Worker("headrace-disk-writer")
        self._reader = _Worker("headrace-disk-reader")

    @property
    def report(self) -> str:
        num_files, num_bytes = self._held
        return (
            f"disk cache: {self._folder.path}, {len(self._index)} files of this model, {num_files} of all with "
            f"{num_bytes / 1e9:.1f} of {self._folder.quota_bytes / 1e9:.1f} GB"
        )

    def status(self) -> DiskStatus:
        """Contents and counts. Does no I/O."""
        num_files, num_bytes = self._held
        with self._lock:
            counts = dict(self._counts)
        return DiskStatus(
            num_files=num_files,
            num_bytes=num_bytes,
            quota_bytes=self._folder.quota_bytes,
            num_pending_bytes=self.pending_bytes,
            **{name: counts.get(name, 0) for name in _COUNTED},
        )

    @property
    def pending_bytes(self) -> int:
        return sum(list(self._pending.values()))

    def count_hit(self, num_saved_tokens: int) -> None:
        self._count(num_hits=1, num_hit_tokens=num_saved_tokens)

    def _count(self, **amounts: int) -> None:
        """Thread-safe."""
        with self._lock:
            self._counts.update(amounts)

    def _scan(self) -> None:
        """Find this model's files; damaged ones are removed."""
        for file in self._folder.files():
            if not file.name.startswith(self._digests.model):
                continue
            try:
                with self._folder.open(file.name) as opened:
                    self._index.add(entry_of(file.name, file.num_bytes, read_about(opened, self._digests.key)))
            except BadFile as error:
                logger.warning("%s is removed from the disk cache: %s", file.name, error)
                self._folder.remove(file.name)
            except OSError as error:
                logger.warning("%s in the disk cache can't be read: %s", file.name, error)

    def save(
        self,
        namespace: Namespace,
        key: tuple[int, ...],
        ends: Sequence[int],
        state: SequenceState,
        spans: Sequence[SpanRecord],
        snapshots: Mapping[int, SequenceRecord],
    ) -> None:
        """Take over what the disk lacks of a state at the key's length.

        ends: lengths at which a prompt may continue later, rising; the key's whole blocks are kept in addition.
        spans: existing records of some of its tokens.
        snapshots: by length, all of `ends` if the model needs them.
        """
        root = self._digests.root(namespace)
        missing, known = self._index.missing(root, key, ends, self._pending)
        try:
            save = Save.of(missing, known, state, spans, snapshots, self._room_bytes())
        except NotStorable as error:
            self._warn_once("sort", "the disk cache is of no use for this model: %s", error)
            return
        if save.num_dropped:
            self._warn_once("slow", "not all is cached on disk: too much of it waits to be written, or memory is short")
            self._count(num_dropped=save.num_dropped)
        if save.files or known:
            self._pending.update((file.name, file.num_bytes) for file in save.files)
            self._staging.append((save, save.to_host()))

    def _room_bytes(self) -> int:
        return min(self._max_pending_bytes, self.memory_bytes) - self.pending_bytes

    def advance(self, seconds: float) -> bool:
        """Hand arrays over to the writer's thread for about this long. Returns whether there are more."""
        until = time.monotonic() + seconds
        while self._staging:
            save, steps = self._staging[0]
            for _ in steps:
                if time.monotonic() >= until:
                    return True
            self._staging.popleft()
            self._writer.put(partial(self._write, save, self._generation))
        return False

    def _write(self, save: Save, generation: int) -> None:
        """On the writer's thread: all files of a save, or as many as there is room for."""
        try:
            if generation == self._generation:
                self._write_files(save, generation)
                self._warned.discard("write")
        except OSError as error:
            self._warn_once("write", "the disk cache can't be written: %s", error)
        finally:
            for file in save.files:
                self._pending.pop(file.name, None)
            self._held = self._folder.held()

    def _write_files(self, save: Save, generation: int) -> None:
        num_bytes = sum(file.num_bytes for file in save.files)
        if num_bytes > self._folder.quota_bytes:
            self._warn_once("quota", "what a prompt left takes %d bytes, more than the disk cache's quota", num_bytes)
            self._count(num_dropped=len(save.files))
            return
        self._forget_missing()
        self._folder.touch(save.known, time.time_ns())
        for number, file in enumerate(save.files):
            self._index.discard(self._folder.make_room(file.num_bytes))
            entry = file.entry(self._digests)
            about, arrays = save.contents(file, entry)
            write = partial(write_file, about=about, arrays=arrays, key=self._digests.key)
            try:
                num_written = self._folder.write(file.name, write)
            except OSError:
                self._count(num_dropped=len(save.files) - number)
                raise
            self._count(num_writes=1, num_written_bytes=num_written)
            with self._lock:
                is_wanted = generation == self._generation
                if is_wanted:
                    self._index.add(replace(entry, num_bytes=num_written))
            if not is_wanted:  # cleared meanwhile
                self._folder.remove(file.name)
                return
        self._folder.touch((*save.known, *(file.name for file in save.files)), time.time_ns())

    def _forget_missing(self) -> None:
        """Forget files that were removed from outside, perhaps with the folder."""
        present = {file.name for file in self._folder.files()}
        self._index.discard([name for name in self._index.names() if name not in present])

    def match(self, namespace: Namespace, key: tuple[int, ...], limit: int) -> DiskMatch | None:
        """The longest state on disk for a prompt, of at most `limit` tokens; None if there is none."""
        return self._index.match(self._digests.root(namespace), key, limit)

    def load(self, match: DiskMatch, num_held: int) -> Load | None:
        """Begin to read what a match needs beyond `num_held` tokens.

        None if that would take longer than computing it, or more memory than allowed.
        """
        if not self.is_worth_reading(match, num_held):
            return None
        entries = match.needed_beyond(num_held)
        num_bytes = sum(entry.num_bytes for entry in entries)
        num_tokens = match.num_tokens - num_held
        timeout_s = self._times.timeout_s(num_tokens, num_bytes, len(entries))
        load = Load(entries, match.num_tokens, time.monotonic() + timeout_s)
        self._reader.put(partial(self._read, load, match.entries))
        return load

    def is_worth_reading(self, match: DiskMatch, num_held: int) -> bool:
        """Whether what a match has beyond `num_held` tokens may be read, and sooner than it is computed."""
        entries = match.needed_beyond(num_held)
        num_bytes = sum(entry.num_bytes for entry in entries)
        is_faster = self._times.read_s(num_bytes, len(entries)) < self._times.compute_s(match.num_tokens - num_held)
        return is_faster and num_bytes <= min(self._max_load_bytes, self.memory_bytes - self.pending_bytes)

    def _read(self, load: Load, used: Sequence[Entry]) -> None:
        """On the reader's thread."""
        started = time.monotonic()
        try:
            if load.read(self._folder, self._layout):
                duration_s = time.monotonic() - started
                num_bytes = load.num_bytes
                self._times.observe_read(num_bytes, duration_s)
                self._count(num_reads=len(load.entries), num_read_bytes=num_bytes)
                logger.info("read %d tokens (%d bytes) from disk in %.3f s", load.num_tokens, num_bytes, duration_s)
                self._folder.touch([entry.name for entry in used], time.time_ns())
        except BadFile as error:
            logger.warning("%s is removed from the disk cache: %s", load.current, error)
            self._folder.remove(load.current)
            self._index.discard([load.current])
        except OSError as error:
            logger.warning("%s in the disk cache can't be read: %s", load.current, error)
            self._index.discard([load.current])
            self._forget_missing()
        finally:
            load.is_over.set()

    def observe_prefill(self, num_tokens: int, duration_s: float) -> None:
        self._times.observe_prefill(num_tokens, duration_s)

    def clear(self) -> None:
        """Remove this model's states and files; others' stay."""
        with self._lock:
            self._generation += 1
            names = self._index.clear()
        for save, _ in self._staging:
            for file in save.files:
                self._pending.pop(file.name, None)
        self._staging.clear()
        self._writer.put(partial(self._remove, names))

    def _remove(self, names: Sequence[str]) -> None:
        """On the writer's thread."""
        for name in names:
            self._folder.remove(name)
        self._held = self._folder.held()

    def close(self) -> None:
        """Finish pending writes, waiting at most FLUSH_S."""
        until = time.monotonic() + FLUSH_S
        has_more = self.advance(FLUSH_S)
        self._reader.close(0.0)
        is_written = self._writer.close(max(0.0, until - time.monotonic()))
        if has_more or not is_written:
            logger.warning("the disk is too slow: some computed states are not stored")

    def _warn_once(self, about: str, message: str, *values: object) -> None:
        if about not in self._warned:
            self._warned.add(about)
            logger.warning(message, *values)


class _Worker:
    """A thread that runs tasks in their order. A daemon: it keeps no process alive."""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, task: Callable[[], object]) -> None:
        """Add a task. What it raises is logged."""
        self._tasks.put(task)

    def close(self, seconds: float) -> bool:
        """End the thread, waiting at most so long for the tasks that are left. Returns whether all were done."""
        self._tasks.put(None)
        self._thread.join(seconds)
        is_done = not self._thread.is_alive()
        self._is_closed = True
        return is_done

    def _run(self) -> None:
        while not self._is_closed:
            task = self._tasks.get()
            if task is None:
                return
            with isolated(_log_failure):
                task()
            del task  # or it would keep its arrays until the next one comes


def _log_failure(error: Exception) -> None:
    logger.error("work on the disk cache failed", exc_info=error)
