"""Which states lie on disk, and which of them is the longest prefix of a prompt.

Keys are cut into blocks of a fixed number of tokens. A block's digest is made of its tokens and of the digest before
it, so a digest stands for a whole prefix and its namespace. There are two sorts of files: a *block* has the keys and
values of a whole block; a *tail* has what a state needs behind its last whole block: the rest of the keys and values,
and the snapshot of windowed and opaque layers, if the model has such.

A prefix on disk needs every block up to its end. One that has lost a block is of no use until the block is written
again, which happens by itself: the same tokens give the same name.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

from headrace.prefix.key import Namespace, common_length

BLOCK_TOKENS = 256
"""Tokens of a block: some MB of keys and values, which a disk reads at its full speed."""
DIGEST_BYTES = 20
FORMAT_VERSION = 1
"""Of files, digests and layer descriptions together; files of another version are foreign."""


def root_digest(namespace: Namespace) -> bytes:
    """Where the chain of a namespace begins. The salt can't be read out of it."""
    parts = (str(FORMAT_VERSION), namespace.weights, namespace.adapter, namespace.salt)
    digest = blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        encoded = part.encode()
        digest.update(b"%d/" % len(encoded) + encoded)
    return digest.digest()


def next_digest(before: bytes, tokens: tuple[int, ...]) -> bytes:
    """Of the tokens and all that came before them."""
    return blake2b(before + repr(tokens).encode(), digest_size=DIGEST_BYTES).digest()


def file_name(model: str, digest: bytes, *, is_tail: bool) -> str:
    """Of a file. model: 16 hex digits, see `model_digits`; digest: of its tokens and all before them."""
    return f"{model}-{'tail' if is_tail else 'block'}-{digest.hex()}.safetensors"


def model_digits(weights: str) -> str:
    """16 hex digits for a model's fingerprint and the version of the format."""
    return blake2b(f"{FORMAT_VERSION}/{weights}".encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class Entry:
    """A file. before: digest of the blocks before its first token, `start`. num_bytes: of the whole file."""

    name: str
    before: bytes
    start: int
    tokens: tuple[int, ...]
    is_tail: bool
    num_bytes: int

    @property
    def digest(self) -> bytes:
        """Of the file's tokens and all that came before them."""
        return next_digest(self.before, self.tokens)

    @property
    def end(self) -> int:
        """Length after the file's tokens."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class DiskMatch:
    """The files that hold a state of `num_tokens` tokens, in the order of tokens; the last may hold some more."""

    num_tokens: int
    entries: tuple[Entry, ...]

    def behind(self, num_tokens: int) -> tuple[Entry, ...]:
        """The files that are needed by who has `num_tokens` tokens' keys and values already."""
        last = self.entries[-1:]
        return (*(entry for entry in self.entries[:-1] if entry.end > num_tokens), *last)


class DiskIndex:
    """Entries by what comes before them. Any thread may use it.

    has_spans: the model has sliceable layers. needs_snapshots: it has windowed or opaque ones.
    """

    def __init__(self, *, has_spans: bool, needs_snapshots: bool) -> None:
        self.has_spans = has_spans
        self.needs_snapshots = needs_snapshots
        self._lock = threading.Lock()
        self._entries: dict[str, Entry] = {}
        self._blocks: dict[bytes, Entry] = {}
        """By the digest at their end."""
        self._following: dict[bytes, dict[str, Entry]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def add(self, entry: Entry) -> None:
        """A file is there."""
        with self._lock:
            self._entries[entry.name] = entry
            self._following.setdefault(entry.before, {})[entry.name] = entry
            if not entry.is_tail:
                self._blocks[entry.digest] = entry

    def discard(self, names: Iterable[str]) -> None:
        """Files are gone; names that aren't known are none of ours."""
        with self._lock:
            for name in names:
                entry = self._entries.pop(name, None)
                if entry is None:
                    continue
                if not entry.is_tail:
                    del self._blocks[entry.digest]
                following = self._following[entry.before]
                del following[name]
                if not following:
                    del self._following[entry.before]

    def names(self) -> list[str]:
        """Of all files."""
        with self._lock:
            return list(self._entries)

    def clear(self) -> list[str]:
        """Forget all; gives the names."""
        with self._lock:
            names = list(self._entries)
            self._entries.clear()
            self._blocks.clear()
            self._following.clear()
        return names

    def match(self, root: bytes, key: tuple[int, ...], limit: int) -> DiskMatch | None:
        """The longest state held for a key, of at most `limit` tokens; None if there is none."""
        with self._lock:
            if not self._entries:
                return None
            blocks: list[Entry] = []
            before, start = root, 0
            best: DiskMatch | None = None
            while start <= limit:
                length, last = self._ending(before, start, key, limit)
                if last is not None and (best is None or length > best.num_tokens):
                    best = DiskMatch(length, (*blocks, last))
                tokens = key[start : start + BLOCK_TOKENS]
                if len(tokens) < BLOCK_TOKENS:
                    break
                digest = next_digest(before, tokens)
                if self.has_spans:
                    block = self._blocks.get(digest)
                    if block is None:
                        break
                    blocks.append(block)
                before, start = digest, start + BLOCK_TOKENS
            return best

    def _ending(self, before: bytes, start: int, key: tuple[int, ...], limit: int) -> tuple[int, Entry | None]:
        """The longest state that ends in a file behind `before`."""
        best, found = 0, None
        for entry in self._following.get(before, {}).values():
            if self.needs_snapshots:
                fits = entry.is_tail and entry.end <= limit and key[start : entry.end] == entry.tokens
                length = entry.end if fits else 0
            else:
                length = min(start + common_length(key, entry.tokens, start), limit)
                length = length if length > start else 0
            if length > best:
                best, found = length, entry
        return best, found
