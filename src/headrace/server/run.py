"""Runs the application under uvicorn, and shuts it down in order."""

from __future__ import annotations

import asyncio
import errno
import gc
import ipaddress
import logging
import math
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn

from headrace.config import ServerConfig
from headrace.errors import ConfigError, EngineDead
from headrace.long_work import shorten_switch_interval
from headrace.server.app import build_app
from headrace.server.drain import Drain
from headrace.server.guard import OwnNames
from headrace.server.handover import handover_target
from headrace.server.protocol import Protocol, WaitingConnections
from headrace.server.status_stream import StatusFeed
from headrace.server.tracing import check_tracing
from headrace.server.watchdog import start_watchdog
from headrace.session.models import Models

if TYPE_CHECKING:
    from headrace.server.spans import RequestSpans

log = logging.getLogger("headrace.server")

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells use it: 128 plus the number of SIGINT."""

# A process that has not ended this long after the time for requests is killed.
_END_S = 5

# Of that, the time for exiting once everything has ended.
_EXIT_S = 1

_POLL_S = 0.1

# Time for a client to read the error that ends its request, and for a request to end once its connection is closed.
_FINAL_CHUNK_S = 1

# Agents pause between requests while their tools run. A connection that closes just as the next request is sent looks
# to them like a broken server.
KEEP_ALIVE_S = 75


def open_listener(config: ServerConfig) -> socket.socket:
    """A bound socket that doesn't listen yet, so that a taken port is reported before minutes of loading.

    Raises ConfigError for an address that can't be bound, for a public one without a key, for an invalid origin, and
    for tracing that is not installed, and for an invalid server to hand over to.
    """
    OwnNames(config.host, config.allowed_origin)  # raises for one
    check_tracing(config)
    handover_target(config)
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"--host {config.host}: {error.strerror or error}") from error
    family, kind, protocol, _, address = found[0]
    if config.api_key is None and not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
        raise ConfigError(f"--host {config.host} can be reached by others: a public address needs --api-key")
    listener = socket.socket(family, kind, protocol)
    # A port of a server that has just ended can be reused at once.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _port_error(config, error) from error
    return listener


def _port_error(config: ServerConfig, error: OSError) -> ConfigError:
    advice = "; --port 0 takes any free one" if error.errno == errno.EADDRINUSE else ""
    return ConfigError(f"--port {config.port} on {config.host}: {error.strerror or error}{advice}")


def base_url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    if ipaddress.ip_address(host.partition("%")[0]).is_unspecified:
        host = "::1" if ":" in host else "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(models: Models, config: ServerConfig, listener: socket.socket, announce: Callable[[], None]) -> float:
    """Serve until SIGINT or SIGTERM. `announce` is called once connections are accepted.

    Returns the seconds left until the process must have ended. From here on signals are the server's. Raises
    ConfigError if another process has taken the port since `open_listener`, KeyboardInterrupt after a second SIGINT,
    upon which the process should end at once, and EngineDead if the engine has died.
    """
    try:
        listener.listen()
    except OSError as error:
        raise _port_error(config, error) from error
    shorten_switch_interval()
    server = HttpServer(models, config, announce)
    # Everything loaded so far stays. A full collection that searches it stops all threads for up to 0.3 s.
    gc.collect()
    gc.freeze()
    signal.set_wakeup_fd(-1)  # from here on a signal lets requests finish
    server.watchdog = start_watchdog(config.drain_seconds + _END_S)
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, server.handle_exit)
    try:
        with asyncio.Runner() as runner:
            runner.get_loop().set_default_executor(_Workers())
            runner.run(server.serve(sockets=[listener]))
    finally:
        server.has_ended = True
    if server.force_exit:
        raise KeyboardInterrupt
    if server.engine_error is not None:
        raise EngineDead(f"the engine is not running: {server.engine_error}")
    return max(0.0, server.signalled_at + config.drain_seconds + _END_S - _EXIT_S - time.monotonic())


class _Workers(ThreadPoolExecutor):
    """Threads that the event loop does not wait for when it closes: one may be stuck in native code."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait=False, cancel_futures=True)


