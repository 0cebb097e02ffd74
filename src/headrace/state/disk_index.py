"""Which states lie on disk, and which of them is the longest prefix of a prompt.

Keys are cut into blocks of a fixed number of tokens. A block's digest is made of its tokens and of the digest before
it, so a digest stands for a whole prefix and its namespace. There are two kinds of files: a *block* has the keys and
values of a whole block; a *tail* has the rest of a state, after its last whole block: the remaining keys and values,
and the snapshot of windowed and opaque layers, if the model has any.

A prefix on disk needs every block up to its end. If one is lost, those after it are useless until it is written again;
the next write of the same tokens does that, because it gives the same name.

No file reveals its tokens, by their ids or otherwise: digests are made with a key that lies in the folder.
"""

from __future__ import annotations

import threading
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from headrace.common_prefix import common_length
from headrace.prefix.key import Namespace

BLOCK_TOKENS = 256
"""Tokens of a block: some MB of keys and values, which a disk reads at its full speed."""
DIGEST_BYTES = 20
MARK_BYTES = 8
"""Two different tokens have equal marks once in 2^64 times. Marks can't be computed without the key."""
FORMAT_VERSION = 2
"""Of files, digests and layer descriptions together; files of another version are foreign."""


class Digests:
    """Digests of a model's prompts under one key. Any thread may use them."""

    def __init__(self, key: bytes, weights: str) -> None:
        """weights: fingerprint of the weights and their format."""
        self.key = key
        self.model = f"v{FORMAT_VERSION}-{blake2b(weights.encode(), digest_size=8).hexdigest()}"
        """Begins the names of the model's files."""

    def root(self, namespace: Namespace) -> bytes:
        """Where the chain of a namespace begins. It does not reveal the salt."""
        parts = (str(FORMAT_VERSION), namespace.weights, namespace.adapter, namespace.salt)
        digest = blake2b(digest_size=DIGEST_BYTES, key=self.key, person=b"root")
        for part in parts:
            encoded = part.encode()
            digest.update(b"%d/" % len(encoded) + encoded)
        return digest.digest()

    def after(self, before: bytes, tokens: tuple[int, ...]) -> bytes:
        """Of the tokens and all before them."""
        encoded = before + repr(tokens).encode()
        return blake2b(encoded, digest_size=DIGEST_BYTES, key=self.key, person=b"tokens").digest()

    def marks(self, before: bytes, tokens: Sequence[int]) -> bytes:
        """MARK_BYTES for each token, made of it and all before it."""
        digest = blake2b(before, digest_size=MARK_BYTES, key=self.key, person=b"mark")
        marks = []
        for token in tokens:
            digest.update(b"%d," % token)
            marks.append(digest.digest())
        return b"".join(marks)


@dataclass(frozen=True, slots=True)
class Entry:
    """A file. before: digest of the blocks before its first token, `start`. marks: see Digests.

    digest: of its tokens and all before them. num_bytes: of the whole file.
    """

    name: str
    before: bytes
    digest: bytes
    start: int
    marks: bytes
    is_tail: bool
    num_bytes: int

    @property
    def end(self) -> int:
        return self.start + len(self.marks) // MARK_BYTES


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file to write. before, digest: as in its Entry. num_bytes: approximate, 0 if unknown."""

    name: str
    before: bytes
    digest: bytes
    start: int
    tokens: tuple[int, ...]
    is_tail: bool
    num_bytes: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def entry(self, digests: Digests) -> Entry:
        """The file's entry, with the approximate size."""
        marks = digests.marks(self.before, self.tokens)
        return Entry(self.name, self.before, self.digest, self.start, marks, self.is_tail, self.num_bytes)


@dataclass(frozen=True, slots=True)
class DiskMatch:
    """The files that hold a state of `num_tokens` tokens, in the order of tokens; the last may hold some more."""

    num_tokens: int
    entries: tuple[Entry, ...]

    def needed_beyond(self, num_tokens: int) -> tuple[Entry, ...]:
        """The files that are still needed if keys and values of the first `num_tokens` tokens are at hand."""
        last = self.entries[-1:]
        return (*(entry for entry in self.entries[:-1] if entry.end > num_tokens), *last)


