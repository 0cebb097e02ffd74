"""Stored pieces, which this room only knows by their size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class Piece(Protocol):
    """An immutable stored part of a state. There are two kinds.

    A *span* holds the sliceable layers' state of consecutive tokens; a *snapshot* holds all windowed and opaque layers
    at exactly one length.
    """

    @property
    def num_bytes(self) -> int:
        """Bytes held by the piece; constant."""


class Store(Protocol):
    """Creates and frees pieces. A tree owns the inserted ones and drops each exactly once.

    Neither method may call the tree.
    """

    def split(self, span: Piece, num_tokens: int) -> tuple[Piece, Piece]:
        """Replace a span by two, of the first `num_tokens` tokens and of the rest.

        Both have at least one token. Eviction calls this too, when bytes are short: hold spans in blocks of tokens, so
        that at most one block has to be copied. If it raises, the span must still be whole.
        """

    def drop(self, piece: Piece) -> None:
        """Let go of a span or snapshot."""


CutSpan = Callable[[int, int], Piece]
"""Makes the span of a sequence's tokens `start` to `end`. May raise; must not call the tree."""


@dataclass(frozen=True, slots=True)
class SpanPart:
    """The first `end - start` tokens of `piece` are the sequence's tokens `start` to `end`."""

    piece: Piece
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class HeldPieces:
    """The pieces from which a state of `num_tokens` tokens is restored.

    spans: consecutive, from token 0 to num_tokens; none if the model has no sliceable layers.
    snapshot: at exactly num_tokens; None if the model needs none, and at length 0.
    """

    num_tokens: int
    spans: tuple[SpanPart, ...]
    snapshot: Piece | None
