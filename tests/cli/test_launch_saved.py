"""`headrace launch CLIENT --save`: what it shows, asks, writes and keeps."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest
from clients.launcher import PATIENCE_S, Launcher
from clients.served import served


@pytest.fixture
def launcher(tmp_path: Path) -> Launcher:
    return Launcher(tmp_path)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served() as found:
        yield found


def saved(launcher: Launcher, url: str, *words: str) -> subprocess.CompletedProcess[str]:
    return launcher.run("claude", "--url", url, "--save", *words)


def test_saving_shows_the_change_asks_and_keeps_what_was_there(launcher: Launcher, url: str) -> None:
    file = launcher.home / ".claude" / "headrace.json"
    assert "--yes confirms" in saved(launcher, url).stderr
    assert not file.exists()
    ended = saved(launcher, url, "--yes")
    assert ended.returncode == 0, ended.stderr
    assert f'+    "ANTHROPIC_BASE_URL": "{url}",' in ended.stdout
    assert ended.stdout.endswith("claude --settings ~/.claude/headrace.json\n")
    assert file.stat().st_mode & 0o777 == 0o600
    first = file.read_text()
    assert json.loads(first)["model"] == "scripted"
    assert "saved before" in saved(launcher, url, "--yes").stdout
    file.write_text("mine\n")
    ended = saved(launcher, url, "--yes")
    assert "-mine\n" in ended.stdout
    assert file.read_text() == first
    assert (file.parent / "headrace.json.1.bak").read_text() == "mine\n"
    assert sorted(path.name for path in file.parent.iterdir()) == ["headrace.json", "headrace.json.1.bak"]


@pytest.mark.parametrize(("answer", "code"), [("y", 0), ("", 1), ("no", 1)])
def test_only_a_yes_in_the_terminal_saves(launcher: Launcher, url: str, answer: str, code: int) -> None:
    words = launcher.words("claude", "--url", url, "--save")
    terminal = pexpect.spawn(words[0], words[1:], env=launcher.environ, timeout=PATIENCE_S, encoding="utf-8")
    terminal.expect(r"write this\? \[y/N\] ")
    terminal.sendline(answer)
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == code
    assert (launcher.home / ".claude" / "headrace.json").exists() == (code == 0)


def test_a_folder_that_cannot_be_written_is_named(launcher: Launcher, url: str) -> None:
    (launcher.home / ".claude").write_text("a file")
    ended = saved(launcher, url, "--yes")
    assert ended.returncode == 2
    assert f"{launcher.home}/.claude/headrace.json can't be" in ended.stderr
    assert ended.stderr.count("\n") == 1