class DiskIndex:
    """Entries by what comes before them. Any thread may use it.

    digests: with the key that the entries' were made with.
    has_spans: the model has sliceable layers. needs_snapshots: it has windowed or opaque ones.
    """

    def __init__(self, digests: Digests, *, has_spans: bool, needs_snapshots: bool) -> None:
        self._digests = digests
        self.has_spans = has_spans
        self.needs_snapshots = needs_snapshots
        self._lock = threading.Lock()
        self._entries: dict[str, Entry] = {}
        self._blocks: dict[bytes, Entry] = {}
        """By the digest at their end."""
        self._following: dict[bytes, dict[str, Entry]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: Entry) -> None:
        with self._lock:
            self._entries[entry.name] = entry
            self._following.setdefault(entry.before, {})[entry.name] = entry
            if not entry.is_tail:
                self._blocks[entry.digest] = entry

    def discard(self, names: Iterable[str]) -> None:
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
        with self._lock:
            return list(self._entries)

    def clear(self) -> list[str]:
        with self._lock:
            names = list(self._entries)
            self._entries.clear()
            self._blocks.clear()
            self._following.clear()
        return names

    def missing(
        self, root: bytes, key: tuple[int, ...], ends: Sequence[int], pending: Container[str]
    ) -> tuple[list[NewFile], list[str]]:
        """The missing files for a key's blocks and for states of its first `ends` tokens; the names of existing ones.

        Both in token order, blocks before tails. pending: names of files that are being written.
        """
        chain = [root]
        parts: list[tuple[int, int, bool]] = []
        for start in range(0, len(key) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            chain.append(self._digests.after(chain[-1], key[start : start + BLOCK_TOKENS]))
            if self.has_spans:
                parts.append((start, start + BLOCK_TOKENS, False))
        parts += [(end - end % BLOCK_TOKENS, end, True) for end in ends]
        missing: list[NewFile] = []
        known: list[str] = []
        for start, end, is_tail in parts:
            before, tokens = chain[start // BLOCK_TOKENS], key[start:end]
            digest = self._digests.after(before, tokens)
            name = f"{self._digests.model}-{'tail' if is_tail else 'block'}-{digest.hex()}.safetensors"
            if name in self._entries or name in pending:
                known.append(name)
            else:
                missing.append(NewFile(name, before, digest, start, tokens, is_tail))
        return missing, known

    def match(self, root: bytes, key: tuple[int, ...], limit: int) -> DiskMatch | None:
        """The longest state held for a key, of at most `limit` tokens; None if there is none."""
        with self._lock:
            if not self._entries:
                return None
            blocks: list[Entry] = []
            before, start = root, 0
            best: DiskMatch | None = None
            while start <= limit:
                if self.needs_snapshots and (tail := self._longest_tail(before, start, key, limit)) is not None:
                    best = DiskMatch(tail.end, (*blocks, tail))
                tokens = key[start : start + BLOCK_TOKENS]
                if len(tokens) < BLOCK_TOKENS:
                    break
                digest = self._digests.after(before, tokens)
                if self.has_spans:
                    block = self._blocks.get(digest)
                    if block is None:
                        break
                    blocks.append(block)
                before, start = digest, start + BLOCK_TOKENS
            return best if self.needs_snapshots else self._within(blocks, before, start, key, limit)

    def _longest_tail(self, before: bytes, start: int, key: tuple[int, ...], limit: int) -> Entry | None:
        digests: dict[int, bytes] = {}
        found: Entry | None = None
        for entry in self._following.get(before, {}).values():
            end = entry.end
            if not entry.is_tail or end > limit or (found is not None and end <= found.end):
                continue
            if end not in digests:
                digests[end] = self._digests.after(before, key[start:end])
            if digests[end] == entry.digest:
                found = entry
        return found

    def _within(
        self, blocks: Sequence[Entry], before: bytes, start: int, key: tuple[int, ...], limit: int
    ) -> DiskMatch | None:
        """The longest state in whole blocks and what agrees of a file after them, if any length will do."""
        following = self._following.get(before, {}).values() if start < limit else ()
        marks = self._digests.marks(before, key[start : min(start + BLOCK_TOKENS, limit)]) if following else b""
        num_more, last = 0, None
        for entry in following:
            num_equal = common_length(marks, entry.marks) // MARK_BYTES
            if num_equal > num_more:
                num_more, last = num_equal, entry
        num_tokens = min(start + num_more, limit)
        return DiskMatch(num_tokens, (*blocks, *(() if last is None else (last,)))) if num_tokens else None
