"""The host names that a server without a key accepts.

Any web page can have its own host name resolved to 127.0.0.1 after it was loaded (DNS rebinding). To a browser the
server is then part of that page, and the Origin header does not show it; only the Host header does.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from urllib.parse import urlsplit

from headrace.errors import ConfigError

_LOCAL_NAMES = frozenset({"localhost", "host.docker.internal", "host.containers.internal"})
"""This machine's names: its own, and those that Docker and Podman define in containers."""

_HOSTLESS = frozenset({"*", "null"})
"""Origins without a host: any, and local files."""

_HOST = re.compile(r"(?P<name>\[[^\[\]]+\]|[a-zA-Z0-9_.-]+)(:[0-9]*)?")


class OwnNames:
    """The names of one server.

    host: the address or name that it listens on. origins: allowed pages; their hosts are accepted names too, since they
    are trusted already.
    """

    def __init__(self, host: str, origins: Iterable[str]) -> None:
        """Raises ConfigError for an invalid origin."""
        origins = tuple(origins)
        self._names = _LOCAL_NAMES | {host.lower(), *(_name_of(each) for each in origins if each not in _HOSTLESS)}
        self._has_any = "*" in origins

    def has(self, host: str) -> bool:
        """Whether a Host header names this server. An IP address always does: no page can redefine it.

        A request without the header is no browser's: browsers always send it.
        """
        if self._has_any or not host:
            return True
        match = _HOST.fullmatch(host.strip())
        name = match["name"].strip("[]").rstrip(".").lower() if match is not None else ""
        return name in self._names or name.endswith(".localhost") or _is_address(name)


def _name_of(origin: str) -> str:
    try:
        name = urlsplit(origin).hostname
    except ValueError:
        name = None
    if not name:
        raise ConfigError(f"--allowed-origin takes origins like https://app.example, not {origin!r}")
    return name


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
