"""From an application to a listening process, and back down in order."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import uvicorn

from headrace.config import ServerConfig
from headrace.errors import ConfigError
from headrace.server.app import build_app
from headrace.server.protocol import Protocol, WaitingConnections
from headrace.session.session import Session

log = logging.getLogger("headrace.server")

# How long requests may go on after the first signal; a second SIGINT ends them at once.
_GRACE_S = 5

# How long a client has to take the error that ends its request, and a request to end once its connection is closed.
_FAREWELL_S = 1

# Agents pause between requests while their tools run. A connection that the server closes just as the next request
# is sent looks like a broken server to them.
_KEEP_ALIVE_S = 75


def open_listener(config: ServerConfig) -> socket.socket:
    """A bound socket that doesn't listen yet: a taken port is known before minutes go into loading a model.

    Raises ConfigError for an address that can't be bound, and for a public one without a key.
    """
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"--host {config.host}: {error.strerror or error}") from error
    family, kind, protocol, _, address = found[0]
    if config.api_key is None and not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
        raise ConfigError(f"--host {config.host} can be reached by others: a public address needs --api-key")
    listener = socket.socket(family, kind, protocol)
    # A port of a server that has just ended may be used again at once.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError(f"--port {config.port} on {config.host}: {error.strerror or error}") from error
    return listener


def base_url(listener: socket.socket) -> str:
    """Where a bound socket is reached, with the port that it really has."""
    host, port = listener.getsockname()[:2]
    if ipaddress.ip_address(host.partition("%")[0]).is_unspecified:
        host = "::1" if ":" in host else "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(session: Session, config: ServerConfig, listener: socket.socket, announce: Callable[[], None]) -> None:
    """Serves until SIGINT or SIGTERM. `announce` is called once connections are accepted.

    Raises KeyboardInterrupt after a second SIGINT: then the process is to end at once.
    """
    server = HttpServer(session, config, announce)
    with _signals_end_quietly(server):
        server.run(sockets=[listener])
    if server.force_exit:
        raise KeyboardInterrupt


class HttpServer(uvicorn.Server):
    """Serves one session. Calls `announce` when it listens, not before.

    has_ended: signals are none of its business any more.
    """

    def __init__(self, session: Session, config: ServerConfig, announce: Callable[[], None]) -> None:
        # Our own log has a line for each request, so uvicorn's is off.
        settings = uvicorn.Config(
            build_app(session, config),
            log_config=None,
            access_log=False,
            server_header=False,
            http=Protocol,
            ws="none",
            timeout_keep_alive=_KEEP_ALIVE_S,
            # The last resort: what it cancels then gets no proper end and leaves a traceback in the log.
            timeout_graceful_shutdown=_GRACE_S + 3 * _FAREWELL_S,
        )
        super().__init__(settings)
        self.server_state = WaitingConnections()
        self.has_ended = False
        self._announce = announce
        self._is_urgent = asyncio.Event()

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serves until a signal comes, which uvicorn's handlers then raise once more for those before them."""
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(_log_unhandled)
        await super().serve(sockets)
        self.has_ended = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came: the first one begins the end, a second SIGINT hurries it."""
        super().handle_exit(sig, frame)
        if self.force_exit:
            self._loop.call_soon_threadsafe(self._is_urgent.set)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to listen. Raises ConfigError when another process got hold of the port meanwhile."""
        try:
            await super().startup(sockets)
        except OSError as error:
            raise ConfigError(f"can't listen: {error.strerror or error}") from error
        if self.started:
            self._announce()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stops to listen and waits for the requests that are being answered, as long as there is time."""
        ending = asyncio.create_task(self._end_requests())
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn waits for nothing then
            await ending
            await self.lifespan.shutdown()
        ending.cancel()
        await asyncio.gather(ending, return_exceptions=True)

    async def _end_requests(self) -> None:
        """Ends requests when their time is over, each with an error of its own kind (see the Guard)."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._is_urgent.wait(), _GRACE_S)
        for request in self.server_state.tasks:
            request.cancel()
        await self._requests_end()
        for connection in self.server_state.connections:
            # Its client doesn't read, and what is written to it would wait for ever.
            connection.transport.abort()
        await self._requests_end()

    async def _requests_end(self) -> None:
        if requests := set(self.server_state.tasks):
            await asyncio.wait(requests, timeout=_FAREWELL_S)


def _log_unhandled(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Logs an exception that no task took. asyncio's own line shows arguments of callbacks, which may be content."""
    log.error("an exception was never handled", exc_info=context.get("exception"))


@contextmanager
def _signals_end_quietly(server: HttpServer) -> Iterator[None]:
    """uvicorn shuts down on a signal and then raises it again for the handler that was there before.

    The default handlers would end the process there, before the engine is stopped; these let it return. A SIGINT that
    comes later finds a process that still waits for something, and interrupts that.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        if server.has_ended and number == signal.SIGINT:
            raise KeyboardInterrupt

    handled = (signal.SIGINT, signal.SIGTERM)
    before = {each: signal.signal(each, handle) for each in handled}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
