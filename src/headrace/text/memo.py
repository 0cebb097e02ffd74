"""Digests that name what is cached between the turns of a conversation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

_DIGEST_BYTES = 20


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
        """Of the first `length` characters."""
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
    """Of a template's variables, which are JSON values."""
    return digest_of(repr(sorted(variables.items(), key=lambda item: item[0])))


def chain(values: Iterable[object], before: bytes) -> list[bytes]:
    """Digests of the first 0, 1, 2, … of some frozen values, after `before`."""
    digests = [before]
    for value in values:
        digests.append(digest_of(repr(value), digests[-1]))
    return digests
