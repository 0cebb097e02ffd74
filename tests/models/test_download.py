"""Downloads that are interrupted, damaged, or meet a full disk."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from fake_hub import FakeHub, fake_hub, use_hub

from headrace.cancellation import Cancellation, WorkCancelled, call_cancellable
from headrace.errors import ModelError
from headrace.models import download
from headrace.models.hub import ask, cache_of, is_complete, local_copy
from headrace.models.source import locate

PATIENCE_S = 60
WEIGHTS = os.urandom(24_000_000)
"""Of more parts than huggingface_hub reads and writes at a time (10 MB)."""

PROGRAM = "import sys; from headrace.models.source import locate; print(locate(sys.argv[1]))"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    (folder := tmp_path / "model").mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    with fake_hub({"owner/name": folder}) as hub:
        yield hub


def start(hub: FakeHub, home: Path) -> subprocess.Popen[str]:
    environ = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(home)}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "owner/name"], env=environ, stdout=pipe, stderr=pipe, text=True
    )


def unfinished_bytes(cache: Path) -> int:
    return sum(file.stat().st_size for file in cache.glob("*/blobs/*.incomplete"))


def wait_for(cache: Path, num_bytes: int) -> None:
    end = time.monotonic() + PATIENCE_S
    while unfinished_bytes(cache) < num_bytes:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_killed_download_goes_on_where_it_ended(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "home" / "hub"
    hub.pauses_at = 20_500_000
    with start(hub, tmp_path / "home") as process:
        wait_for(cache, 10_000_000)
        process.send_signal(signal.SIGKILL)
    hub.goes_on.set()
    use_hub(monkeypatch, hub.url, cache)
    assert local_copy("owner/name") is None
    begun = unfinished_bytes(cache)
    assert begun >= 10_000_000
    assert ask("owner/name").fetched_bytes == begun + len('{"model_type": "llama"}')
    with start(hub, tmp_path / "home") as process:
        out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    assert hub.ranges == [f"bytes={begun}-"]
    assert (Path(out.strip()) / "model.safetensors").read_bytes() == WEIGHTS
    assert unfinished_bytes(cache) == 0


def test_two_at_once_fetch_each_file_once(hub: FakeHub, tmp_path: Path) -> None:
    with start(hub, tmp_path / "home") as one, start(hub, tmp_path / "home") as other:
        done = [process.communicate(timeout=PATIENCE_S) for process in (one, other)]
    assert [one.returncode, other.returncode] == [0, 0], done
    gets = [line for line in hub.asked if line.startswith("GET") and line.endswith("model.safetensors")]
    assert len(gets) == 1


def test_a_damaged_part_is_noticed_and_fetched_anew(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_hub(monkeypatch, hub.url, tmp_path / "cache")
    (blobs := cache_of("owner/name") / "blobs").mkdir(parents=True)
    (weights,) = [file for file in ask("owner/name").files if file.is_large]
    (blobs / f"{weights.blob}.incomplete").write_bytes(bytes(1000))
    with pytest.raises(ModelError, match=r"model\.safetensors came damaged and was deleted"):
        locate("owner/name")
    assert local_copy("owner/name") is None
    assert (locate("owner/name") / "model.safetensors").read_bytes() == WEIGHTS


def test_a_part_that_is_too_long_is_fetched_anew(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_hub(monkeypatch, hub.url, tmp_path / "cache")
    (blobs := cache_of("owner/name") / "blobs").mkdir(parents=True)
    (weights,) = [file for file in ask("owner/name").files if file.is_large]
    (blobs / f"{weights.blob}.incomplete").write_bytes(bytes(len(WEIGHTS) + 1))
    assert (locate("owner/name") / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.ranges == []


def test_a_full_disk_is_named_and_what_came_is_of_use(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit on the size of files stands in for the disk's: both fail a write in its middle."""
    use_hub(monkeypatch, hub.url, tmp_path / "cache")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (15_000_000, limits[1]))
    try:
        with pytest.raises(ModelError, match=r"the disk is full \(.*cache\).*the same command continues"):
            locate("owner/name")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    snapshot = cache_of("owner/name") / "snapshots" / hub.commit("owner/name")
    assert not is_complete(snapshot)
    assert not (snapshot / "model.safetensors").exists()
    assert not (cache_of("owner/name") / "refs").exists()
    assert (locate("owner/name") / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.ranges == ["bytes=15000000-"]


def test_a_connection_that_breaks_off_is_named(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_hub(monkeypatch, hub.url, tmp_path / "cache")
    hub.breaks_at = 12_000_000
    with pytest.raises(ModelError, match=r"the download of owner/name broke off \(.*500.*\); the same command"):
        locate("owner/name")
    assert local_copy("owner/name") is None
    hub.breaks_at, hub.is_broken = None, False
    assert (locate("owner/name") / "model.safetensors").read_bytes() == WEIGHTS
    assert all(int(asked.removeprefix("bytes=").rstrip("-")) >= 10_000_000 for asked in hub.ranges)
    assert hub.ranges


@pytest.fixture
def given_up(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once a second file of weights, whose content trickles, is fetched no more."""
    (tmp_path / "model" / "trickling.safetensors").write_bytes(os.urandom(20_000_000))
    use_hub(monkeypatch, hub.url, tmp_path / "cache")
    is_over = threading.Event()
    fetch_whole = download.http_get

    def http_get(url: str, out: BinaryIO, *, tqdm_class: type[Any], **settings: Any) -> None:
        if not url.endswith("trickling.safetensors"):
            return fetch_whole(url, out, tqdm_class=tqdm_class, **settings)
        try:
            with tqdm_class() as bar:
                for _ in range(100 * PATIENCE_S):
                    bar.update(out.write(b"x"))
                    time.sleep(0.01)
        finally:
            is_over.set()

    monkeypatch.setattr(download, "http_get", http_get)
    return is_over


def test_if_one_file_fails_the_others_are_given_up(hub: FakeHub, given_up: threading.Event) -> None:
    hub.breaks_at = 12_000_000
    with pytest.raises(ModelError, match="the download of owner/name broke off"):
        locate("owner/name")
    assert given_up.wait(PATIENCE_S / 6)


def test_a_cancelled_download_gives_up_all_files(hub: FakeHub, given_up: threading.Event) -> None:
    cancellation = Cancellation()
    timer = threading.Timer(1.0, cancellation.cancel)
    timer.start()
    with pytest.raises(WorkCancelled):
        call_cancellable(cancellation, partial(locate, "owner/name"))
    assert given_up.wait(PATIENCE_S / 6)
