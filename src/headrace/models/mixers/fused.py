"""Mixers that run as our kernels: what they read and return, and the padded sizes of their compiled steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from headrace.backend.cuda.shapes import LONGEST_WINDOW
from headrace.models.step import RowSpan
from headrace.state.layer import LayerKey

Table = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class KindInputs:
    """Inputs of all layers of one kind in a step, besides their hidden states.

    tables: the same for all of them. arrays: each layer's states, as many per layer, one layer after the other.
    constants: launch parameters besides the arrays' shapes.
    """

    tables: tuple[Table, ...]
    arrays: Sequence[mx.array]
    constants: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """One layer's part of `KindInputs`, tables on the device; while a step is traced the arrays are placeholders."""

    tables: Sequence[mx.array]
    arrays: Sequence[mx.array]
    constants: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LayerIO:
    """Inputs of a compiled step's layers, and their outputs besides the hidden states.

    num_tokens: int32 `[1]`, on the device: packed tokens without the padding.
    """

    inputs: dict[LayerKey, LayerInputs]
    num_tokens: mx.array
    outputs: dict[LayerKey, Sequence[mx.array]] = field(default_factory=dict)


MOST_TOKENS = LONGEST_WINDOW
"""Tokens of a row in a window; a row with more is a prompt's chunk."""


def is_window(span: RowSpan) -> bool:
    """Whether a row has a few tokens and no snapshot among them, as in decoding; the others are chunks."""
    return span.num_tokens <= MOST_TOKENS and not span.state.snapshot_points


def padded_row_tokens(num_tokens: int) -> int:
    """The launch size for rows of at most so many tokens: 1, MOST_TOKENS, or a power of two.

    So steps whose windows differ a little share a compiled variant; unused slots of a launch take no time.
    """
    return 1 if num_tokens == 1 else max(MOST_TOKENS, next_power_of_two(num_tokens))


def next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def padded_rows(num_rows: int) -> int:
    """The next power of two, or three quarters of it if that is enough: 1, 2, 3, 4, 6, 8, 12, 16, 24, …

    Compiled steps of windows are padded to so many rows, so that not every number of rows needs a variant.
    """
    power = next_power_of_two(num_rows)
    return power * 3 // 4 if num_rows <= power * 3 // 4 else power


def padded_chunk_tokens(num_tokens: int) -> int:
    return max(64, next_power_of_two(num_tokens)) if num_tokens <= 512 else -(-num_tokens // 256) * 256


def padded_chunks(number: int) -> int:
    """The next power of four: for the rows of compiled steps of chunks."""
    return 1 << -(-(number - 1).bit_length() // 2) * 2


def padded_stops(number: int, num_rows: int) -> int:
    """At how many places a compiled step of chunks leaves states, for `number` snapshot points in padded rows.

    As many as rows, or the next power of four; from 64 on the next multiple of 64, because each place takes the memory
    of a sequence's running states. A step without any has one, which is not read.
    """
    if number == 0:
        return 1
    return max(num_rows, padded_chunks(number) if number <= 64 else -(-number // 64) * 64)


@dataclass(frozen=True, slots=True)
class PaddedSize:
    """The size of a compiled step; rows and tokens after the real ones are padding."""

    num_rows: int
    num_tokens: int

    def padded(self, table: Table) -> Table:
        """The table with rows of zeros: rows without tokens."""
        return (*table, *[(0,) * len(table[0])] * (self.num_rows - len(table)))


def padded_size(spans: Sequence[RowSpan]) -> PaddedSize:
    """The bucket for these rows. Chunks are padded more coarsely, since the device takes longer for them anyway."""
    num_tokens = spans[-1].hi
    if all(is_window(span) for span in spans):
        num_rows = padded_rows(len(spans))
        return PaddedSize(num_rows, num_rows * next_power_of_two(-(-num_tokens // num_rows)))
    return PaddedSize(padded_chunks(len(spans)), padded_chunk_tokens(num_tokens))
