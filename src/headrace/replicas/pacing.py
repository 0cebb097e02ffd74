"""Joins the pieces of an answer that come sooner than Ray's proxy can pass them on."""

from __future__ import annotations

import asyncio
import math
from types import TracebackType
from typing import Self

from starlette.types import Message, Send

MESSAGE_S = 0.0003
"""Twice what a message takes of the proxy's processor time, so that answers keep it busy half of the time at most."""


class OpenAnswers:
    """The answers of this replica that have not ended."""

    def __init__(self, num_on_host: int) -> None:
        """num_on_host: replicas that share a proxy."""
        self.num = 0
        self._num_on_host = num_on_host

    @property
    def pause_s(self) -> float:
        """Between two messages of an answer."""
        return self.num * self._num_on_host * MESSAGE_S


class PacedAnswer:
    """Sends an answer's first piece at once, and later ones together after a pause."""

    def __init__(self, send: Send, answers: OpenAnswers) -> None:
        self._send = send
        self._answers = answers
        self._held = bytearray()
        self._sent_at = -math.inf
        self._pausing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._answers.num += 1
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._answers.num -= 1
        if self._pausing is not None:
            self._pausing.cancel()

    async def send(self, message: Message) -> None:
        if message["type"] != "http.response.body":
            await self._send(message)
            return
        self._held += message.get("body", b"")
        if not message.get("more_body", False):
            await self._send({**message, "body": self._taken()})
        elif self._pausing is None:
            due = self._sent_at + self._answers.pause_s
            if due <= asyncio.get_running_loop().time():
                await self._flush()
            else:
                self._pausing = asyncio.create_task(self._flush_at(due))

    async def _flush_at(self, due: float) -> None:
        await asyncio.sleep(due - asyncio.get_running_loop().time())
        self._pausing = None
        await self._flush()

    async def _flush(self) -> None:
        self._sent_at = asyncio.get_running_loop().time()
        if body := self._taken():
            await self._send({"type": "http.response.body", "body": body, "more_body": True})

    def _taken(self) -> bytes:
        body = bytes(self._held)
        self._held.clear()
        return body
