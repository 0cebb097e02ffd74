"""The disk tier alone, with states that a test writes."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from headrace.prefix.key import Namespace
from headrace.state.attention import KVRecord, SlidingAttentionState
from headrace.state.disk import FLUSH_S, DiskTier, _Worker
from headrace.state.disk_folder import DiskFolder
from headrace.state.disk_records import Load
from headrace.state.records import SequenceRecord
from headrace.state.sequence import SequenceState
from headrace.state.slabs import StatePool
from headrace.state.stored_state import StateLayout

SPACE = Namespace("weights", salt="s")
KEY = tuple(range(1000, 1700))
TOKEN_BYTES = 2 * 2 * 3 * 4 * 4
"""Two layers, keys and values, three heads of four float32."""


def computed(length: int) -> SequenceState:
    """A state of two attention layers whose keys and values tell their tokens."""
    state = SequenceState(StatePool(), length)
    state.begin(length)
    for layer in range(2):
        keys = mx.arange(3 * length * 4, dtype=mx.float32).reshape(1, 3, length, 4) + layer
        state.full_attention((layer,)).write(0, keys, -keys)
    mx.eval(state.arrays())
    state.commit(length)
    return state


def stored(folder: Path) -> list[Path]:
    """What lies in the folder beside its key."""
    return [path for path in folder.iterdir() if path.name != ".key"]


def tier(folder: Path, layout: StateLayout | None = None, **changes: int) -> DiskTier:
    if layout is None:
        layout = StateLayout.of(computed(2))
    settings = {
        "max_pending_bytes": 10**9,
        "max_load_bytes": 10**9,
        **changes,
    }
    quota = int(settings.pop("quota", 10**9))
    return DiskTier(folder, quota, "weights", layout=layout, prefill_tokens_per_s=100.0, **settings)  # type: ignore[arg-type]


@pytest.fixture
def state() -> Iterator[SequenceState]:
    made = computed(len(KEY))
    yield made
    made.release()


def finish(load: Load | None) -> Load | None:
    assert load is not None
    load.is_over.wait()
    while load.advance(0.0):
        pass
    return load if load.is_loaded else None


def same(record: KVRecord, expected: KVRecord) -> bool:
    return record.start == expected.start and all(
        bool(mx.array_equal(one, other)) for one, other in zip(record.arrays, expected.arrays, strict=True)
    )


@pytest.mark.parametrize("num_held", [0, 1, 256, 300, 512, 690])
def test_what_is_missing_comes_back_as_it_was(num_held: int, state: SequenceState, tmp_path: Path) -> None:
    disk = tier(tmp_path)
    # some records that were made anyhow, with a gap between them; the rest is copied out of the state
    spans = [state.copy_span(100, 300), state.copy_span(310, 512)]
    disk.save(SPACE, KEY, [len(KEY)], state, spans, {})
    disk.close()
    again = tier(tmp_path)
    match = again.match(SPACE, (*KEY, 5), len(KEY))
    assert match is not None
    assert match.num_tokens == len(KEY)
    loaded = finish(again.load(match, num_held))
    again.close()
    assert loaded is not None
    assert loaded.span is not None
    start = num_held - num_held % 256
    assert (loaded.span.start, loaded.span.end) == (start, len(KEY))
    expected = state.copy_span(start, len(KEY))
    assert loaded.span.layers.keys() == expected.layers.keys()
    assert all(same(loaded.span.layers[key], expected.layers[key]) for key in expected.layers)


def test_a_prompt_that_parts_inside_a_file_gets_what_agrees(state: SequenceState, tmp_path: Path) -> None:
    disk = tier(tmp_path)
    disk.save(SPACE, KEY, [len(KEY)], state, [], {})
    disk.close()
    again = tier(tmp_path)
    match = again.match(SPACE, (*KEY[:400], 5, 6), 401)
    assert match is not None
    loaded = finish(again.load(match, 0))
    again.close()
    assert loaded is not None
    assert loaded.span is not None
    assert loaded.num_tokens == loaded.span.end == 400
    assert same(loaded.span.layers[(1,)], state.copy_span(0, 400).layers[(1,)])


def test_what_is_on_disk_is_not_written_again(state: SequenceState, tmp_path: Path) -> None:
    disk = tier(tmp_path)
    disk.save(SPACE, KEY, [600], state, [], {})
    disk.close()
    before = {path.name: path.stat().st_ino for path in stored(tmp_path)}
    assert len(before) == 3
    again = tier(tmp_path)
    again.save(SPACE, KEY, [600, 700], state, [], {})
    again.save(SPACE, KEY, [600, 700], state, [], {})
    again.close()
    after = {path.name: path.stat().st_ino for path in stored(tmp_path)}
    assert before.items() <= after.items()
    assert len(after) == 4


def test_snapshots_come_back_with_the_spans_before_them(state: SequenceState, tmp_path: Path) -> None:
    window = KVRecord(295, mx.ones((1, 2, 5, 4)), mx.zeros((1, 2, 5, 4)))
    snapshots = {300: SequenceRecord(300, {(7,): window})}
    sample = computed(2)
    sample.layer((7,), lambda: SlidingAttentionState(6)).write(0, mx.ones((1, 2, 2, 4)), mx.zeros((1, 2, 2, 4)))
    layout = StateLayout.of(sample)
    disk = tier(tmp_path, layout)
    disk.save(SPACE, KEY, [300], state, [], snapshots)
    disk.close()
    again = tier(tmp_path, layout)
    assert again.match(SPACE, KEY, 299) is None
    match = again.match(SPACE, KEY, len(KEY))
    assert match is not None
    loaded = finish(again.load(match, 0))
    again.close()
    assert loaded is not None
    assert loaded.span is not None
    assert loaded.snapshot is not None
    assert (loaded.num_tokens, loaded.span.end, loaded.snapshot.length) == (300, 300, 300)
    record = loaded.snapshot.layers[(7,)]
    assert isinstance(record, KVRecord)
    assert same(record, window)
    assert same(loaded.span.layers[(0,)], state.copy_span(0, 300).layers[(0,)])


def test_what_waits_to_be_written_is_bounded(
    state: SequenceState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    release = threading.Event()
    real = DiskFolder.write

    def hang(self: DiskFolder, *arguments: object) -> int:
        release.wait()
        return real(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(DiskFolder, "write", hang)
    disk = tier(tmp_path, max_pending_bytes=2 * 256 * TOKEN_BYTES + 1000)
    for _ in range(3):
        disk.save(SPACE, KEY, [len(KEY)], state, [], {})
        disk.advance(1.0)
    assert [record.message.partition(":")[0] for record in caplog.records] == ["not all is cached on disk"]
    release.set()
    disk.close()
    # the first two blocks: a prefix, and not two of the three files at random
    again = tier(tmp_path)
    match = again.match(SPACE, KEY, len(KEY))
    again.close()
    assert match is not None
    assert match.num_tokens == 512


def test_arrays_are_handed_over_in_slices(state: SequenceState, tmp_path: Path) -> None:
    disk = tier(tmp_path)
    disk.save(SPACE, KEY, [len(KEY)], state, [], {})
    assert disk.advance(0.0), "one array of four has been handed over"
    assert stored(tmp_path) == []
    disk.close()
    assert len(stored(tmp_path)) == 3


def test_a_state_over_the_quota_is_not_written_at_all(
    state: SequenceState, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = tier(tmp_path, quota=len(KEY) * TOKEN_BYTES)
    for _ in range(2):
        disk.save(SPACE, KEY, [len(KEY)], state, [], {})
    disk.close()
    assert stored(tmp_path) == []
    assert sum("quota" in record.message for record in caplog.records) == 1


def test_a_conversation_that_goes_on_keeps_its_beginning(state: SequenceState, tmp_path: Path) -> None:
    def save(key: tuple[int, ...], quota: int) -> None:
        disk = tier(tmp_path, quota=quota)
        made = computed(len(key))
        disk.save(SPACE, key, [len(key)], made, [], {})
        disk.close()
        made.release()

    save(KEY[:300], 10**9)
    used = sum(path.stat().st_size for path in stored(tmp_path))
    save(tuple(range(300)), 10**9)
    # room for one of the two and what is new, so that the other one has to go
    save(KEY, 3 * used)
    disk = tier(tmp_path)
    match, other = disk.match(SPACE, KEY, len(KEY)), disk.match(SPACE, tuple(range(300)), 300)
    disk.close()
    assert match is not None
    assert match.num_tokens == len(KEY)
    assert other is None or other.num_tokens < 300


def test_a_state_is_not_read_into_memory_that_is_not_there(state: SequenceState, tmp_path: Path) -> None:
    disk = tier(tmp_path, max_load_bytes=len(KEY) * TOKEN_BYTES)
    disk.save(SPACE, KEY, [len(KEY)], state, [], {})
    disk.close()
    again = tier(tmp_path, max_load_bytes=len(KEY) * TOKEN_BYTES)
    match = again.match(SPACE, KEY, len(KEY))
    assert match is not None
    assert again.load(match, 0) is None
    assert finish(again.load(match, 256)) is not None
    again.close()


def test_what_was_to_be_written_before_a_clearing_is_not(
    state: SequenceState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, writing = threading.Event(), threading.Event()
    real = DiskFolder.write

    def hang(self: DiskFolder, *arguments: object) -> int:
        writing.set()
        release.wait()
        return real(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(DiskFolder, "write", hang)
    disk = tier(tmp_path)
    disk.save(SPACE, KEY[:300], [300], computed(300), [], {})
    disk.advance(1.0)
    writing.wait()
    disk.save(SPACE, KEY, [len(KEY)], state, [], {})
    disk.clear()
    release.set()
    disk.close()
    assert stored(tmp_path) == []


def test_something_else_in_the_folders_place_is_told_once_and_nothing_waits_for_ever(
    state: SequenceState, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "cache"
    disk = tier(folder)
    shutil.rmtree(folder)
    folder.write_text("a file of somebody's")
    for length in (300, 600, len(KEY)):
        disk.save(SPACE, KEY[:length], [length], computed(length), [], {})
    disk.close()
    assert (disk.pending_bytes, disk.status().num_dropped) == (0, 2 + 2 + 1)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["the disk cache can't be written"]
    assert folder.read_text() == "a file of somebody's"


class SlowTime:
    """A clock that each look at it moves on by a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 1.0
        return self.now

    def time_ns(self) -> int:
        return int(1e9 * self.now)


def test_closing_waits_no_longer_than_it_says(
    state: SequenceState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = tier(tmp_path)
    waited: list[float] = []
    for number in range(20):  # more than is handed over in the time
        disk.save(Namespace("weights", salt=f"{number}"), KEY, [len(KEY)], state, [], {})
    clock = SlowTime()
    monkeypatch.setattr("headrace.state.disk.time", clock)
    close = _Worker.close

    def closing(self: _Worker, seconds: float) -> bool:
        waited.append(seconds)
        return close(self, 60.0)

    monkeypatch.setattr(_Worker, "close", closing)
    disk.close()
    assert clock.now + max(waited) <= FLUSH_S + 5
    assert "the disk is too slow" in caplog.text
