"""`headrace launch` as a process, with a small program instead of a client."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PATIENCE_S = 60
ROOT = Path(__file__).parents[2]

NOTING = """#!{python}
import json, os, sys
settings = json.load(open(sys.argv[2]))
print(json.dumps({{"words": sys.argv[1:], "settings": settings, "environ": dict(os.environ)}}))
sys.exit(7)
"""

SLEEPING = """#!/bin/sh
trap 'echo interrupted' INT
trap 'echo terminated; exit 5' TERM
echo "client $$"
while :; do sleep 0.1; done
"""


class Launcher:
    """Runs `headrace launch` with its temporary files in `temporary`."""

    def __init__(self, folder: Path) -> None:
        self.programs = folder / "bin"
        self.temporary = folder / "tmp"
        self.home = folder / "home"
        for each in (self.programs, self.temporary, self.home):
            each.mkdir()
        own = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
        self.environ = {
            **own,
            "HOME": str(self.home),
            "TMPDIR": str(self.temporary),
            "PATH": f"{self.programs}:{own['PATH']}",
            "PYTHONPATH": str(ROOT / "src"),
        }

    def install(self, text: str, name: str = "claude") -> None:
        program = self.programs / name
        program.write_text(text.format(python=sys.executable) if text is NOTING else text)
        program.chmod(0o755)

    def words(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "headrace", "launch", *words]

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.words(*words),
            env=self.environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.words(*words), env=self.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def leftovers(self) -> list[Path]:
        return [path for path in self.temporary.iterdir() if path.name.startswith("headrace-launch-")]