class HttpServer(uvicorn.Server):
    """Serves models. Calls `announce` when it listens, not before.

    has_ended: nothing is served any more, and another SIGINT ends the process. signalled_at: when the first signal
    came, in monotonic seconds. engine_error: why the engine died, which ends the server.
    """

    def __init__(self, models: Models, config: ServerConfig, announce: Callable[[], None]) -> None:
        app = build_app(models, config)
        self._feed: StatusFeed = app.state.feed
        self._drain: Drain = app.state.drain
        self._spans: RequestSpans | None = app.state.spans
        # Our log has a line for each request, so uvicorn's is off.
        settings = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            http=Protocol,
            ws="none",
            timeout_keep_alive=KEEP_ALIVE_S,
            # The last resort after the drain: what it cancels gets no proper end and leaves a traceback in the log.
            timeout_graceful_shutdown=4 * _FINAL_CHUNK_S,
        )
        super().__init__(settings)
        self.server_state = WaitingConnections()
        self.watchdog: subprocess.Popen[bytes] | None = None
        self.has_ended = False
        self.signalled_at = math.inf
        self.engine_error: str | None = None
        self._models = models
        self._announce = announce
        self._drain_s = config.drain_seconds

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(_Unhandled())
        await super().serve(sockets)

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second. Returns whether the server ends."""
        self._models.tick()
        if not self.should_exit and (reason := self._models.health()) is not None:
            self.engine_error, self.should_exit = reason, True
        return await super().on_tick(counter)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn would restore signals before the engine has stopped; see `serve`."""
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal starts the shutdown, a second SIGINT hurries it, a third ends the process at once."""
        if sig == signal.SIGINT and (self.force_exit or self.has_ended):
            os._exit(INTERRUPTED)
        self.signalled_at = min(self.signalled_at, time.monotonic())
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._announce()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain: wait for requests in progress as long as there is time. Then stop listening and end what is left."""
        if self.signalled_at < math.inf and not self.force_exit:
            log.info("%s", self._stopping_message())
        until = time.monotonic() + self._drain_s
        await self._finish_requests(until)
        self._feed.close()
        ending = asyncio.create_task(self._end_requests(min(until, time.monotonic() + _FINAL_CHUNK_S)))
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn waits for nothing then
            await ending
            await self.lifespan.shutdown()
        ending.cancel()
        await asyncio.gather(ending, return_exceptions=True)
        if self._spans is not None and not self.force_exit:
            await asyncio.to_thread(self._spans.close, _FINAL_CHUNK_S)

    def _stopping_message(self) -> str:
        num = self._num_requests
        if not num:
            return "stopping"
        requests = "1 request" if num == 1 else f"{num} requests"
        return f"stopping: {requests} may go on for {self._drain_s:g} s; Ctrl-C again ends them now"

    @property
    def _num_requests(self) -> int:
        """In progress, without those that watch the status."""
        return len(self.server_state.tasks) - self._feed.num_watchers

    async def _finish_requests(self, until: float) -> None:
        """Wait for requests in progress, at most until then, still listening, so that new ones can be refused.

        A dead engine refuses them itself.
        """
        if self.engine_error is None:
            self._drain.begin()
        for connection in list(self.server_state.connections):
            connection.shutdown()  # closes idle ones, which clients would use for their next request
        while not self.force_exit and self._num_requests > 0 and time.monotonic() < until:
            await asyncio.sleep(_POLL_S)

    async def _end_requests(self, until: float) -> None:
        """End requests when their time is over, each with its own error (see the Guard)."""
        while not self.force_exit and (left_s := until - time.monotonic()) > 0:
            await asyncio.sleep(min(left_s, _POLL_S))
        for request in self.server_state.tasks:
            request.cancel()
        await self._requests_end()
        for connection in self.server_state.connections:
            # Its client doesn't read, so writing to it would block forever.
            connection.transport.abort()
        await self._requests_end()

    async def _requests_end(self) -> None:
        if requests := set(self.server_state.tasks):
            await asyncio.wait(requests, timeout=_FINAL_CHUNK_S)


class _Unhandled:
    """Logs exceptions that no task handled. asyncio's own line shows arguments of callbacks, which may be content."""

    def __init__(self) -> None:
        self._files_warned_at = -math.inf

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            log.error("an exception was never handled", exc_info=error)
        elif loop.time() - self._files_warned_at > _POLL_S:  # asyncio reports it thousands of times at once
            log.warning("no more files may be open (ulimit -n): new connections wait until others are closed")
            self._files_warned_at = loop.time()
