"""The sizes that compiled steps are padded to, few of them because each needs a compiled variant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.backend.cuda.shapes import LONGEST_WINDOW
from headrace.models.step import Row, Table


def padded_row_tokens(num_tokens: int) -> int:
    """The launch size for rows of at most so many tokens: 1, LONGEST_WINDOW, or a power of two.

    So steps whose windows differ a little share a compiled variant; unused slots of a launch take no time.
    """
    return 1 if num_tokens == 1 else max(LONGEST_WINDOW, next_power_of_two(num_tokens))


def next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def padded_rows(num_rows: int) -> int:
    """For windows: the next power of two, or three quarters of it if that is enough: 1, 2, 3, 4, 6, 8, 12, 16, 24, …"""
    power = next_power_of_two(num_rows)
    return power * 3 // 4 if num_rows <= power * 3 // 4 else power


def padded_chunk_tokens(num_tokens: int) -> int:
    return max(64, next_power_of_two(num_tokens)) if num_tokens <= 512 else -(-num_tokens // 256) * 256


def padded_chunks(number: int) -> int:
    """For rows with chunks: the next power of four."""
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


def padded_size(rows: Sequence[Row]) -> PaddedSize:
    """Chunks are padded more coarsely, since the device takes longer for them anyway."""
    num_tokens = rows[-1].hi
    if all(row.is_short for row in rows):
        num_rows = padded_rows(len(rows))
        return PaddedSize(num_rows, num_rows * next_power_of_two(-(-num_tokens // num_rows)))
    return PaddedSize(padded_chunks(len(rows)), padded_chunk_tokens(num_tokens))
