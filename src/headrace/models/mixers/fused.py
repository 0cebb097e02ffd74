"""Mixers that are kernels of ours, and steps in which they read their rows' arrays and give new ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx

from headrace.models.step import PackedStep, View
from headrace.state.layer import LayerKey

Table = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Held:
    """What a layer reads in a step besides its input: tables for the kernels, arrays of its rows' states.

    constants: what its launches depend on besides the arrays' shapes. states: of the rows, in their order.
    """

    tables: tuple[Table, ...]
    arrays: tuple[mx.array, ...]
    constants: tuple[int, ...]
    states: Sequence[Any] = ()


@dataclass(frozen=True, slots=True)
class Feed:
    """The same with the tables on the device; in a step that is being compiled the arrays are placeholders."""

    tables: Sequence[mx.array]
    arrays: Sequence[mx.array]
    constants: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Exchange:
    """Feeds of a step's layers, and what each gives back."""

    feeds: dict[LayerKey, Feed]
    given: dict[LayerKey, Sequence[mx.array]] = field(default_factory=dict)


def coarse(num_tokens: int) -> int:
    """The next power of two: steps whose rows' most tokens differ a little have one form."""
    return 1 << (num_tokens - 1).bit_length()


class FusedMixer(Protocol):
    """A mixer whose work on rows of a few tokens is a function of arrays."""

    def held(self, view: View) -> Held | None:
        """What it reads in this step; None if some row needs another way."""

    def compute(
        self, x: mx.array, positions: mx.array, feed: Feed, residual: mx.array | None = None
    ) -> tuple[mx.array, Sequence[mx.array]]:
        """Input `[1, T, hidden]` to output, residual added, and the arrays that the rows' states go on with."""

    def take_over(self, step: PackedStep, held: Held, given: Sequence[mx.array]) -> None:
        """Put those into the states."""
