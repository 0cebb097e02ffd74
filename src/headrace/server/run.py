"""From an application to a listening process, and back down in order."""

from __future__ import annotations

import ipaddress
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn

from headrace.config import ServerConfig
from headrace.errors import ConfigError
from headrace.server.app import build_app
from headrace.session.session import Session

# How long streams may go on after the first signal; a second SIGINT ends them at once.
_GRACE_S = 5

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
    """Serves until SIGINT or SIGTERM. `announce` is called once connections are accepted."""
    with _signals_end_quietly():
        HttpServer(session, config, announce).run(sockets=[listener])


class HttpServer(uvicorn.Server):
    """Serves one session. Calls `announce` when it listens, not before."""

    def __init__(self, session: Session, config: ServerConfig, announce: Callable[[], None]) -> None:
        # Our own log has a line for each request, so uvicorn's is off.
        settings = uvicorn.Config(
            build_app(session, config),
            log_config=None,
            access_log=False,
            server_header=False,
            ws="none",
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_GRACE_S,
        )
        super().__init__(settings)
        self._announce = announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to listen. Raises ConfigError when another process got hold of the port meanwhile."""
        try:
            await super().startup(sockets)
        except OSError as error:
            raise ConfigError(f"can't listen: {error.strerror or error}") from error
        if self.started:
            self._announce()


@contextmanager
def _signals_end_quietly() -> Iterator[None]:
    """uvicorn shuts down on a signal and then raises it again for the handler that was there before.

    The default handlers would end the process there, before the engine is stopped; these let it return.
    """
    handled = (signal.SIGINT, signal.SIGTERM)
    before = {each: signal.signal(each, lambda *_: None) for each in handled}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
