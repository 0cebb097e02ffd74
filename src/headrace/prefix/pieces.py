"""Stored pieces, as far as this room knows them: how many bytes they hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class Piece(Protocol):
    """A stored part of a state, immutable. There are two sorts.

    A *span* holds what sliceable layers keep of some consecutive tokens; a *snapshot* holds all windowed and opaque
    layers at exactly one length.
    """

    @property
    def num_bytes(self) -> int:
        """Bytes that the piece keeps; never changes."""


class Store(Protocol):
    """Who makes the pieces. A tree owns those that were inserted and gives each back exactly once.

    Neither method may call the tree.
    """

    def split(self, span: Piece, num_tokens: int) -> tuple[Piece, Piece]:
        """Two spans, of the first `num_tokens` tokens and of the rest, in place of one that is not used any more.

        Both have at least a token. Eviction calls this too, when bytes are short: hold spans in blocks of tokens, so
        that one block at most has to be copied. If it raises, the span must still be whole.
        """

    def drop(self, piece: Piece) -> None:
        """Let go of a span or snapshot."""


CutSpan = Callable[[int, int], Piece]
"""Makes the span of a sequence's tokens `start` to `end`. May raise; must not call the tree."""


@dataclass(frozen=True, slots=True)
class SpanPart:
    """The sequence's tokens `start` to `end` are the first `end - start` tokens of `piece`."""

    piece: Piece
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class HeldPieces:
    """What a state of `num_tokens` tokens is restored from.

    spans: one after the other, from token 0 to num_tokens; none if the model has no sliceable layers.
    snapshot: at exactly num_tokens; None if the model needs none, and at length 0.
    """

    num_tokens: int
    spans: tuple[SpanPart, ...]
    snapshot: Piece | None
