"""GET /v1/status/stream: the status as server-sent events, computed about once a second for all watchers together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from headrace.api.answer_encoder import server_sent
from headrace.api.error_bodies import openai_error
from headrace.errors import HeadraceError, Overloaded
from headrace.server.responses import closing_error

INTERVAL_S = 1.0

MAX_WATCHERS = 16

PING = b": ping\n\n"


class StatusFeed:
    """Nothing is computed while there are no watchers.

    body: makes the status, with the history since a second.
    """

    def __init__(self, body: Callable[[int], Awaitable[dict[str, Any]]]) -> None:
        self._body = body
        self.num_watchers = 0
        self._upcoming: asyncio.Task[bytes] | None = None
        self._since = 0
        self._is_closing = asyncio.Event()

    def close(self) -> None:
        """End all streams with an error."""
        self._is_closing.set()

    async def watch(self) -> AsyncGenerator[bytes, None]:
        """One watcher's events: the first has the whole history, later ones what is new.

        Raises Overloaded and EngineDead before the first event. A slow watcher misses events.
        """
        if self.num_watchers >= MAX_WATCHERS:
            raise Overloaded(f"{MAX_WATCHERS} clients watch the status already", retry_after_s=INTERVAL_S)
        self.num_watchers += 1
        try:
            yield server_sent(await self._body(0))
            while True:
                yield await asyncio.shield(self._next())
        finally:
            self.num_watchers -= 1
            if not self.num_watchers and self._upcoming is not None:
                self._upcoming.cancel()

    def _next(self) -> asyncio.Task[bytes]:
        if self._upcoming is None or self._upcoming.done():
            self._upcoming = asyncio.create_task(self._tick())
        return self._upcoming

    async def _tick(self) -> bytes:
        try:
            async with asyncio.timeout(INTERVAL_S):
                await self._is_closing.wait()
        except TimeoutError:
            body = await self._body(self._since)
            history = body["history"]
            # from the second that was in progress, once more
            self._since = history["start"] + len(history["num_steps"]) - 1
            return server_sent(body)
        raise closing_error()


async def joined(first: bytes, events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    yield first
    async for event in events:
        yield event


def failure(error: HeadraceError) -> bytes:
    return server_sent(openai_error(error))
