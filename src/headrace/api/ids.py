"""Ids of requests, answers and items. Where several replicas answer, an id says which of them made it."""

from __future__ import annotations

import re
import secrets

_REPLICA = re.compile(r"-r([a-z0-9]{8})(?:-\d+)*$")
"""The end of an id; the engine adds numbers for the prompts of one request."""

_ending = ""


def name_replica(name: str) -> None:
    """Have all ids that this process makes from now on end with its replica's name: eight letters and digits."""
    global _ending
    _ending = f"-r{name}" if name else ""


def new_id(prefix: str, num_bytes: int = 16) -> str:
    """The prefix and random hexadecimal digits, two for each byte."""
    return f"{prefix}{secrets.token_hex(num_bytes)}{_ending}"


def replica_of(id: str) -> str | None:
    """The replica that made an id. None for an id of a server without replicas, and for a client's own."""
    found = _REPLICA.search(id)
    return found[1] if found is not None else None
