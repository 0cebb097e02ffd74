"""Starts the other ranks, here or by ssh, and waits until they have come."""

from __future__ import annotations

import json
import logging
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from headrace.errors import ConfigError
from headrace.ranks.channel import Address, Meeting, Ranks, join
from headrace.ranks.layout import Layout, RankHost

logger = logging.getLogger(__name__)

RANK_MODULE = "headrace.cli.rank"

START_S = 120.0
"""Time for the others to come: they import MLX first, maybe from a slow disk."""

END_S = 3.0

_POLL_S = 0.1

_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
"""A host that doesn't answer, or wants a password, is an error within seconds."""


@dataclass(frozen=True, slots=True)
class Invitation:
    """What a new rank reads from its standard input, as one line of JSON: nothing of it is seen in a list of
    processes."""

    rank: int
    address: Address
    layout: Layout

    def line(self) -> str:
        return json.dumps(asdict(self)) + "\n"

    def accept(self) -> Ranks:
        """Raises OSError, and AuthenticationError."""
        return join(self.address, self.rank, self.layout)


def read_invitation(line: str) -> Invitation:
    found: dict[str, Any] = json.loads(line)
    layout = found["layout"]
    hosts = tuple(RankHost(host["ip"], host["ssh"], tuple(host["rdma"])) for host in layout["hosts"])
    return Invitation(
        found["rank"], Address(**found["address"]), Layout(layout["backend"], hosts, tuple(layout["ports"]))
    )


def start_ranks(layout: Layout) -> Ranks:
    """This process as rank 0, with the others started. Raises ConfigError if one can't be started, or doesn't come."""
    return _Team(layout).start()


class _Team:
    """The processes of the other ranks."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> Ranks:
        try:
            meeting = Meeting(self._layout)
        except OSError as error:
            raise ConfigError(f"--ranks: can't listen for the other ranks: {error.strerror or error}") from error
        try:
            for rank in range(1, self._layout.size):
                self._invite(Invitation(rank, meeting.address, self._layout))
            ranks = self._gather(meeting)
            ranks.end_processes = self.end
            return ranks
        except BaseException:
            self.end()
            raise
        finally:
            meeting.close()

    def _invite(self, invitation: Invitation) -> None:
        words = [sys.executable, "-P", "-m", RANK_MODULE]  # not modules of the working directory
        ssh = self._layout.hosts[invitation.rank].ssh
        command = words if ssh is None else [*_SSH, ssh, shlex.join(words)]
        try:
            # a separate process session: the terminal's Ctrl-C goes to rank 0 only
            process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        except OSError as error:
            raise ConfigError(f"--ranks: {command[0]} can't be started: {error.strerror}") from error
        self._processes.append(process)
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin as stdin:  # one that has ended is reported while waiting
            stdin.write(invitation.line().encode())

    def _gather(self, meeting: Meeting) -> Ranks:
        found: list[Ranks] = []
        failed: list[OSError] = []

        def gather() -> None:
            try:
                found.append(meeting.gather())
            except (OSError, EOFError) as error:
                failed.append(OSError(str(error)))

        waiting = threading.Thread(target=gather, name="headrace-ranks", daemon=True)
        waiting.start()
        until = time.monotonic() + START_S
        while waiting.is_alive():
            waiting.join(_POLL_S)
            for rank, process in enumerate(self._processes, start=1):
                if (code := process.poll()) is not None:
                    ssh = self._layout.hosts[rank].ssh
                    where = "" if ssh is None else f" on {ssh}"
                    raise ConfigError(f"--ranks: rank {rank}{where} has ended with {code} before it came")
            if time.monotonic() > until:
                raise ConfigError(f"--ranks: not all ranks have come within {START_S:g} s")
        if not found:
            raise ConfigError(f"--ranks: the ranks could not be gathered: {failed[0]}")
        return found[0]

    def end(self) -> None:
        """Kill those that don't end on their own."""
        _end(self._processes)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    until = time.monotonic() + END_S
    for process in processes:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
