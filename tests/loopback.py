"""A real server on a free loopback port, in the test's own event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from fakes import models_of

from headrace.config import ServerConfig
from headrace.server.run import HttpServer, base_url, open_listener
from headrace.session.embeddings import AnySession
from headrace.session.models import Models


@asynccontextmanager
async def serving(
    session: AnySession | Models, config: ServerConfig | None = None, *, port: int = 0
) -> AsyncIterator[str]:
    """Yields the server's base URL; the server is down again when the block is left. port: 0 for any free one."""
    config = replace(config or ServerConfig(), port=port)
    models = session if isinstance(session, Models) else models_of(session, config)
    with open_listener(config) as listener:
        listens = asyncio.Event()
        server = HttpServer(models, config, listens.set)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        ready = asyncio.create_task(listens.wait())
        await asyncio.wait({task, ready}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        try:
            yield base_url(listener)
        finally:
            server.should_exit = True
            await task


class served:  # noqa: N801 (it is used like a function)
    """A server for a session in a separate thread."""

    def __init__(self, session: AnySession | Models, config: ServerConfig | None = None) -> None:
        self._session = session
        self._config = config
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._url = ""

    def __enter__(self) -> str:
        self._thread.start()
        self._started.wait()
        return self._url

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with serving(self._session, self._config) as self._url:
            self._started.set()
            await self._stop.wait()
