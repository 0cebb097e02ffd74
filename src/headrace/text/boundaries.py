"""Finds where a rendered conversation may branch: prefixes that stay the same when it continues differently.

Found by rendering prefixes of the conversation and comparing. Rendered prefixes are cached by digest, so that the next
turn of the conversation renders only the new ones.

Text that two renderings share need not be shared tokens, because a merge may cross its end; so a boundary is moved back
to the end of the last control token that the template wrote, which nothing after it can change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from headrace.common_prefix import common_length
from headrace.lru_cache import LruCache
from headrace.text.normalise import num_leading_system
from headrace.text.template_probe import Render
from headrace.types.chat import ChatMessage, Role, TextPart
from headrace.types.request import BoundaryKind

# Boundaries of older messages are seldom worth a rendering each.
MAX_MESSAGES = 16

_DIGEST_BYTES = 20


@dataclass(frozen=True, slots=True)
class TextBoundary:
    """The first `length` characters of the rendered text stay the same."""

    length: int
    kind: BoundaryKind


class RenderedPrefixes:
    """Prefixes of one conversation, rendered separately unless cached.

    cache: prefixes of any conversations. salt: digest of whatever decides a rendering besides the messages.
    """

    def __init__(
        self,
        rendered: str,
        messages: tuple[ChatMessage, ...],
        render: Render,
        cache: LruCache[bytes, TextDigest],
        salt: bytes,
    ) -> None:
        self.rendered = rendered
        self.render = render
        self._cache = cache
        self._keys = chain(messages, salt)
        self._digests = PrefixDigests(rendered)

    def length_of(self, head: tuple[ChatMessage, ...]) -> int | None:
        """Characters of the head alone, if the rendered text begins with it. head: the first messages."""
        key = self._keys[len(head)]
        known = self._cache.get(key)
        if known is not None and self._digests.include(known):
            return known.length
        alone = self.render(head)
        if alone is None or not self.rendered.startswith(alone):
            return None
        self._cache.put(key, self._digests.of(len(alone)))
        return len(alone)


def find_boundaries(
    messages: tuple[ChatMessage, ...], settled: tuple[ChatMessage, ...], prefixes: RenderedPrefixes, *, has_tools: bool
) -> list[TextBoundary]:
    """Boundaries of a rendered prompt, not yet moved to token borders and perhaps not rising.

    settled: the messages without an unfinished last one, which belongs to the answer: the prompt ends before it. A
    template that refuses a prefix gives no boundary there.
    """
    found = []
    num_system = num_leading_system(settled)
    following = messages[num_system].role if num_system < len(messages) else "user"
    if num_system or has_tools:
        found.append((shared_length(messages[:num_system], following, prefixes), BoundaryKind.SYSTEM))
    for end in range(max(num_system + 1, len(settled) - MAX_MESSAGES), len(settled)):
        found.append((shared_length(settled[:end], settled[end].role, prefixes), BoundaryKind.MESSAGE))
    if settled:
        found.append((_prompt_length(settled, prefixes), BoundaryKind.PROMPT))
    return [TextBoundary(length, kind) for length, kind in found if length]


def _prompt_length(messages: tuple[ChatMessage, ...], prefixes: RenderedPrefixes) -> int:
    length = shared_length(messages, "assistant", prefixes)
    answered = prefixes.render((*messages, _probe("assistant")))
    return length if answered is None else min(length, common_length(prefixes.rendered, answered))


def shared_length(head: tuple[ChatMessage, ...], following: Role, prefixes: RenderedPrefixes) -> int:
    """How many characters of the rendered text depend only on the head of the conversation; 0 if unknown.

    If the text begins with the head alone, that is all of it. Some templates change a turn once another one follows;
    then a head with another next turn is compared.
    """
    alone = prefixes.length_of(head) if head else None
    if alone is not None:
        return alone
    followed = prefixes.render((*head, _probe(following)))
    return 0 if followed is None else common_length(prefixes.rendered, followed)


def _probe(role: Role) -> ChatMessage:
    tool_call_id = "000000000" if role == "tool" else None
    return ChatMessage(role=role, content=(TextPart("?"),), tool_call_id=tool_call_id)


@dataclass(frozen=True, slots=True)
class TextDigest:
    """A text's length and digest, to test whether another text begins with it."""

    length: int
    digest: bytes


class PrefixDigests:
    """Digests of a text's prefixes; requested in rising order, they take one pass over it."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._length = 0
        self._hash = blake2b(digest_size=_DIGEST_BYTES)

    def of(self, length: int) -> TextDigest:
        if length < self._length:
            self._length, self._hash = 0, blake2b(digest_size=_DIGEST_BYTES)
        self._hash.update(_as_bytes(self._text[self._length : length]))
        self._length = length
        return TextDigest(length, self._hash.digest())

    def include(self, known: TextDigest) -> bool:
        """Whether the text begins with the text of this digest."""
        return known.length <= len(self._text) and self.of(known.length) == known


def digest_of(text: str, before: bytes = b"") -> bytes:
    """The digest of a text that follows the one of digest `before`."""
    return blake2b(before + _as_bytes(text), digest_size=_DIGEST_BYTES).digest()


def _as_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def digest_of_variables(variables: Mapping[str, Any]) -> bytes:
    return digest_of(repr(sorted(variables.items(), key=lambda item: item[0])))


def chain(values: Iterable[object], before: bytes) -> list[bytes]:
    """Digests of the first 0, 1, 2, … of some frozen values, after `before`."""
    digests = [before]
    for value in values:
        digests.append(digest_of(repr(value), digests[-1]))
    return digests
