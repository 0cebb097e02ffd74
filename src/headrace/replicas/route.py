"""Where a request belongs: to the replica that its ids name, else to that of its conversation."""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from pydantic_core import from_json

from headrace.api.ids import replica_of
from headrace.server.session_header import session_header

ROUTE_HEADER = "x-headrace-route"
"""From Ray's proxy to the router; the same from a client is dropped."""

REPLICA_HEADER = "x-headrace-replica"
"""In an answer the replica that gave it; in a request the one that should."""

HEAD_BYTES = 1 << 20
"""So much of a body is read to find out where it belongs."""

_PATH_WITH_ID = re.compile(r"/v1/(?:responses|requests)/([^/]+)(?:/|$)")

_GENERATING = re.compile(
    r"/v1/(?:chat/completions|completions|messages(?:/count_tokens)?|responses(?:/input_tokens)?|embeddings|rerank|score)"
)

_PROMPT_HEAD = 1024
"""Characters or token ids. A shorter prompt is computed soon wherever it goes."""

_MAX_TEXT = 65_536
"""Characters of a message that count, so that they are within HEAD_BYTES."""

_FORM = frozenset({"type", "role", "cache_control"})
"""Fields that say nothing of a message's content."""


@dataclass(frozen=True, slots=True)
class ConversationRoute:
    """replica: the one that has what the request names, if it still runs. key: the conversation; empty for none."""

    replica: str = ""
    key: str = ""

    def encoded(self) -> str:
        return f"{self.replica}/{self.key}"

    @classmethod
    def decoded(cls, text: str) -> ConversationRoute:
        replica, _, key = text.partition("/")
        return cls(replica, key)


def has_routed_body(method: str, path: str) -> bool:
    return method == "POST" and _GENERATING.fullmatch(path) is not None


def route_of(path: str, headers: Mapping[str, str], body: bytes) -> ConversationRoute:
    """headers: with lower-case names. body: its first HEAD_BYTES, empty if `has_routed_body` is false."""
    named = headers.get(REPLICA_HEADER, "")
    if named.isascii() and named.isalnum():
        return ConversationRoute(replica=named)
    if found := _PATH_WITH_ID.match(path):
        return ConversationRoute(replica_of(found[1]) or "")
    fields = _fields(body)
    session = session_header(headers) or fields.get("prompt_cache_key")
    key = session if isinstance(session, str) else "\0".join(_texts(_beginning(fields)))
    return ConversationRoute(_owner(fields), _digest(key) if key else "")


def _fields(body: bytes) -> dict[str, Any]:
    """The fields of a JSON body as far as it was read; none for anything else, which its replica refuses."""
    try:
        value = from_json(body.removeprefix(BOM_UTF8), allow_partial="trailing-strings") if body else None
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _beginning(fields: Mapping[str, Any]) -> Any:
    """What all turns of a conversation have in common: its messages up to the user's first, or a prompt's head.

    Neither a model's name nor instructions in a separate field: in a long body they may come after the messages,
    where nothing reads them.
    """
    if "prompt" in fields:
        prompt = fields["prompt"]
        return prompt[:_PROMPT_HEAD] if isinstance(prompt, str | list) else None
    turns = fields.get("messages", fields.get("input"))
    if not isinstance(turns, list):
        return turns
    first = next((index for index, turn in enumerate(turns) if _is_users(turn)), 0)
    return turns[: first + 1]


def _is_users(turn: Any) -> bool:
    return isinstance(turn, dict) and turn.get("role") == "user"


def _texts(value: Any) -> Iterator[str]:
    """All texts and numbers in a value. A message has the same ones as a text and as a list of parts.

    Cache marks are left out: clients move them from message to message.
    """
    if isinstance(value, str):
        yield value[:_MAX_TEXT]
    elif isinstance(value, int):
        yield str(value)
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)
    elif isinstance(value, dict):
        for name, each in value.items():
            if name not in _FORM:
                yield from _texts(each)


def _owner(fields: Mapping[str, Any]) -> str:
    """The replica that stored what a response continues or refers to."""
    items = fields.get("input")
    items = items if isinstance(items, list) else []
    referred = (item.get("id") for item in items if isinstance(item, dict) and item.get("type") == "item_reference")
    ids = (fields.get("previous_response_id"), *referred)
    return next((owner for id in ids if isinstance(id, str) and (owner := replica_of(id)) is not None), "")


def _digest(text: str) -> str:
    return blake2b(text.encode("utf-8", "replace"), digest_size=16).hexdigest()
