"""uvicorn's HTTP/1.1, with limits on how long and how often clients may keep it waiting.

A request's body has its limit where it is read (`responses.read_body`): only the route knows its maximum size and the
format of its errors.
"""

from __future__ import annotations

import asyncio
import re
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

HEAD_S = 20.0
"""Seconds for a request's line and headers to arrive, from the connection's start or their first byte."""

MAX_HEAD_BYTES = 16 * 1024

MAX_WAITING = 512
"""Connections from one address that may wait for their client. Beyond that the longest waiting are closed."""
GRACE_S = 1.0
"""A connection that has waited less than this isn't closed: many clients may connect at once."""

LINGER_S = 2.0
"""Seconds in which a client may read an error before the connection closes. What it sends meanwhile is dropped."""


_ADDRESS = re.compile(rb"https?://(?P<host>[^/?#]*)(?P<rest>[^#]*)", re.IGNORECASE)


class WaitingConnections(ServerState):
    """uvicorn's server state, plus the connections that wait for their client, by address.

    These are open connections without a request or with an incomplete one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._by_address: dict[str, dict[Protocol, float]] = {}
        """With the time since when each waits, the longest first."""

    def track(self, connection: Protocol, *, waits: bool, restarts: bool = False) -> None:
        """Record whether a connection waits for its client. restarts: it now waits for something else."""
        mine = self._by_address.setdefault(connection.address, {})
        if not waits:
            mine.pop(connection, None)
            if not mine:
                del self._by_address[connection.address]
            return
        now = connection.loop.time()
        if restarts:
            mine.pop(connection, None)
        mine.setdefault(connection, now)
        while len(mine) > MAX_WAITING:
            longest, since = next(iter(mine.items()))
            if now - since < GRACE_S:
                break
            del mine[longest]
            longest.transport.close()


class FramingConnection(h11.Connection):
    """Frames the pieces of a chunked answer itself: with many streams h11's checks of each were a tenth of the work.

    has_long_head: the request was refused for the size of its line and headers.
    """

    _is_chunked = False
    has_long_head = False

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEAD_BYTES)

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """h11 checks the size only of what has not arrived whole. Raises RemoteProtocolError."""
        is_head = self.their_state is h11.IDLE
        try:
            event = super().next_event()
            if type(event) is h11.Request and _head_bytes(event) > MAX_HEAD_BYTES:
                status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
                raise h11.RemoteProtocolError("too many header fields", error_status_hint=status)
            return _in_origin_form(event) if type(event) is h11.Request else event
        except h11.RemoteProtocolError as error:
            self.has_long_head = is_head and error.error_status_hint == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            raise

    def send_with_data_passthrough(self, event: h11.Event) -> list[bytes] | None:
        if self._is_chunked and type(event) is h11.Data and self.our_state is h11.SEND_BODY:
            return [b"%x\r\n" % len(event.data), event.data, b"\r\n"] if event.data else []
        sent = super().send_with_data_passthrough(event)
        if type(event) is h11.Response:
            self._is_chunked = b"\r\ntransfer-encoding: chunked\r\n" in b"".join(sent or ()).lower()
        return sent


def _in_origin_form(request: h11.Request) -> h11.Request:
    """The request with only path and query as its target. Raises RemoteProtocolError for an address without a host.

    A whole address, as to a proxy, names the host instead of the header (RFC 9112, 3.2.2).
    """
    address = _ADDRESS.fullmatch(request.target)
    if address is None:
        return request
    if not address["host"]:
        raise h11.RemoteProtocolError("an address without a host")
    headers = [(name, value) for name, value in request.headers if name != b"host"]
    target = address["rest"] if address["rest"].startswith(b"/") else b"/" + address["rest"]
    return h11.Request(
        method=request.method,
        headers=[(b"host", address["host"]), *headers],
        target=target,
        http_version=request.http_version,
    )


def _head_bytes(request: h11.Request) -> int:
    return len(request.target) + sum(len(name) + len(value) + len(b": \r\n") for name, value in request.headers)


class Protocol(H11Protocol):
    """One connection."""

    server_state: WaitingConnections
    conn: FramingConnection

    def __init__(
        self,
        config: Config,
        server_state: WaitingConnections,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.conn = FramingConnection()
        self.address = ""
        self._is_ending = False
        self._is_in_body = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = self.client[0] if self.client is not None else ""
        self._track()

    def data_received(self, data: bytes) -> None:
        if not self._is_ending:
            super().data_received(data)
            self._track()

    def on_response_complete(self) -> None:
        """An answer has been sent; the next request may have arrived with the previous one."""
        super().on_response_complete()
        self._track()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._set_timer(None)
        self.server_state.track(self, waits=False)

    def _track(self) -> None:
        if self._is_ending or self.transport.is_closing():
            return
        waits_for_head = self.conn.their_state is h11.IDLE
        was_in_body, self._is_in_body = self._is_in_body, self.conn.their_state is h11.SEND_BODY
        # An upload may come on a connection that was idle for long.
        restarts = self._is_in_body and not was_in_body
        self.server_state.track(self, waits=waits_for_head or self._is_in_body, restarts=restarts)
        if not waits_for_head or self.timeout_keep_alive_task is not None:
            self._set_timer(None)
        elif self._timer is None:
            self._set_timer(HEAD_S)

    def _set_timer(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._on_slow_head)

    def _on_slow_head(self) -> None:
        if self.conn.trailing_data[0]:
            self._end(HTTPStatus.REQUEST_TIMEOUT, f"The request's headers did not arrive within {HEAD_S:g} s.")
        else:
            self.transport.close()

    def _should_upgrade(self) -> bool:
        """Every request is answered as HTTP/1.1. uvicorn would advise to install a package for WebSockets."""
        return False

    def send_400_response(self, msg: str) -> None:
        if self.conn.has_long_head:
            message = f"The request's line and headers are longer than {MAX_HEAD_BYTES} bytes."
            self._end(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, message)
        else:
            self._end(HTTPStatus.BAD_REQUEST, msg)

    def _end(self, status: HTTPStatus, message: str) -> None:
        """End with an error, unless an answer has begun: only a broken connection can end that."""
        self._is_ending = True
        self._set_timer(None)
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        body = message.encode()
        headers = [
            (b"content-type", b"text/plain; charset=utf-8"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
        ]
        head = h11.Response(status_code=status, headers=headers, reason=status.phrase.encode())
        for event in (head, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        # Closing a connection while the client still sends would lose the error.
        self.transport.write_eof()
        self.flow.resume_reading()
        self.loop.call_later(LINGER_S, self.transport.close)
