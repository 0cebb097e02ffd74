"""A request to another server that may be cancelled at any time."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

_CONNECTED = "http11.send_request_headers.started"

_abandoned: set[asyncio.Task[None]] = set()


async def send(http: httpx.AsyncClient, request: httpx.Request) -> httpx.Response:
    """Like `http.send(request, stream=True)`, for HTTP/1.1.

    httpx leaves a socket open if it is cancelled just when that is connected. So a cancelled request goes on until it
    is connected, for as long as the client's timeouts let it, and is cancelled then.
    """
    is_connected = asyncio.Event()

    async def trace(event: str, info: dict[str, Any]) -> None:
        if event == _CONNECTED:
            is_connected.set()

    request.extensions["trace"] = trace
    sending = asyncio.create_task(http.send(request, stream=True))
    sending.add_done_callback(lambda _: is_connected.set())
    try:
        return await asyncio.shield(sending)
    except asyncio.CancelledError:
        abandoning = asyncio.create_task(_abandon(sending, is_connected))
        _abandoned.add(abandoning)
        abandoning.add_done_callback(_abandoned.discard)
        raise


async def _abandon(sending: asyncio.Task[httpx.Response], is_connected: asyncio.Event) -> None:
    await is_connected.wait()
    sending.cancel()
    (result,) = await asyncio.gather(sending, return_exceptions=True)
    if isinstance(result, httpx.Response):
        await result.aclose()
