"""Work that lives as long as the client's connection, and event streams that show signs of life."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

Item = TypeVar("Item")
Result = TypeVar("Result")


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


async def with_pings(items: AsyncGenerator[Item, None], interval_s: float) -> AsyncGenerator[Item | None, None]:
    """The items, and None whenever none has come for `interval_s` seconds. Cancels what it waits for when closed."""
    pending = asyncio.ensure_future(anext(items))
    try:
        while True:
            await asyncio.wait({pending}, timeout=interval_s)
            if not pending.done():
                yield None
                continue
            try:
                item = pending.result()
            except StopAsyncIteration:
                return
            yield item
            pending = asyncio.ensure_future(anext(items))
    finally:
        pending.cancel()
        await asyncio.gather(pending, return_exceptions=True)


class EventStream(Response):
    """A stream of server-sent events: headers at once, and an end as soon as the client goes away.

    pieces: the bytes to send. source: what the pieces are made from; closed with the stream in every case, also when
    the client goes before the first piece was made.
    """

    media_type = "text/event-stream"

    def __init__(
        self, pieces: AsyncGenerator[bytes, None], source: AsyncGenerator[Any, None], headers: dict[str, str]
    ) -> None:
        self._pieces = pieces
        self._source = source
        # Proxies that buffer would turn a stream into one late answer.
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the stream."""
        try:
            await while_connected(receive, self._write(send))
        except ClientGone:
            pass
        finally:
            await self._pieces.aclose()
            await self._source.aclose()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for piece in self._pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
