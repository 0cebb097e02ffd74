"""Messages between the ranks of a model, and word of one that has ended.

Beside MLX's own connections, which carry arrays: a message must not wait for the device.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeVar, cast

from headrace.errors import EngineDead
from headrace.ranks.layout import FIRST_PORT, LOCAL, Layout

Value = TypeVar("Value")

PULSE_S = 1.0
_LEAVING = "leaving"


@dataclass(frozen=True, slots=True)
class _Failed:
    reason: str


SILENCE_S = 10.0
"""A rank that sends no pulse for so long counts as ended: its machine or its connection may be gone. Much longer than
threads of a busy process wait for its GIL or for one of a machine's few cores."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where rank 0 listens, and the key that others need to be heard."""

    host: str
    port: int
    key: str


@dataclass(slots=True)
class Traffic:
    """Messages from rank 0 to each other rank since the start, their bytes, and the time that sending to all took."""

    num_messages: int = 0
    num_bytes: int = 0
    seconds: float = 0.0


class Peer:
    """Another rank, with a connection for messages and one on which each sends its pulse: what it reports.

    report: makes what this rank reports, in another thread. reported: what the other one has reported last.
    """

    def __init__(self, rank: int, messages: Connection, pulse: Connection) -> None:
        self.rank = rank
        self.messages = messages
        self.has_left = False
        self.failure: str | None = None
        """Why it has failed, as it said itself."""
        self.report: Callable[[], Any] = lambda: None
        self.reported: Any = None
        self._pulse = pulse
        self._ended: list[str] = []
        """Why it has ended, if it has."""
        self._when_ended: Callable[[str], None] = self._ended.append
        self._watching = threading.Thread(target=self._watch, name=f"headrace-rank-{rank}", daemon=True)
        self._watching.start()

    def watch(self, ended: Callable[[str], None]) -> None:
        """Call `ended` with a sentence once the rank has ended without leaving; it may have already."""
        self._when_ended = ended
        for reason in self._ended:
            ended(reason)

    def end(self) -> EngineDead:
        """The error for a rank whose connection has ended; it may be about to say why."""
        self._watching.join(PULSE_S)
        return EngineDead(self.failure or f"rank {self.rank} has ended")

    def _watch(self) -> None:
        heard_at = time.monotonic()
        reason = f"nothing was heard of rank {self.rank} for {SILENCE_S:g} seconds"
        try:
            while time.monotonic() - heard_at < SILENCE_S:
                self._pulse.send(self.report())
                until = time.monotonic() + PULSE_S
                while (left_s := until - time.monotonic()) > 0 and self._pulse.poll(left_s):
                    if (heard := self._pulse.recv()) == _LEAVING:
                        self.has_left = True
                        return
                    if isinstance(heard, _Failed):
                        self.failure = heard.reason
                        self._when_ended(heard.reason)
                        return
                    self.reported, heard_at = heard, time.monotonic()
        except (OSError, EOFError):
            reason = f"rank {self.rank} has ended"
        if not self.has_left:
            self._when_ended(reason)

    def leave(self) -> None:
        """This rank ends, which is no failure."""
        with suppress(OSError):
            self._pulse.send(_LEAVING)
        self.close()

    def fail(self, reason: str) -> None:
        """This rank ends for a reason, which the other one reports."""
        with suppress(OSError):
            self._pulse.send(_Failed(reason))
        self.close()

    def close(self) -> None:
        self.has_left = True
        self.messages.close()
        self._pulse.close()


