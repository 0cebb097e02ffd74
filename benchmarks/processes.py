"""Starts a benchmark's ranks as processes of this machine, and reads what they print."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from headrace.backend.device import device_kind
from headrace.config_loading import environment_for, gpu_variables
from headrace.errors import HeadraceError
from headrace.ranks.layout import Layout

OnLine = Callable[[int, dict[str, Any]], None]
"""Takes a rank, and an object that it has printed."""

AS_RANK = "--as-rank"
"""The argument of a process that `run_ranks` starts."""

_POLL_S = 0.1


def backend_here() -> str:
    return "nccl" if device_kind() == "cuda" else "ring"


def run_ranks(module: str, given: Mapping[str, Any], layout: Layout | None, limit_s: float, on_line: OnLine) -> None:
    """Run `python -m module` as every rank, on a GPU each. layout: None for one process without others.

    given: what `read_given` returns there. Raises HeadraceError if one has failed, or has not ended after `limit_s`.
    """
    size = 1 if layout is None else layout.size
    with tempfile.TemporaryDirectory() as folder:
        connections = Path(folder) / "connections.json"
        if layout is not None:
            connections.write_text(json.dumps(layout.connections), encoding="utf-8")
        line = json.dumps({**given, "backend": None if layout is None else layout.backend}) + "\n"
        processes = []
        for rank in range(size):
            variables = {} if layout is None else layout.variables(rank, connections)
            processes.append(_start(module, line, {**variables, **gpu_variables(rank)}))
        readers = [
            threading.Thread(target=_read, args=(process, lambda found, rank=rank: on_line(rank, found)))
            for rank, process in enumerate(processes)
        ]
        for reader in readers:
            reader.start()
        try:
            _wait(processes, limit_s)
        finally:
            for process in processes:
                process.kill()
                process.wait()
            for reader in readers:
                reader.join()


def _start(module: str, line: str, variables: Mapping[str, str]) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", module, AS_RANK],
        env=environment_for(variables),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    with process.stdin as stdin:
        stdin.write(line)
    return process


def _read(process: subprocess.Popen[str], take: Callable[[dict[str, Any]], None]) -> None:
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            if line.startswith("{"):  # not what libraries print
                take(json.loads(line))


def _wait(processes: Sequence[subprocess.Popen[str]], limit_s: float) -> None:
    until = time.monotonic() + limit_s
    while any(codes := [process.poll() for process in processes]) or None in codes:
        for rank, code in enumerate(codes):
            if code:
                raise HeadraceError(f"rank {rank} of {len(processes)} has ended with {code}")
        if time.monotonic() > until:
            raise HeadraceError(f"{len(processes)} ranks have not ended after {limit_s:g} s")
        time.sleep(_POLL_S)


def read_given() -> tuple[dict[str, Any], mx.distributed.Group | None]:
    """In a rank: what it was given, and the group; None for a process without others."""
    given: dict[str, Any] = json.loads(sys.stdin.readline())
    backend = given.pop("backend")
    return given, None if backend is None else mx.distributed.init(strict=True, backend=backend)


def say(**what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()
