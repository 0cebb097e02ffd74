"""Runs a client in this terminal."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from headrace.clients.record import Client
from headrace.errors import ConfigError

_PASSED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_OF_THE_TERMINAL = (signal.SIGINT, signal.SIGQUIT)


def find_program(client: Client) -> str:
    """The path of its program. Raises ConfigError that says how to install it."""
    path = shutil.which(client.command)
    if path is None:
        raise ConfigError(f"{client.title} is not installed (no {client.command} in PATH): {client.install}")
    return path


def run_client(words: Sequence[str], environment: Mapping[str, str]) -> int:
    """Its exit code, or 128 plus the number of the signal that ended it. Raises ConfigError if it can't be started.

    It shares the terminal and the process group, so Ctrl-C reaches it directly.
    """
    with _started(words, environment) as process:
        status = _wait(process)
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def end_background(files: Sequence[str]) -> None:
    """Ends processes that the client has left behind. files: see Settings."""
    for file in files:
        with suppress(OSError, ValueError, LookupError, TypeError):
            os.kill(int(json.loads(Path(file).read_text())["pid"]), signal.SIGTERM)


@contextmanager
def _started(words: Sequence[str], environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A client, whose are all signals of this process from before its start, so that none leaves it running."""
    process: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        if process is None:
            early.append(number)
        elif number not in _OF_THE_TERMINAL or not _is_in_foreground():
            _send(process, number)

    before = {number: signal.signal(number, pass_on) for number in (*_PASSED_ON, *_OF_THE_TERMINAL)}
    try:
        try:
            process = subprocess.Popen(words, env=environment)
        except OSError as error:
            raise ConfigError(f"{words[0]} can't be started: {error.strerror or error}") from error
        for number in early:
            _send(process, number)
        yield process
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _send(process: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process.pid, number)


def _is_in_foreground() -> bool:
    """Whether keys like Ctrl-C send signals to this process group, and so to the client as well."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    finally:
        os.close(terminal)


def _wait(process: subprocess.Popen[bytes]) -> int:
    """The status with which it ended. A client that stops itself (Ctrl-Z) stops this process too."""
    while True:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            return status
        os.kill(os.getpid(), signal.SIGSTOP)
        os.kill(process.pid, signal.SIGCONT)