@dataclass(eq=False)
class Ranks:
    """This process among the ranks of its model.

    peers: of rank 0 all others in order, of any other rank 0 alone. end_processes: waits for those of the others.
    Ranks take the same steps in the same order, so that calls of `all` and `first` meet. They raise EngineDead if a
    rank has ended.
    """

    rank: int
    layout: Layout
    peers: Sequence[Peer]
    traffic: Traffic = field(default_factory=Traffic)
    end_processes: Callable[[], None] = lambda: None

    @property
    def size(self) -> int:
        return self.layout.size

    def all(self, value: Value) -> list[Value]:
        """Every rank's value, by rank."""
        if self.rank:
            self._send(self.peers[0], _pickled(value))
            return cast("list[Value]", self._receive(self.peers[0]))
        values = [value, *(self._receive(peer) for peer in self.peers)]
        self.tell(values)
        return values

    def first(self, value: Value) -> Value:
        """Rank 0's value."""
        if self.rank:
            return cast(Value, self._receive(self.peers[0]))
        self.tell(value)
        return value

    def clock(self) -> float:
        """Rank 0's monotonic seconds, for loops that all ranks must leave together."""
        return self.first(time.monotonic())

    def tell(self, message: Any) -> None:
        """From rank 0 to all others, which `hear` it."""
        started = time.monotonic()
        packed = _pickled(message)
        for peer in self.peers:
            self._send(peer, packed)
        self.traffic.num_messages += 1
        self.traffic.num_bytes += len(packed)
        self.traffic.seconds += time.monotonic() - started

    def report(self, make: Callable[[], Any]) -> None:
        """What the others find in `reports` of this rank from now on, made once a second in another thread."""
        for peer in self.peers:
            peer.report = make

    @property
    def reports(self) -> list[Any]:
        """The latest of each other rank; None of one that has not reported yet."""
        return [peer.reported for peer in self.peers]

    def hear(self) -> Any:
        """Rank 0's next message; None once it has left."""
        return self._receive(self.peers[0])

    def watch(self, ended: Callable[[str], None]) -> None:
        """Call `ended` with a sentence, in another thread, for a rank that ends without leaving."""
        for peer in self.peers:
            peer.watch(ended)

    @property
    def has_ended_well(self) -> bool:
        """Whether rank 0 has left, as another rank sees it."""
        return self.peers[0].has_left

    def leave(self) -> None:
        """The others are told, so that this end is no failure to them."""
        if not self.rank:
            self.tell(None)
        for peer in self.peers:
            peer.leave()
        self.end_processes()

    def fail(self, reason: str) -> None:
        """The others are told why this rank can't go on."""
        for peer in self.peers:
            peer.fail(f"rank {self.rank}: {reason}")
        self.end_processes()

    def close(self) -> None:
        for peer in self.peers:
            peer.close()
        self.end_processes()

    def _send(self, peer: Peer, packed: bytes) -> None:
        try:
            peer.messages.send_bytes(packed)
        except OSError as error:
            raise peer.end() from error

    def _receive(self, peer: Peer) -> Any:
        try:
            message = peer.messages.recv()
            peer.has_left |= message is None
            return message
        except (OSError, EOFError) as error:
            raise peer.end() from error


class Meeting:
    """Where rank 0 waits for the others."""

    def __init__(self, layout: Layout) -> None:
        """Raises OSError if its address is taken."""
        self._layout = layout
        self._is_closed = False
        key = secrets.token_hex(16)
        host, port = (LOCAL, 0) if layout.is_local else (layout.hosts[0].ip, FIRST_PORT - 1)
        self._listener = Listener((host, port), backlog=2 * layout.size, authkey=key.encode())
        self.address = Address(host, self._listener.address[1], key)

    def gather(self) -> Ranks:
        """Wait until all ranks have come. Close the meeting from another thread to end the wait with an OSError."""
        found: dict[tuple[int, str], Connection] = {}
        while len(found) < 2 * (self._layout.size - 1):
            try:
                connection = self._listener.accept()
            except (AuthenticationError, EOFError, OSError):
                if self._is_closed:
                    raise
                continue  # not one of our ranks
            found[connection.recv()] = connection
        peers = [Peer(rank, found[rank, "messages"], found[rank, "pulse"]) for rank in range(1, self._layout.size)]
        return Ranks(0, self._layout, peers)

    def close(self) -> None:
        self._is_closed = True
        self._listener.close()


def join(address: Address, rank: int, layout: Layout) -> Ranks:
    """Raises OSError, and AuthenticationError for a wrong key."""
    connections = []
    for kind in ("messages", "pulse"):
        connection = Client((address.host, address.port), authkey=address.key.encode())
        connection.send((rank, kind))
        connections.append(connection)
    return Ranks(rank, layout, [Peer(0, *connections)])


def _pickled(message: Any) -> bytes:
    return bytes(ForkingPickler.dumps(message))
