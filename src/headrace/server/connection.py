"""Work that lives as long as the client's connection, and event streams that show signs of life."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

Result = TypeVar("Result")


CLIENT_CLOSED_REQUEST = 499
"""The status of an answer that has no reader any more, as logs of web servers have it."""


class ClientGone(Exception):
    """The client closed its connection before the answer was there."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`; when the client goes away first, work is cancelled and ClientGone raised.

    Nothing is written during a long prompt, so only reading tells that the client is gone. The request's body must
    have been read before.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        # Cancelled work closes its generators, which is what aborts the request in the engine: wait for that.
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A stream of server-sent events: headers at once, signs of life, and an end as soon as the client goes away.

    pieces: the bytes to send. source: what the pieces are made from; closed with the stream in every case, also when
    the client goes before the first piece was made. ping: makes the bytes that are sent whenever nothing else was for
    `ping_interval_s` seconds. on_leaving: called when the client goes before the end. farewell: makes the bytes that
    end the stream when the server does, which cancels it.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        pieces: AsyncGenerator[bytes, None],
        source: AsyncGenerator[Any, None],
        *,
        headers: dict[str, str],
        ping: Callable[[], bytes],
        ping_interval_s: float,
        on_leaving: Callable[[], None],
        farewell: Callable[[], bytes],
    ) -> None:
        self._pieces = pieces
        self._source = source
        self._ping = ping
        self._ping_interval_s = ping_interval_s
        self._on_leaving = on_leaving
        self._farewell = farewell
        self._last_sent = 0.0
        # Proxies that buffer would turn a stream into one late answer.
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._write(send))
        except ClientGone:
            self._on_leaving()
        except asyncio.CancelledError:
            await send({"type": "http.response.body", "body": self._farewell(), "more_body": False})
        finally:
            await self._pieces.aclose()
            await self._source.aclose()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        # Beside the stream and not around each of its pieces: at many streams a timer for every token would be a
        # good part of the server's work. A message is written whole, so the two can't mix.
        pinging = asyncio.ensure_future(self._send_pings(send))
        try:
            async for piece in self._pieces:
                await self._send(send, piece)
        finally:
            pinging.cancel()
            await asyncio.gather(pinging, return_exceptions=True)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, piece: bytes) -> None:
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
