"""The server that a client is connected to: found, or started, watched while it loads, and ended."""

from __future__ import annotations

import ipaddress
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote, urlsplit

import httpx

from headrace.cli.progress_line import Waiting
from headrace.config import ServerConfig
from headrace.errors import ConfigError
from headrace.types.model_status import ModelState

_POLL_S = 0.2
_ANSWER_S = 10.0
_NUM_LAST_LINES = 12
_KILL_S = 10.0
"""Beside the time that the server gives its requests."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """state: of Headrace's models; None on other servers."""

    name: str
    context: int | None
    state: ModelState | None = None
    takes_images: bool = False


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class NoAnswer(ConfigError):
    """Nothing listens."""


class OtherProgram(ConfigError):
    """What answers is no server of models."""


class ServerProbe:
    """Asks a server what it serves. url: without `/v1`."""

    def __init__(self, url: str, key: str | None) -> None:
        self.url = url
        self.key = key
        self._http = httpx.Client(
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
            timeout=_ANSWER_S,
            trust_env=not is_loopback(urlsplit(url).hostname or ""),
        )

    def models(self) -> tuple[ServedModel, ...] | None:
        """None while the server is loading. Raises NoAnswer, OtherProgram, and ConfigError for a wrong key."""
        try:
            response = self._http.get(f"{self.url}/v1/models")
        except httpx.ConnectError as error:
            raise NoAnswer(f"nothing answers at {self.url} ({error})") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise OtherProgram(f"{self.url} is no server of models ({type(error).__name__})") from error
        if response.status_code == httpx.codes.UNAUTHORIZED:
            raise ConfigError.of_key(self.url, "--url-key", is_given=self.key is not None)
        if response.status_code == httpx.codes.FORBIDDEN:
            raise ConfigError(f"the server at {self.url} refuses (403): {response.text[:200]}")
        if response.status_code == 503:
            return None
        try:
            models = tuple(_served(each) for each in response.raise_for_status().json()["data"])
        except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise OtherProgram(f"{self.url}/v1/models lists no models (status {response.status_code})") from error
        if not models:
            raise OtherProgram(f"{self.url}/v1/models is an empty list")
        return models

    def load(self, name: str) -> ServedModel | None:
        """Have Headrace load a model, and wait for it. None for an unknown one. Raises ConfigError."""
        address = f"{self.url}/v1/models/{quote(name)}/load"
        try:
            with Waiting(lambda seconds: f"the server at {self.url} loads {name}, {seconds:.0f} s"):
                response = self._http.post(address, timeout=httpx.Timeout(_ANSWER_S, read=None))
            body = response.json()
            if response.status_code == httpx.codes.NOT_FOUND:
                return None
            if response.is_error:
                raise ConfigError(f"the server at {self.url}: {body['error']['message']}")
            return _served(body)
        except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise ConfigError(f"the server at {self.url} did not load {name} ({type(error).__name__})") from error

    def warming(self) -> str | None:
        """What a Headrace server still prepares; None if it is ready, or another kind of server."""
        try:
            response = self._http.get(f"{self.url}/health")
            warm_up = response.json()["warm_up"] if response.status_code == 503 else None
        except (httpx.HTTPError, ValueError, LookupError, TypeError):
            return None
        return None if warm_up is None else f"warming up, {warm_up['num_done']} of {warm_up['num_pieces']}"


def _served(model: Any) -> ServedModel:
    context = model.get("max_model_len")
    state = ModelState(model["state"]) if model.get("state") in set(ModelState) else None
    takes_images = "image" in (model.get("modalities") or {}).get("input", ())
    return ServedModel(str(model["id"]), context if isinstance(context, int) else None, state, takes_images)


def address(config: ServerConfig) -> str:
    """The URL of a server on this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(config.host, config.host)
    return f"http://[{host}]:{config.port}" if ":" in host else f"http://{host}:{config.port}"


def free_port(host: str, wanted: int) -> int:
    """The wanted port, or any for 0. It is 0 if it is taken. Raises ConfigError for an unknown host."""
    try:
        family, kind, protocol, _, (address, *_) = socket.getaddrinfo(host, wanted, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"--host {host}: {error.strerror or error}") from error
    for reuses in (0, 1):
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuses)
            try:
                probe.bind((address, wanted))
            except OSError:
                if not reuses and not _has_old_connections(wanted):
                    return 0
            else:
                return int(probe.getsockname()[1])
    return 0


def _has_old_connections(port: int) -> bool:
    """Whether connections of an earlier server may be what keeps the port, so that a new one may reuse it.

    On Linux two programs may bind a port for reuse while neither listens, as a server that loads its model. Elsewhere
    the second one is refused.
    """
    tables = [path for path in map(Path, ("/proc/net/tcp", "/proc/net/tcp6")) if path.exists()]
    rows = [line.split() for path in tables for line in path.read_text().splitlines()[1:]]
    return not tables or any(int(row[1].rpartition(":")[2], 16) == port for row in rows)


def wait_until(is_over: Callable[[], bool], text: Callable[[], str]) -> None:
    """Polls, and shows the text with the seconds."""
    with Waiting(lambda seconds: f"{text()}, {seconds:.0f} s"):
        while not is_over():
            time.sleep(_POLL_S)


class StartedServer:
    """`headrace serve` as a process that ends with this one, however this one ends."""

    def __init__(self, words: Sequence[str], log: Path, drain_s: float) -> None:
        """words: after `headrace serve`. log: a new file for what it prints."""
        self._log = log
        self._drain_s = drain_s
        with log.open("wb") as out:
            # In its own session, so that Ctrl-C in the terminal does not reach it.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "headrace", "serve", *words],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        # Its input ends when this process does, even if that is killed.
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", 'read -r _; kill -TERM "$0"', str(self._process.pid)],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def __enter__(self) -> StartedServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._guard.kill()
        self._guard.wait()
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(self._drain_s + _KILL_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def check(self) -> None:
        """Raises ConfigError with its last lines if it has ended."""
        if (code := self._process.poll()) is not None:
            lines = "\n".join(f"  {line}" for line in self._lines()[-_NUM_LAST_LINES:])
            raise ConfigError(f"the server ended with exit code {code}:\n{lines}")

    def last_line(self) -> str:
        return next(reversed(self._lines()), "starting")

    def _lines(self) -> list[str]:
        return [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]


@contextmanager
def delayed_signals() -> Iterator[None]:
    """Signals that would end this process come after the block."""
    arrived: list[int] = []
    before = {
        number: signal.signal(number, lambda number, frame: arrived.append(number))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for arrival in arrived:
            signal.raise_signal(arrival)


@contextmanager
def started_server(words: Sequence[str], probe: ServerProbe, log: Path, drain_s: float) -> Iterator[StartedServer]:
    """A server that has answered; it ends with the block. Raises ConfigError if it ends before that."""
    with ExitStack() as stack:
        # One that came while the process is started would leave it running.
        with delayed_signals():
            server = stack.enter_context(StartedServer(words, log, drain_s))

        def has_begun() -> bool:
            server.check()
            try:
                return probe.models() is not None
            except NoAnswer:
                return False

        wait_until(has_begun, lambda: f"server: {server.last_line()}")
        yield server
