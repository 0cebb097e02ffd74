"""`scripts/setup` in a terminal, with a stand-in for pip that prints what pip 23.2 and pip 26.3 have printed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pexpect
import pytest

ROOT = Path(__file__).parents[2]

PYTHON = """#!/usr/bin/env bash
case "$*" in
    *"--help"*) echo "{help}" ;;
    *"--no-deps"* | *"--version"*) ;;
    *) echo "$*" >> calls; cat <<'END'
{lines}
END
    ;;
esac
"""
FOUND = """Collecting pandas
  Downloading pandas-3.1.1-cp311-cp311-manylinux_2_24_x86_64.manylinux_2_28_x86_64.whl (12.4 MB)"""
RAW = """Progress 0 of 12356904
Progress 6178452 of 12356904
Progress 12356904 of 12356904"""
REST = """Collecting numpy (from pandas)
  Using cached numpy-2.4.0-cp311-cp311-manylinux_2_27_x86_64.whl.metadata (6.6 kB)
  Downloading numpy-2.4.0-cp311-cp311-manylinux_2_27_x86_64.whl (16.9 MB)
Installing collected packages: numpy, pandas"""


def shown(root: Path, help: str, lines: str) -> list[str]:
    """What the line that rewrites itself has shown, in order."""
    (root / "scripts").mkdir()
    (root / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "setup", root / "scripts" / "setup")
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, root / name)
    python = root / ".venv" / "bin" / "python"
    python.write_text(PYTHON.format(help=help, lines=lines))
    python.chmod(0o755)
    with pexpect.spawn(str(root / "scripts" / "setup"), encoding="utf-8", timeout=60, dimensions=(24, 100)) as child:
        child.expect(pexpect.EOF)
    assert child.exitstatus == 0
    return [each.strip() for each in re.findall(r"\r\x1b\[K([^\r]*)", child.before or "") if each.strip()]


def test_each_package_comes_with_its_size_and_its_share(tmp_path: Path) -> None:
    said = shown(tmp_path, "[auto, on, off, raw]", f"{FOUND}\n{RAW}\n{REST}")
    assert said == [
        "looking for packages: 1",
        "pandas 12.4 MB, 1 of 1 found so far",
        *(f"pandas {share}% of 12.4 MB, 1 of 1 found so far" for share in (0, 50, 100)),
        "looking for packages: 2",
        "numpy 16.9 MB, 2 of 2 found so far",
        "unpacking 2 packages",
    ]
    assert "--progress-bar raw" in (tmp_path / "calls").read_text()
    assert "Progress" not in (tmp_path / ".venv" / "setup.log").read_text()


@pytest.mark.parametrize("help", ["[auto, on, off]", "drawn bars"])
def test_an_older_pip_is_not_asked_for_shares(help: str, tmp_path: Path) -> None:
    assert "pandas 12.4 MB, 1 of 1 found so far" in shown(tmp_path, help, f"{FOUND}\n{REST}")
    assert "--progress-bar off" in (tmp_path / "calls").read_text()


WANTED = "3.11 to 3.14"


def program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def set_up(root: Path, *, macos: str = "", arm: bool = True, pythons: dict[str, str]) -> tuple[str, str]:
    """Runs `scripts/setup` where these programs come first on the path; what it says, and what pip was started with.

    macos: the version that `sw_vers` gives; empty on Linux. pythons: by name, what each says of itself.
    """
    (root / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "setup", root / "scripts" / "setup")
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, root / name)
    bin = root / "bin"
    program(bin, "uname", f"echo {'Darwin' if macos else 'Linux'}")
    program(bin, "sw_vers", f"echo {macos}")
    program(bin, "sysctl", "echo 1" if arm else "exit 1")
    pip = (
        'mkdir -p "$3/bin"; printf \'#!/bin/sh\\necho "$SYSTEM_VERSION_COMPAT" "$0" "$*" >>pip\\n\' >"$3/bin/python"; '
    )
    for name in ("python3", "python3.11", "python3.12", "python3.13", "python3.14"):
        says = pythons.get(name)
        venv = f'echo {name} >made; {pip} chmod +x "$3/bin/python"'
        make = f"case $1 in -c) echo {says} ;; -m) {venv} ;; *) echo Python ;; esac"
        program(bin, name, "exit 1" if says is None else make)
    environ = {"PATH": f"{bin}:{os.environ['PATH']}", "HOME": str(root)}
    done = subprocess.run(
        [root / "scripts" / "setup"], env=environ, cwd=root, capture_output=True, text=True, timeout=60, check=False
    )
    calls = (root / "pip").read_text() if (root / "pip").exists() else ""
    assert (done.returncode == 0) == bool(calls), done.stderr
    return done.stderr, calls


@pytest.mark.parametrize(
    ("says", "macos", "arm", "told"),
    [
        ("3 13 x86_64", "26.1", True, "Rosetta"),
        ("3 13 x86_64", "14.0", False, "this is an Intel Mac"),
        ("3 13 arm64", "13.7.1", True, "MLX needs macOS 14 or newer, and this is macOS 13.7.1"),
        ("3 15 arm64", "15.0", True, "Python 3.15 yet"),
        ("3 15 x86_64", "", True, "Python 3.15 yet"),
        ("3 10 x86_64", "", True, WANTED),
        ("", "", True, WANTED),
    ],
)
def test_what_cannot_run_is_told_in_words(says: str, macos: str, arm: bool, told: str, tmp_path: Path) -> None:
    said, calls = set_up(tmp_path, macos=macos, arm=arm, pythons={"python3": says} if says else {})
    assert told in said
    assert calls == ""


@pytest.mark.parametrize(
    ("pythons", "taken"),
    [
        ({"python3": "3 15 arm64", "python3.14": "3 14 arm64"}, "python3.14"),
        ({"python3.13": "3 13 x86_64", "python3.12": "3 12 arm64"}, "python3.12"),
        ({"python3": "3 14 arm64"}, "python3"),
    ],
)
def test_a_python_that_mlx_can_use_is_found(pythons: dict[str, str], taken: str, tmp_path: Path) -> None:
    said, _ = set_up(tmp_path, macos="26.0", pythons=pythons)
    assert "Setting up .venv" in said
    assert (tmp_path / "made").read_text() == f"{taken}\n"


def test_pip_is_told_the_systems_own_version_on_a_mac_only(tmp_path: Path) -> None:
    for name, macos in (("mac", "26.0"), ("linux", "")):
        (tmp_path / name).mkdir()
        _, calls = set_up(tmp_path / name, macos=macos, pythons={"python3": "3 13 arm64"})
        installs = [line for line in calls.splitlines() if "-m pip install --disable" in line]
        assert len(installs) == 2
        assert all(line.startswith("0 .venv" if macos else " .venv") for line in installs)
