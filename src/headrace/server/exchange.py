"""Wraps the ASGI messages of one request and its answer."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import Message, Receive, Send

from headrace.server.bookkeeping import RequestRecord

_EXPOSED_HEADERS = "x-request-id, request-id, x-correlation-id, x-headrace-ignored, retry-after"

# How much of an unread body is dropped before the connection is closed, and for how long. Closing a connection while
# the client still sends loses the answer, and some clients then retry what can never work.
_MAX_DROPPED_BYTES = 256 * 1024 * 1024
_MAX_DROPPING_S = 30.0


class Exchange:
    """Adds the common headers, records the status, and delivers answers that come before the body is read.

    headers: of the request. origin: the page origin that may read the answer. is_last: close the connection after it.
    """

    def __init__(
        self,
        headers: Headers,
        receive: Receive,
        send: Send,
        record: RequestRecord,
        origin: str | None,
        *,
        is_last: bool = False,
    ) -> None:
        self._receive = receive
        self._send = send
        self._record = record
        self._origin = origin
        self._is_last = is_last
        self._is_read = headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers

    async def receive(self) -> Message:
        message = await self._receive()
        self._is_read = self._is_read or not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start(MutableHeaders(scope=message), message["status"])
        elif not (message.get("more_body", False) or self._is_read):
            await self._send({**message, "more_body": True})
            try:
                await self._drop_body()
            finally:
                await self._send({"type": "http.response.body", "body": b""})
            return
        await self._send(message)

    def _start(self, headers: MutableHeaders, status: int) -> None:
        self._record.status = status
        headers["x-request-id"] = self._record.request_id
        # The name that Anthropic's clients expect.
        headers["request-id"] = self._record.request_id
        if self._record.correlation_id is not None:
            headers["x-correlation-id"] = self._record.correlation_id
        if self._is_last or not self._is_read:
            headers["connection"] = "close"
        if self._origin is not None:
            headers["access-control-allow-origin"] = self._origin
            headers["access-control-expose-headers"] = _EXPOSED_HEADERS
            headers.add_vary_header("Origin")

    async def _drop_body(self) -> None:
        num_bytes = 0
        try:
            async with asyncio.timeout(_MAX_DROPPING_S):
                while not self._is_read and num_bytes <= _MAX_DROPPED_BYTES:
                    num_bytes += len((await self.receive()).get("body", b""))
        except TimeoutError:
            return  # the connection is closed anyway
