"""How quickly a server answers /health while something else is asked of it.

`python health.py HOST PORT` probes until its standard input ends and then prints a line for each probe: the moment it
was sent (of the monotonic clock, which all processes share) and the seconds until its answer. It is a process so
that the sender of the attack does not delay it.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

INTERVAL_S = 0.02
LOST_S = 60.0
"""What counts as the latency of a probe that is not answered at all."""


@dataclass(frozen=True)
class Probe:
    """One request to /health. sent: monotonic seconds."""

    sent: float
    latency_s: float


@dataclass
class HealthRecord:
    """Probes of a while; they are there once the `with` block of `probed` has ended."""

    probes: list[Probe] = field(default_factory=list)

    @property
    def worst_s(self) -> float:
        return max((probe.latency_s for probe in self.probes), default=0.0)

    def stalls(self, limit_s: float) -> list[Probe]:
        return [probe for probe in self.probes if probe.latency_s > limit_s]


@contextmanager
def probed(address: tuple[str, int]) -> Iterator[HealthRecord]:
    """Probes the server while the block runs."""
    record = HealthRecord()
    words = [sys.executable, __file__, address[0], str(address[1])]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it has begun
        try:
            yield record
        finally:
            told, _ = process.communicate()
            record.probes += [Probe(*map(float, line.split())) for line in told.splitlines()]


def _probe(address: tuple[str, int]) -> Iterator[Probe]:
    """Probes on one connection until that breaks."""
    request = f"GET /health HTTP/1.1\r\nHost: {address[0]}:{address[1]}\r\n\r\n".encode()
    sent = time.monotonic()
    try:
        with socket.create_connection(address, timeout=LOST_S) as connection:
            while True:
                sent = time.monotonic()
                connection.sendall(request)
                answer = connection.recv(65536)
                while b'"ok"}' not in answer:
                    if not (more := connection.recv(65536)):
                        raise OSError("closed")
                    answer += more
                yield Probe(sent, time.monotonic() - sent)
    except OSError:
        # A server that is gone answers quickly that it is: that is no sign of health.
        yield Probe(sent, LOST_S)


def _main(words: Sequence[str]) -> None:
    address = (words[0], int(words[1]))
    is_over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), is_over.set()), daemon=True).start()
    sys.stdout.write("begun\n")
    sys.stdout.flush()
    probes = []
    while not is_over.is_set():
        for probe in _probe(address):
            probes.append(probe)
            if is_over.wait(INTERVAL_S):
                break
    sys.stdout.write("".join(f"{probe.sent} {probe.latency_s}\n" for probe in probes))


if __name__ == "__main__":
    _main(sys.argv[1:])
