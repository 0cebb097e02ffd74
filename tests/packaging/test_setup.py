"""`scripts/setup` in a terminal, with a stand-in for pip that prints what pip 23.2 and pip 26.3 have printed."""

from __future__ import annotations

import re
import shutil
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
