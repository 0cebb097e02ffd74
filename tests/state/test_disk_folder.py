"""The folder of the disk tier: whole files only, the oldest first, and nothing that isn't ours."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import pytest

from headrace.state.disk_folder import DiskFolder


def name(number: int, model: int = 1, sort: str = "block") -> str:
    return f"v2-{model:016x}-{sort}-{number:040x}.safetensors"


def left_in(path: Path) -> list[str]:
    """Names of what lies in a folder beside its key."""
    return sorted(one.name for one in path.iterdir() if one.name != ".key")


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
    folder.remove_useless()
    assert left_in(tmp_path) == sorted(others)


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    folder = DiskFolder(tmp_path, 100)

    def fail(file: BinaryIO) -> None:
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        folder.write(name(1), fail)
    assert left_in(tmp_path) == []


def test_a_file_has_its_name_only_when_it_is_whole(tmp_path: Path) -> None:
    folder = DiskFolder(tmp_path, 100)
    seen: list[list[str]] = []

    def look(file: BinaryIO) -> None:
        file.write(b"all")
        seen.append([one.name for one in folder.files()])
        folder.remove_useless()
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
        folder.remove_useless()
        assert part.exists()
    folder.remove_useless()
    assert left_in(tmp_path) == []


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.mark.parametrize("before", [None, 0o700, 0o755, 0o777])
def test_folder_and_files_are_for_their_owner_only(before: int | None, tmp_path: Path) -> None:
    path = tmp_path / "cache"
    if before is not None:
        path.mkdir()
        path.chmod(before)
    old = os.umask(0)
    try:
        folder = DiskFolder(path, 100)
        folder.create()
        put(folder, name(1), 10, 1)
    finally:
        os.umask(old)
    assert mode(path) == 0o700
    assert {one.name: mode(one) for one in path.iterdir()} == {".key": 0o600, name(1): 0o600}


def test_a_file_that_others_could_read_is_closed_to_them_when_it_is_opened(tmp_path: Path) -> None:
    folder = DiskFolder(tmp_path, 100)
    put(folder, name(1), 10, 1)
    (tmp_path / name(1)).chmod(0o644)
    folder.open(name(1)).close()
    assert mode(tmp_path / name(1)) == 0o600


def test_a_folder_that_others_share_for_other_files_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "shared"
    path.mkdir()
    path.chmod(0o755)
    (path / "notes").write_text("somebody's")
    with pytest.raises(OSError, match="it holds other files"):
        DiskFolder(path, 100).create()
    assert mode(path) == 0o755
    assert [one.name for one in path.iterdir()] == ["notes"]
    path.chmod(0o700)
    DiskFolder(path, 100).create()


def test_what_is_no_regular_file_is_nobodys(tmp_path: Path) -> None:
    """Reading a pipe would wait for ever, and a link may lead anywhere."""
    folder = DiskFolder(tmp_path / "cache", 10)
    folder.create()
    victim = tmp_path / "victim"
    victim.write_text("of somebody else")
    os.utime(victim, ns=(1, 1))
    os.mkfifo(folder.path / name(1))
    (folder.path / name(2)).symlink_to(victim)
    (folder.path / name(3)).mkdir()
    (folder.path / name(4)).symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as listener:
        here = os.getcwd()
        os.chdir(folder.path)  # the name of a socket can't be long
        try:
            listener.bind(name(5))
        finally:
            os.chdir(here)
        os.mkfifo(folder.path / f".{name(6)}.1-2.part")
        odd = left_in(folder.path)
        assert folder.files() == []
        assert folder.make_room(10) == []
        folder.remove_useless()
        for number in range(1, 6):
            with pytest.raises(OSError, match="."):
                folder.open(name(number))
        folder.touch([name(2)], 5_000_000)
        assert victim.stat().st_mtime_ns == 1
    assert left_in(folder.path) == odd
    # a link in a file's place is replaced and not followed
    put(folder, name(2), 5, 1)
    assert victim.read_text() == "of somebody else"
    assert [file.name for file in folder.files()] == [name(2)]


def test_one_key_is_shared_by_all_and_made_anew_with_all_files_if_it_is_lost(tmp_path: Path) -> None:
    first, second = DiskFolder(tmp_path, 100), DiskFolder(tmp_path, 100)
    first.create()
    second.create()
    assert first.key() == second.key() == (tmp_path / ".key").read_bytes()
    assert len(first.key()) == 32
    put(first, name(1), 10, 1)
    (tmp_path / ".key").unlink()
    first.create()
    assert (tmp_path / ".key").read_bytes() == first.key()
    assert left_in(tmp_path) == [name(1)]
    (tmp_path / ".key").unlink()
    third = DiskFolder(tmp_path, 100)
    third.create()
    assert third.key() != first.key()
    assert left_in(tmp_path) == []


def test_a_key_whose_writer_died_is_removed_and_is_no_strangers_file(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    DiskFolder(path, 100).create()
    writer = DiskFolder(path, 100)
    writer.create()
    (path / ".key").rename(writer._part(".key"))
    path.chmod(0o755)
    folder = DiskFolder(path, 100)
    folder.create()
    folder.remove_useless()
    assert [one.name for one in path.iterdir()] == [".key"]


def test_a_damaged_key_is_refused(tmp_path: Path) -> None:
    folder = DiskFolder(tmp_path, 100)
    folder.create()
    (tmp_path / ".key").write_bytes(b"short")
    with pytest.raises(OSError, match=".key is damaged"):
        folder.key()


def test_files_of_the_version_that_told_their_tokens_are_removed(tmp_path: Path) -> None:
    folder = DiskFolder(tmp_path, 100)
    for earlier in (name(1).removeprefix("v2-"), f".{name(2).removeprefix('v2-')}.12-34.part"):
        (tmp_path / earlier).write_text("{}")
    folder.create()
    folder.remove_useless()
    assert left_in(tmp_path) == []


def test_two_servers_may_make_a_new_folder_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = DiskFolder(tmp_path / "new", 100), DiskFolder(tmp_path / "new", 100)
    link = os.link

    def start_the_other() -> None:
        other.create()
        other.remove_useless()

    def link_later(part: Path, key: Path) -> None:
        monkeypatch.setattr(os, "link", link)
        with ThreadPoolExecutor() as pool:
            pool.submit(start_the_other).result()
        assert part.exists(), "the other has removed it"
        link(part, key)

    monkeypatch.setattr(os, "link", link_later)
    one.create()
    assert one.key() == other.key()
    assert left_in(tmp_path / "new") == []


def test_a_server_whose_new_key_was_removed_takes_the_other_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On file systems without locks, another server may take the unfinished file for abandoned."""
    one, other = DiskFolder(tmp_path / "new", 100), DiskFolder(tmp_path / "new", 100)
    link = os.link

    def link_later(part: Path, key: Path) -> None:
        monkeypatch.setattr(os, "link", link)
        with ThreadPoolExecutor() as pool:
            pool.submit(other.create).result()
        part.unlink()
        link(part, key)

    monkeypatch.setattr(os, "link", link_later)
    one.create()
    assert one.key() == other.key()
