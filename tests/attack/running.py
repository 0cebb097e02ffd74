"""A `headrace serve` process with the miniature, as its operator would run it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

START_S = 120
END_S = 20
"""How long a start and an end may take before they count as hanging."""

KEY = "only-the-operator-knows-this"

_SERVED_AT = " is served at "
_SOURCE = Path(__file__).parents[2] / "src"


class RunningServer:
    """One server process. url: without `/v1`. key: what it was started with."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path, key: str | None) -> None:
        self.process = process
        self.url = url
        self.log = log
        self.key = key
        host, port = url.removeprefix("http://").split(":")
        self.address = (host, int(port))

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    @property
    def resident_bytes(self) -> int:
        """Of the server itself. Its helper processes start when they are needed, with a separate limit."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def stop(self) -> int:
        """Sends SIGTERM and gives the exit code. Raises TimeoutExpired for a process that does not end."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(END_S)


@contextmanager
def running_server(folder: Path, *flags: str, key: str | None = None) -> Iterator[RunningServer]:
    """A server with these flags that is killed at the end if it still runs. folder: for what it prints and logs."""
    out, log = folder / "out.txt", folder / "log.txt"
    words = [sys.executable, "-m", "headrace", "serve", "miniature", "--port", "0", "--no-self-check", *flags]
    if key is not None:
        words += ["--api-key", key]
    environ = {**os.environ, "PYTHONPATH": str(_SOURCE), "PYTHONUNBUFFERED": "1", "OPENBLAS_NUM_THREADS": "1"}
    with (
        out.open("wb") as told,
        log.open("wb") as logged,
        subprocess.Popen(words, stdout=told, stderr=logged, env=environ) as process,
    ):
        try:
            yield RunningServer(process, _address(process, out, log), log, key)
        finally:
            if process.poll() is None:
                process.kill()


def _address(process: subprocess.Popen[bytes], out: Path, log: Path) -> str:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        for line in out.read_text().splitlines():
            if _SERVED_AT in line:
                return line.rpartition(_SERVED_AT)[2].strip().removesuffix("/v1")
        if process.poll() is not None:
            break
        time.sleep(0.05)
    raise AssertionError(f"the server did not start: {log.read_text()[-2000:]}")
