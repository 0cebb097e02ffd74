"""Pickled messages over a socket between processes of this package. Arrays and buffers are sent without a copy."""

from __future__ import annotations

import copyreg
import io
import logging
import pickle
import queue
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

logger = logging.getLogger(__name__)

_HEAD = struct.Struct("<QQ")
"""Bytes of the pickle, and the number of buffers after it, each preceded by its length."""

_LENGTH = struct.Struct("<Q")

Read = Callable[[int], bytearray]
"""Reads exactly that many bytes. Raises EOFError at the end of the connection."""


class Message:
    """A pickled value, ready to be sent."""

    def __init__(self, value: object) -> None:
        """Raises what pickling raises."""
        buffers: list[pickle.PickleBuffer] = []
        packed = io.BytesIO()
        _Pickler(packed, protocol=5, buffer_callback=buffers.append).dump(value)
        self._data = _HEAD.pack(packed.getbuffer().nbytes, len(buffers)) + packed.getbuffer()
        self._buffers = [buffer.raw() for buffer in buffers]

    def send(self, connection: socket.socket) -> None:
        connection.sendall(self._data)
        for buffer in self._buffers:
            connection.sendall(_LENGTH.pack(buffer.nbytes))
            connection.sendall(buffer)


def send(connection: socket.socket, value: object) -> None:
    Message(value).send(connection)


def receive(read: Read) -> Any:
    """The next value. Raises EOFError at the end of the connection."""
    length, num_buffers = _HEAD.unpack(read(_HEAD.size))
    data = read(length)
    buffers = [read(_LENGTH.unpack(read(_LENGTH.size))[0]) for _ in range(num_buffers)]
    return pickle.loads(data, buffers=buffers)


def reader(connection: socket.socket) -> Read:
    """Reads straight from the socket, whose timeout holds for each part of a message."""

    def read(num_bytes: int) -> bytearray:
        data = bytearray(num_bytes)
        rest = memoryview(data)
        while rest:
            num_read = connection.recv_into(rest)
            if not num_read:
                raise EOFError
            rest = rest[num_read:]
        return data

    return read


class OneWayCalls:
    """Method calls from one process to another, in both directions, without results.

    `call("answer", 7)` here is `on_answer(7)` of the peer's target. A thread pickles and sends the calls, so that
    callers wait neither for that nor for the peer.
    """

    def __init__(self, connection: socket.socket, target: object) -> None:
        self._connection = connection
        self._target = target
        self._waiting: queue.SimpleQueue[tuple[str, tuple[object, ...]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._send, name="headrace-calls", daemon=True).start()

    def call(self, method: str, *args: object) -> None:
        """Has no effect once the peer has disconnected; `serve` returns then."""
        self._waiting.put((method, args))

    def _send(self) -> None:
        while (call := self._waiting.get()) is not None:
            try:
                message = Message(call)
            except Exception:  # whatever a value's pickling raises; the peer would wait for ever
                logger.exception("a call to another process can't be sent")
                self.close()
                return
            try:
                message.send(self._connection)
            except OSError:
                return

    def serve(self) -> None:
        """Run the peer's calls, one after another, until it disconnects."""
        read = reader(self._connection)
        while True:
            try:
                method, args = receive(read)
            except (EOFError, OSError):
                return
            getattr(self._target, f"on_{method}")(*args)

    def close(self) -> None:
        self._waiting.put(None)
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def _reduced(view: memoryview) -> tuple[Any, ...]:
    return _viewed, (pickle.PickleBuffer(view), view.format, view.shape)


def _viewed(data: bytearray, kind: str, shape: tuple[int, ...]) -> memoryview:
    return memoryview(data).cast("B").cast(kind, shape)  # type: ignore[call-overload, no-any-return]


class _Pickler(pickle.Pickler):
    dispatch_table = {**copyreg.dispatch_table, memoryview: _reduced}
