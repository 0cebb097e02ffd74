"""Times of a newcomer's first minutes, from a checkout that was never set up.

    python tests/first_minutes/measure.py CHECKOUT [CHECKOUT…] [--runs N]

Removes the checkout's .venv, then runs `scripts/serve` in a terminal with an empty home and without pip's cache, asks
one question, starts a second time, and asks for help. Writes a JSON object for each run: seconds, and MiB of the
environment without bytecode. Checkouts are measured in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import httpx
import pexpect

PATIENCE_S = 900
BODY = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "stream": True}
REPEATS = 5
"""Of commands that take less than a second; their median counts."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkouts", nargs="+", type=lambda text: Path(text).resolve())
    parser.add_argument("--runs", type=int, default=1)
    given = parser.parse_args()
    for _ in range(given.runs):
        for checkout in given.checkouts:
            found = measure(checkout)
            rounded = {name: round(value, 2) for name, value in found.items()}
            sys.stdout.write(f"{checkout.name} {json.dumps({**rounded, 'load': os.getloadavg()[0]})}\n")
            sys.stdout.flush()


def measure(checkout: Path) -> dict[str, float]:
    shutil.rmtree(checkout / ".venv", ignore_errors=True)
    with tempfile.TemporaryDirectory() as home:
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("HEADRACE_", "PYTHON"))}
        environ |= {"HOME": home, "TMPDIR": home, "PIP_NO_CACHE_DIR": "1", "TERM": "xterm"}
        found = _first_start(checkout, environ)
        began = time.monotonic()
        server = _serve(checkout, environ)
        _address(server)
        found["second start"] = time.monotonic() - began
        _stop(server)
        for words in (["--help"], ["serve", "--help"], ["serve", "--prot", "1"]):
            found[" ".join(words)] = _command_s(checkout, words, environ)
    files = [file for file in (checkout / ".venv").rglob("*") if file.is_file() and not file.is_symlink()]
    found["MiB"] = sum(file.stat().st_size for file in files if "__pycache__" not in file.parts) / 2**20
    return found


def _first_start(checkout: Path, environ: Mapping[str, str]) -> dict[str, float]:
    """Seconds since the command was typed."""
    began = time.monotonic()
    found: dict[str, float] = {}

    def note(name: str) -> None:
        found.setdefault(name, time.monotonic() - began)

    server = _serve(checkout, environ)
    server.expect(r"\S")
    note("first character")
    server.expect("(?i)loading")
    note("installed")
    url = _address(server)
    note("served")
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=BODY, timeout=PATIENCE_S) as response:
        for line in response.iter_lines():
            if '"content": "' in line or '"content":"' in line:
                note("first text")
    note("whole answer")
    _stop(server)
    return found


def _serve(checkout: Path, environ: Mapping[str, str]) -> pexpect.spawn[str]:
    return pexpect.spawn(
        str(checkout / "scripts" / "serve"),
        ["--port", "0"],
        cwd=str(checkout),
        env=dict(environ),
        encoding="utf-8",
        timeout=PATIENCE_S,
        dimensions=(24, 120),
    )


def _address(server: pexpect.spawn[str]) -> str:
    server.expect(r"(http://127[^\s/]+)/v1")
    assert server.match is not None
    return str(server.match[1])


def _stop(server: pexpect.spawn[str]) -> None:
    server.sendintr()
    server.expect(pexpect.EOF)
    server.close()


def _command_s(checkout: Path, words: list[str], environ: Mapping[str, str]) -> float:
    times = []
    for _ in range(REPEATS):
        began = time.monotonic()
        command = [str(checkout / ".venv" / "bin" / "headrace"), *words]
        subprocess.run(command, env=dict(environ), capture_output=True, timeout=PATIENCE_S, check=False)
        times.append(time.monotonic() - began)
    return statistics.median(times)


if __name__ == "__main__":
    main()
