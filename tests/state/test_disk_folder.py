"""The folder of the disk tier: whole files only, the oldest first, and nothing that isn't ours."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import BinaryIO

import pytest

from headrace.state.disk_folder import DiskFolder


def name(number: int, model: int = 1, sort: str = "block") -> str:
    return f"{model:016x}-{sort}-{number:040x}.safetensors"


def put(folder: DiskFolder, file: str, num_bytes: int, used_ns: int) -> None:
    folder.write(file, lambda opened: opened.write(b"x" * num_bytes))
    folder.touch([file], used_ns)


def test_the_oldest_of_all_models_make_room(tmp_path: Path) -> None:
    folder = DiskFolder(tmp_path / "a" / "b", 100)
    assert folder.files() == []
    put(folder, name(1, model=1), 30, 30_000)
    put(folder, name(2, model=2), 30, 10_000)
    put(folder, name(3, model=1, sort="tail"), 30, 20_000)
    assert [file.name for file in folder.files()] == [name(2, model=2), name(3, sort="tail"), name(1)]
    assert folder.make_room(10) == []
    assert folder.make_room(11) == [name(2, model=2)]
    assert folder.make_room(70) == [name(3, sort="tail")]
    assert folder.make_room(100) == [name(1)]
    assert folder.files() == []


def test_what_was_of_use_last_goes_last_and_the_end_of_a_prefix_first(tmp_path: Path) -> None:
    folder = DiskFolder(tmp_path, 90)
    for number in range(3):
        put(folder, name(number), 30, 1_000_000 + number)
    folder.touch([name(0), name(2), name(9)], 5_000_000)
    assert folder.make_room(90) == [name(1), name(2), name(0)]


def test_files_of_others_are_neither_counted_nor_removed(tmp_path: Path) -> None:
    folder = DiskFolder(tmp_path, 10)
    others = [f"model-{name(1)}", f"{name(1)}.bak", "notes", f".{name(1)}.tmp", name(1).upper()]
    for other in others:
        (tmp_path / other).write_bytes(b"x" * 100)
    assert folder.files() == []
    assert folder.make_room(10) == []
    folder.remove_abandoned()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    folder = DiskFolder(tmp_path, 100)

    def fail(file: BinaryIO) -> None:
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        folder.write(name(1), fail)
    assert list(tmp_path.iterdir()) == []


def test_a_file_has_its_name_only_when_it_is_whole(tmp_path: Path) -> None:
    folder = DiskFolder(tmp_path, 100)
    seen: list[list[str]] = []

    def look(file: BinaryIO) -> None:
        file.write(b"all")
        seen.append([one.name for one in folder.files()])
        folder.remove_abandoned()
        assert [one.name for one in folder.files()] == seen[-1], "its writer is alive"

    assert folder.write(name(1), look) == 3
    assert [one[0].startswith(f".{name(1)}.") for one in seen] == [True]
    assert [file.name for file in folder.files()] == [name(1)]


def test_unfinished_files_count_and_go_once_their_writer_is_gone(tmp_path: Path) -> None:
    folder = DiskFolder(tmp_path, 100)
    folder.create()
    part = tmp_path / f".{name(1)}.123-456.part"
    with part.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(b"x" * 60)
        file.flush()
        put(folder, name(2), 40, 1)
        assert folder.make_room(1) == [name(2)]
        folder.remove_abandoned()
        assert part.exists()
    folder.remove_abandoned()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_it_makes_is_for_its_owner_only(tmp_path: Path) -> None:
    DiskFolder(tmp_path / "new", 1).create()
    assert os.stat(tmp_path / "new").st_mode & 0o077 == 0
