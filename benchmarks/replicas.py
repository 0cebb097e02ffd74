"""Measures two replicas beside one: `python -m benchmarks.replicas [MODEL] [options of headrace bench]`.

Starts `headrace ray serve` with one replica and with two, each replica with one thread for its BLAS, and has `headrace
bench` measure both in turn. Needs a core for each replica, and some for Ray's proxy and for the client.

A replica computes few rows at once, and there are more streams than the rows of both. So each step has all its rows
with one replica as with two, wherever the router sends a stream; half-filled steps would cost more for each token.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from headrace.config_loading import environment_for

_PATIENCE_S = 900

_ROWS = 4
# Prompts keep replicas busier than Ray's proxy.
_WORKLOAD = f"--workload long-prompt --streams {4 * _ROWS} --requests {12 * _ROWS} --repeats 2".split()
_WORKLOAD += "--prompt-tokens 400 --max-tokens 24".split()


@contextlib.contextmanager
def serving(model: str, num_replicas: int) -> Iterator[str]:
    """Yields the URL of a server with so many replicas. Raises RuntimeError with its log if it does not start."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    words = ["-m", "headrace", "ray", "serve", model, "--replicas", str(num_replicas), "--port", str(port)]
    words += ["--max-num-seqs", str(_ROWS)]
    log = Path(tempfile.mkdtemp()) / "log"
    with log.open("wb") as out:
        environment = environment_for({"OPENBLAS_NUM_THREADS": "1"})
        server = subprocess.Popen([sys.executable, *words], stdout=out, stderr=subprocess.STDOUT, env=environment)
    try:
        until = time.monotonic() + _PATIENCE_S
        while b"is served at http" not in log.read_bytes():
            if server.poll() is not None or time.monotonic() > until:
                raise RuntimeError(log.read_text())
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure two replicas beside one.")
    parser.add_argument("model", nargs="?", default="miniature", metavar="MODEL")
    given, options = parser.parse_known_args()
    with serving(given.model, 1) as one, serving(given.model, 2) as two:
        words = ["bench", one, "--label", "one", "--peer", f"two={two}", *(options or _WORKLOAD)]
        return subprocess.run([sys.executable, "-m", "headrace", *words], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
