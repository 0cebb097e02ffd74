"""Starts `headrace` as a server on a free port."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from headrace.config_loading import environment_for
from headrace.errors import HeadraceError

_PATIENCE_S = 900


@contextlib.contextmanager
def serving(words: Sequence[str], variables: Mapping[str, str] = MappingProxyType({})) -> Iterator[str]:
    """Yields the URL of `headrace WORDS` once it serves. Raises HeadraceError with its log if it does not start."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    command = [sys.executable, "-m", "headrace", *words, "--port", str(port)]
    log = Path(tempfile.mkdtemp()) / "log"
    with log.open("wb") as out:
        environment = environment_for(variables)
        server = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
    try:
        until = time.monotonic() + _PATIENCE_S
        while b"is served at http" not in log.read_bytes():
            if server.poll() is not None or time.monotonic() > until:
                raise HeadraceError(log.read_text())
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()
