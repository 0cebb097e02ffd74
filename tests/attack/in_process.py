"""The application over a fake engine, for bodies by the hundred: no process, no model."""

from __future__ import annotations

import asyncio
import json

import httpx
from attack.inputs import CHAT, chat
from fakes import END, FakeEngine, app_over, fake_session

from headrace.config import ServerConfig


class Wire:
    """One application for all examples of a test."""

    def __init__(self) -> None:
        engine = FakeEngine("<think>a</think>", "b", (END,))
        # A server with few bytes to spare also meets the refusal of large bodies.
        self._app = app_over(fake_session(engine), ServerConfig(max_body_bytes=100_000))

    def post(self, content: bytes, path: str) -> httpx.Response:
        async def exchange() -> httpx.Response:
            # What the application lets through would be raised here and fail the test.
            transport = httpx.ASGITransport(self._app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                return await client.post(path, content=content)

        return asyncio.run(exchange())

    def check_alive(self) -> None:
        assert self.post(json.dumps(chat()).encode(), CHAT).status_code == 200
