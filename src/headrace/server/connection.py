"""Work tied to the client's connection, and event streams with keep-alives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.errors import HeadraceError
from headrace.server.responses import closing_error

Result = TypeVar("Result")


CLIENT_CLOSED_REQUEST = 499
"""The logged status of an answer whose client disconnected, as web servers use it."""


class ClientGone(Exception):
    """The client disconnected before the answer."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`; if the client disconnects first, cancel the work and raise ClientGone.

    Nothing is written during a long prompt, so only reading detects a disconnect. The request's body must have been
    read before.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        # Cancelled work closes its generators, which aborts the request in the engine: wait for that.
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Closable(Protocol):
    def aclose(self) -> Awaitable[object]: ...


class EventStream(Response):
    """A stream of server-sent events with keep-alives, which ends as soon as the client disconnects.

    pieces: the bytes to send.
    source: what the pieces are made from; always closed with the stream, even if the client disconnects before the
    first piece.
    ping: makes the keep-alive that is sent after `ping_interval_s` seconds without output.
    on_disconnect: called when the client disconnects before the end.
    failure: makes the event for an error that ends the stream, a shutdown among them.
    sends_head_first: send the headers at once; otherwise with the first bytes, and an error before them is raised.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        pieces: AsyncGenerator[bytes, None],
        source: Closable,
        *,
        headers: dict[str, str],
        ping: Callable[[], bytes],
        ping_interval_s: float,
        on_disconnect: Callable[[], None],
        failure: Callable[[HeadraceError], bytes],
        sends_head_first: bool = True,
    ) -> None:
        self._pieces = pieces
        self._source = source
        self._ping = ping
        self._ping_interval_s = ping_interval_s
        self._on_disconnect = on_disconnect
        self._failure = failure
        self._sends_head_first = sends_head_first
        self._has_begun = False
        self._last_sent = 0.0
        # Buffering proxies would turn a stream into one late answer.
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._write(send))
        except ClientGone:
            self._on_disconnect()
        except asyncio.CancelledError:
            if not self._has_begun:
                raise
            await self._end(send, self._failure(closing_error()))
        finally:
            await self._pieces.aclose()
            await self._source.aclose()

    async def _write(self, send: Send) -> None:
        if self._sends_head_first:
            await self._begin(send)
        # One task for the stream, not a timer per piece: with many streams a timer for every token would be a good part
        # of the server's work. A message is written whole, so the two can't mix.
        pinging = asyncio.ensure_future(self._send_pings(send))
        try:
            async for piece in self._pieces:
                await self._send(send, piece)
            last = b""
        except HeadraceError as error:
            if not self._has_begun:
                raise
            last = self._failure(error)
        finally:
            pinging.cancel()
            await asyncio.gather(pinging, return_exceptions=True)
        await self._end(send, last)

    async def _begin(self, send: Send) -> None:
        self._has_begun = True
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})

    async def _end(self, send: Send, piece: bytes) -> None:
        if not self._has_begun:
            await self._begin(send)
        await send({"type": "http.response.body", "body": piece, "more_body": False})

    async def _send(self, send: Send, piece: bytes) -> None:
        if not self._has_begun:
            await self._begin(send)
        self._last_sent = asyncio.get_running_loop().time()
        await send({"type": "http.response.body", "body": piece, "more_body": True})

    async def _send_pings(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        self._last_sent = loop.time()
        while True:
            pause_s = self._last_sent + self._ping_interval_s - loop.time()
            if pause_s > 0:
                await asyncio.sleep(pause_s)
            else:
                await self._send(send, self._ping())
