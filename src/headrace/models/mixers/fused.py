"""Mixers that are kernels of ours, and steps in which they read their rows' arrays and give new ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from headrace.backend.cuda.shapes import LONGEST_WINDOW
from headrace.models.step import RowSpan
from headrace.state.layer import LayerKey

Table = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Held:
    """What the layers of a kind read in a step besides their inputs: the same tables, and each its rows' arrays.

    arrays: as many of each layer, one layer behind the other. constants: what the launches depend on besides the
    arrays' shapes.
    """

    tables: tuple[Table, ...]
    arrays: Sequence[mx.array]
    constants: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Feed:
    """The same for one layer, with the tables on the device; in a step that is being compiled the arrays are
    placeholders."""

    tables: Sequence[mx.array]
    arrays: Sequence[mx.array]
    constants: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Exchange:
    """Feeds of a step's layers, and what each gives back.

    num_tokens: int32 `[1]`, on the device: how many packed tokens are some row's.
    """

    feeds: dict[LayerKey, Feed]
    num_tokens: mx.array
    given: dict[LayerKey, Sequence[mx.array]] = field(default_factory=dict)


MOST_TOKENS = LONGEST_WINDOW
"""Of a row in a window; a longer one is a prompt's chunk."""


def is_window(span: RowSpan) -> bool:
    """Whether a row has a few tokens and leaves nothing on the way, as in decoding; the others are chunks."""
    return span.num_tokens <= MOST_TOKENS and not span.state.marks


def room_for(num_tokens: int) -> int:
    """What launches have room for where rows have so many tokens at most: one, MOST_TOKENS, or a power of two.

    Steps whose rows' windows differ a little have one form; what there is room for and isn't there takes no time.
    """
    return 1 if num_tokens == 1 else max(MOST_TOKENS, coarse(num_tokens))


def coarse(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()


def padded_rows(num_rows: int) -> int:
    """The next power of two, or three quarters of it if that is enough: 1, 2, 3, 4, 6, 8, 12, 16, 24, …

    Compiled steps of windows have so many rows, those behind the real ones of no tokens: one row more or less needs no
    form of its own.
    """
    power = coarse(num_rows)
    return power * 3 // 4 if num_rows <= power * 3 // 4 else power


def padded_chunk_tokens(num_tokens: int) -> int:
    """The next power of two up to 512, 64 at least, and behind that the next multiple of 256."""
    return max(64, coarse(num_tokens)) if num_tokens <= 512 else -(-num_tokens // 256) * 256


def padded_chunks(number: int) -> int:
    """The next power of four: of rows in compiled steps of chunks, and of their stops."""
    return 1 << -(-(number - 1).bit_length() // 2) * 2


@dataclass(frozen=True, slots=True)
class Room:
    """What a compiled step has room for; what is behind the real tokens belongs to no row."""

    num_rows: int
    num_tokens: int

    def padded(self, table: Table) -> Table:
        """With rows of zeros, which are rows of no tokens."""
        return (*table, *[(0,) * len(table[0])] * (self.num_rows - len(table)))


def room_of(spans: Sequence[RowSpan]) -> Room:
    """For these rows: few sizes do for all. Of chunks there is room for more, since the device has more to do."""
    num_tokens = spans[-1].hi
    if all(is_window(span) for span in spans):
        num_rows = padded_rows(len(spans))
        return Room(num_rows, num_rows * coarse(-(-num_tokens // num_rows)))
    return Room(padded_chunks(len(spans)), padded_chunk_tokens(num_tokens))
