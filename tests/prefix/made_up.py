"""Pieces that know what they hold, and a maker that counts them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from weakref import WeakValueDictionary

from headrace.prefix.key import Namespace
from headrace.prefix.node import HeldPieces, MakeSpan, Match, Piece
from headrace.prefix.radix import PrefixTree

HERE = Namespace("weights")
THERE = Namespace("weights", salt="another tenant")
SPAN_OVERHEAD_BYTES = 3
"""So that two halves weigh more than the whole, as blocks that are held by both do."""


@dataclass(frozen=True, eq=False)
class MadeUpPiece:
    """Tokens `start` to the end of `prefix`, all of whose tokens decide the values; a snapshot starts at its end."""

    namespace: Namespace
    prefix: tuple[int, ...]
    start: int
    num_bytes: int
    store: MadeUpStore = field(repr=False)

    def part(self, start: int, end: int) -> MadeUpPiece:
        return self.store.part(self, start, end)

    @property
    def is_snapshot(self) -> bool:
        return self.start == len(self.prefix)


@dataclass
class MadeUpStore:
    """Makes pieces. live: those that are still referenced. parts: the tokens of each copied part of a piece."""

    bytes_per_token: int = 10
    snapshot_bytes: int = 50
    num_cut_tokens: int = 0
    parts: list[tuple[int, int]] = field(default_factory=list)
    _made: WeakValueDictionary[int, MadeUpPiece] = field(default_factory=WeakValueDictionary)
    _number: Iterator[int] = field(default_factory=count)

    @property
    def live(self) -> list[MadeUpPiece]:
        return list(self._made.values())

    @property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.live)

    def span(self, namespace: Namespace, prefix: Sequence[int], start: int) -> MadeUpPiece:
        num_bytes = (len(prefix) - start) * self.bytes_per_token + SPAN_OVERHEAD_BYTES
        return self._make(namespace, tuple(prefix), start, num_bytes)

    def snapshot(self, namespace: Namespace, prefix: Sequence[int]) -> MadeUpPiece:
        return self._make(namespace, tuple(prefix), len(prefix), self.snapshot_bytes)

    def cutter(self, namespace: Namespace, key: Sequence[int]) -> MakeSpan:
        def make_span(start: int, end: int) -> MadeUpPiece:
            assert 0 <= start < end <= len(key)
            self.num_cut_tokens += end - start
            return self.span(namespace, key[:end], start)

        return make_span

    def part(self, piece: MadeUpPiece, start: int, end: int) -> MadeUpPiece:
        assert piece.start <= start < end <= len(piece.prefix)
        self.parts.append((start, end))
        return self.span(piece.namespace, piece.prefix[:end], start)

    def _make(self, namespace: Namespace, prefix: tuple[int, ...], start: int, num_bytes: int) -> MadeUpPiece:
        piece = self._made[next(self._number)] = MadeUpPiece(namespace, prefix, start, num_bytes, self)
        return piece


@dataclass
class Shelf:
    """A tree with its store, for one sort of model."""

    has_spans: bool
    needs_snapshots: bool
    store: MadeUpStore = field(default_factory=MadeUpStore)
    tree: PrefixTree = field(init=False)

    def __post_init__(self) -> None:
        self.tree = PrefixTree(has_spans=self.has_spans, needs_snapshots=self.needs_snapshots)

    def put(self, key: Sequence[int], snapshots: Sequence[int] = (), namespace: Namespace = HERE) -> None:
        """Insert a key with snapshots at some lengths, if the model needs any."""
        key = tuple(key)
        lengths = snapshots if self.needs_snapshots else ()
        pieces: Mapping[int, Piece] = {one: self.store.snapshot(namespace, key[:one]) for one in lengths}
        make_span = self.store.cutter(namespace, key) if self.has_spans else None
        self.tree.insert(namespace, key, make_span=make_span, snapshots=pieces)

    def length(self, key: Sequence[int], namespace: Namespace = HERE) -> int:
        """How many tokens of a prompt need no computing."""
        return self.find(key, namespace).num_tokens

    def find(self, key: Sequence[int], namespace: Namespace = HERE) -> Match:
        """What a prompt continues from."""
        match = self.tree.match(namespace, tuple(key), len(key) - 1)
        self.tree.use(match)
        return match

    def best_length(self, key: Sequence[int], limit: int, namespace: Namespace = HERE) -> int:
        """The deepest usable length by the live pieces, checked one by one."""
        key = tuple(key)
        covered: set[int] = set()
        ends = set(range(1, limit + 1))
        mine = [piece for piece in self.store.live if piece.namespace == namespace]
        for span in (piece for piece in mine if not piece.is_snapshot):
            if span.prefix[: span.start] == key[: span.start]:
                pairs = zip(span.prefix[span.start :], key[span.start :], strict=False)
                for place, (held, wanted) in enumerate(pairs, span.start):
                    if held != wanted:
                        break
                    covered.add(place)
        if self.needs_snapshots:
            ends &= {one.start for one in mine if one.is_snapshot and one.prefix == key[: one.start]}
        if self.has_spans:
            reach = next(place for place in range(len(key) + 1) if place not in covered)
            ends = {end for end in ends if end <= reach}
        return max(ends, default=0)

    def held_bytes(self, matches: Iterable[Match]) -> int:
        """Bytes of the pieces that matches are restored from, each once."""
        held = [self.tree.read(match) for match in matches]
        pieces = {span for each in held for span in each.spans}
        pieces |= {each.snapshot for each in held if each.snapshot is not None}
        return sum(piece.num_bytes for piece in pieces)

    def check_held(self, held: HeldPieces, key: Sequence[int], namespace: Namespace = HERE) -> None:
        """What was read is alive, is the key's own, and is whole."""
        key = tuple(key)
        place = 0
        for span in held.spans:
            assert span in self.store.live and isinstance(span, MadeUpPiece)
            assert span.namespace == namespace and span.start == place < held.num_tokens
            place = min(len(span.prefix), held.num_tokens)
            assert span.prefix[:place] == key[:place]
        assert place == (held.num_tokens if self.has_spans else 0)
        if self.needs_snapshots and held.num_tokens:
            assert held.snapshot in self.store.live and isinstance(held.snapshot, MadeUpPiece)
            assert held.snapshot.is_snapshot and held.snapshot.namespace == namespace
            assert held.snapshot.prefix == key[: held.num_tokens]
        else:
            assert held.snapshot is None


def made_up_tokens(seed: int, num_tokens: int) -> tuple[int, ...]:
    """Token ids that agree with those of no other seed."""
    return tuple((seed * 1_000_003 + place * 7) % 150_000 + seed * 150_000 for place in range(num_tokens))
