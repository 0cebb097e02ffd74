"""A real server on a free loopback port, in the test's own event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from headrace.config import ServerConfig
from headrace.server.run import HttpServer, base_url, open_listener
from headrace.session.session import Session


@asynccontextmanager
async def serving(session: Session, config: ServerConfig | None = None) -> AsyncIterator[str]:
    """Yields the server's base URL; the server is down again when the block is left."""
    config = replace(config or ServerConfig(), port=0)
    with open_listener(config) as listener:
        listens = asyncio.Event()
        server = HttpServer(session, config, listens.set)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        ready = asyncio.create_task(listens.wait())
        await asyncio.wait({task, ready}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        try:
            yield base_url(listener)
        finally:
            server.should_exit = True
            await task
