"""`headrace launch CLIENT`: starts a client with settings for this run, and a server if none answers."""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import NoReturn
from urllib.parse import urlsplit

from headrace.cli.launch_arguments import LaunchArguments
from headrace.cli.launch_client import end_background, find_program, run_client
from headrace.cli.launch_files import save, write
from headrace.cli.launch_server import (
    NoAnswer,
    OtherProgram,
    ServedModel,
    ServerProbe,
    address,
    free_port,
    is_loopback,
    started_server,
    wait_until,
)
from headrace.clients.record import Client, Endpoint, output_limit
from headrace.clients.text import settings_text
from headrace.config import ServerConfig
from headrace.config_loading import environment_for
from headrace.errors import ConfigError
from headrace.types.model_status import ModelState

_TERMINATED = 128
"""Exit code after a signal: this plus its number."""


def run(arguments: LaunchArguments) -> None:
    """Ends with SystemExit, with the client's exit code. Raises ConfigError."""
    program = find_program(arguments.client) if arguments.action == "run" else ""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    with tempfile.TemporaryDirectory(prefix="headrace-launch-") as folder, _endpoint(arguments, Path(folder)) as found:
        raise SystemExit(_use(arguments, found, program, Path(folder) / "client"))


def _end(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(_TERMINATED + number)


def _use(arguments: LaunchArguments, endpoint: Endpoint, program: str, folder: Path) -> int:
    client = arguments.client
    if arguments.action == "save":
        return save(client, endpoint, is_confirmed=arguments.says_yes)
    if arguments.action == "print":
        shown = endpoint if endpoint.key is None or arguments.shows_key else replace(endpoint, key="YOUR_KEY")
        print(settings_text(client, shown), end="")
        return 0
    _warn_of_small_context(client, endpoint)
    settings = client.run_settings(endpoint, str(folder))
    write(settings.files)
    host = urlsplit(endpoint.url).hostname or ""
    environment = environment_for(settings.environment, host if is_loopback(host) else None)
    try:
        return run_client([program, *settings.arguments, *arguments.client_words], environment)
    finally:
        end_background(settings.background)


def _note(text: str) -> None:
    # Standard output is the client's.
    print(f"headrace: {text}", file=sys.stderr, flush=True)


def _warn_of_small_context(client: Client, endpoint: Endpoint) -> None:
    if endpoint.context < client.least_context:
        _note(
            f"{client.title} needs a context of about {client.least_context:,} tokens, "
            f"and that of {endpoint.model} is {endpoint.context:,}"
        )


@contextmanager
def _endpoint(arguments: LaunchArguments, folder: Path) -> Iterator[Endpoint]:
    """A server that is ready: the named one, one that answers, or a new one, which ends with the block."""
    remote, server = arguments.chat, arguments.server
    if remote.url is not None:
        if arguments.has_serve_flags:
            raise ConfigError("options of headrace serve, and more than one --model, have no effect with --url")
        yield _ready(ServerProbe(remote.url, remote.url_key), arguments.model)
        return
    if (running := _running_server(server)) is None:
        with _new_server(arguments, folder) as endpoint:
            yield endpoint
        return
    if arguments.has_serve_flags:
        raise ConfigError(
            f"a server already answers at {running.url}, so options of headrace serve, and more than one --model, have "
            "no effect: end it, or choose another --port"
        )
    _note(f"using the server at {running.url}")
    yield _ready(running, arguments.model)


def _running_server(server: ServerConfig) -> ServerProbe | None:
    """Of the configured address. A program that holds it may still be loading a model, so it is waited for."""
    if server.port == 0:
        return None
    probe = ServerProbe(address(server), server.api_key)

    def answers_or_is_gone() -> bool:
        try:
            probe.models()
        except NoAnswer:
            return bool(free_port(server.host, server.port))
        return True

    try:
        wait_until(answers_or_is_gone, lambda: f"waiting for the program that holds port {server.port}")
        probe.models()
    except NoAnswer:
        return None
    except OtherProgram as error:
        if server.port != ServerConfig().port:
            raise
        _note(f"{error.message}; a server is started on another port")
        return None
    return probe


@contextmanager
def _new_server(arguments: LaunchArguments, folder: Path) -> Iterator[Endpoint]:
    server, num_others = arguments.server, arguments.num_models - 1
    port = free_port(server.host, server.port) or free_port(server.host, 0)
    probe = ServerProbe(address(replace(server, port=port)), server.api_key)
    words = [*arguments.serve_words, "--port", str(port)]
    others = f" and {num_others} more" if num_others else ""
    _note(f"starting a server of {arguments.first_model}{others} at {probe.url}")
    with started_server(words, probe, folder / "server.log", server.drain_seconds) as started:
        yield _ready(probe, arguments.first_model if num_others else None)
        started.check()


def _ready(probe: ServerProbe, name: str | None) -> Endpoint:
    """Waits until the model is loaded and runs at full speed. name: None for the first. Raises ConfigError."""
    served: list[ServedModel] = []

    def has_models() -> bool:
        served[:] = probe.models() or ()
        return bool(served)

    wait_until(has_models, lambda: f"the server at {probe.url} is loading")
    model = _loaded(probe, served, name)
    wait_until(lambda: probe.warming() is None, lambda: f"the server at {probe.url} is {probe.warming() or 'ready'}")
    if model.context is None:
        raise ConfigError(f"the server at {probe.url} does not tell its context (max_model_len in /v1/models)")
    limit = output_limit(model.context)
    return Endpoint(probe.url, model.name, model.context, limit, probe.key, model.takes_images)


def _loaded(probe: ServerProbe, served: Sequence[ServedModel], name: str | None) -> ServedModel:
    """The model of this name, or the first, of those that are loaded if there are some. Raises ConfigError."""
    # Headrace names a model of a folder or a hub by the last part.
    matching = [each for each in served if name is None or each.name in (name, name.rstrip("/").rpartition("/")[2])]
    if ready := [each for each in matching if each.state in (None, ModelState.LOADED)]:
        return ready[0]
    loaded = None if served[0].state is None else probe.load(name or served[0].name)
    if loaded is None:
        raise ConfigError(
            f"the server at {probe.url} has no model {name}, but {', '.join(each.name for each in served)}"
        )
    return loaded
