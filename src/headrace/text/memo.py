"""What renderings have shown, remembered from one turn of a conversation to the next."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")


class Memo(Generic[Value]):
    """The values that were of use last, by a digest of what decides them. Any thread may use it."""

    def __init__(self, max_weight: int) -> None:
        self._max_weight = max_weight
        self._weight = 0
        self._values: OrderedDict[bytes, tuple[Value, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: bytes) -> Value | None:
        with self._lock:
            found = self._values.get(key)
            if found is None:
                return None
            self._values.move_to_end(key)
            return found[0]

    def put(self, key: bytes, value: Value, weight: int = 1) -> None:
        """Remember a value, and forget old ones until all together weigh no more than they may."""
        with self._lock:
            replaced = self._values.pop(key, None)
            self._values[key] = value, weight
            self._weight += weight - (0 if replaced is None else replaced[1])
            while self._weight > self._max_weight:
                _, (_, gone) = self._values.popitem(last=False)
                self._weight -= gone


@dataclass(frozen=True, slots=True)
class TextDigest:
    """A text by its length and digest: tells whether another one begins with it."""

    length: int
    digest: bytes

    @classmethod
    def of(cls, text: str) -> TextDigest:
        return cls(len(text), digest_of(text))

    def begins(self, text: str) -> bool:
        """Whether a text begins with the one that this is of."""
        return len(text) >= self.length and digest_of(text[: self.length]) == self.digest


def digest_of(text: str, before: bytes = b"") -> bytes:
    """Of a text behind whatever `before` is the digest of."""
    return blake2b(before + text.encode("utf-8", "surrogatepass"), digest_size=20).digest()


def digest_of_variables(variables: Mapping[str, Any]) -> bytes:
    """Of a template's variables, which are JSON values."""
    return digest_of(repr(sorted(variables.items(), key=lambda item: item[0])))


def chain(values: Iterable[object], before: bytes) -> list[bytes]:
    """Digests of the first 0, 1, 2, … of some frozen values, behind `before`."""
    digests = [before]
    for value in values:
        digests.append(digest_of(repr(value), digests[-1]))
    return digests
