"""What scripts/measures.py counts."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent


@cache
def said() -> list[str]:
    words = [sys.executable, ROOT / "scripts" / "measures.py"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()


def test_every_measure_that_is_printed_has_an_aim_in_the_docs() -> None:
    table = (ROOT / "docs" / "structure.md").read_text().partition("## Measures")[2]
    told = [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines() if line.startswith("| ")]
    assert [line[:36].strip() for line in said()] == told[1:]


def test_there_are_as_many_rooms_as_folders_with_modules() -> None:
    rooms = {path.parent for path in (ROOT / "src" / "headrace").glob("*/*.py")}
    (line,) = (line for line in said() if line.startswith("rooms"))
    assert int(line.split()[-1]) == len(rooms)
