"""A server with a scripted model, in a separate thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fakes import END, FakeEngine, describe, fake_session
from loopback import serving

from headrace.config import ServerConfig

CONTEXT = 131_072
ANSWER = "Hello, friend."


@contextmanager
def served(key: str | None = None, *, port: int = 0, name: str = "scripted") -> Iterator[str]:
    """Yields its URL."""
    ready, over = threading.Event(), threading.Event()
    urls: list[str] = []

    async def run() -> None:
        engine = FakeEngine(f"</think>{ANSWER}", (END,), model=describe(name, max_model_len=CONTEXT))
        async with serving(fake_session(engine), ServerConfig(api_key=key), port=port) as url:
            urls.append(url)
            ready.set()
            await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        assert ready.wait(60)
        yield urls[0]
    finally:
        over.set()
        thread.join()
