"""Settings as text to copy, and as JSON."""

from __future__ import annotations

import shlex
from typing import Any

from headrace.clients.record import Client, Endpoint


def _word(text: str) -> str:
    """A shell's word; a `~` at its start stays one."""
    return f"~/{shlex.quote(text.removeprefix('~/'))}" if text.startswith("~/") else shlex.quote(text)


def command_line(client: Client, endpoint: Endpoint) -> str:
    """What starts the client with its lasting settings."""
    settings = client.lasting_settings(endpoint)
    variables = [f"{name}={_word(value)}" for name, value in settings.environment.items()]
    return " ".join([*variables, client.command, *map(_word, settings.arguments)])


def settings_text(client: Client, endpoint: Endpoint) -> str:
    """Its files, each under its path, and the command."""
    settings = client.lasting_settings(endpoint)
    files = [f"# {file.path}\n{file.text}" for file in settings.files]
    return "\n".join([*files, f"# start\n{command_line(client, endpoint)}\n"])


def client_json(client: Client, endpoint: Endpoint) -> dict[str, Any]:
    """A client for GET /v1/clients."""
    settings = client.lasting_settings(endpoint)
    return {
        "id": client.name,
        "object": "client",
        "title": client.title,
        "install": client.install,
        "version": client.version,
        "apis": list(client.apis),
        "launch": f"headrace launch {client.name}",
        "files": [{"path": file.path, "text": file.text} for file in settings.files],
        "environment": dict(settings.environment),
        "arguments": list(settings.arguments),
        "command": command_line(client, endpoint),
    }
