"""Media in a packed step: positions, embeddings, and additions to deeper layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from headrace.models.patches import Restore, override_forward
from headrace.models.positions import TokenPositions
from headrace.models.step import NO_SPANS, BidirectionalSpans, Row
from headrace.models.vision_tower import MediaEmbeddings
from headrace.types.media import Bidirectional, MediaInput, PromptMedia


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddedSpan:
    """The tokens `lo` to `hi` of a row stand for an input or a part of it."""

    lo: int
    hi: int
    embeddings: MediaEmbeddings


@dataclass(frozen=True, slots=True, eq=False)
class RowMedia:
    """The media of the tokens of one row in one step.

    positions: int32 `[3, n]`.
    spans: rising, without overlap.
    bidirectional: where tokens of a span attend in both directions.
    """

    positions: npt.NDArray[np.int32]
    spans: tuple[EmbeddedSpan, ...] = ()
    bidirectional: Bidirectional = Bidirectional.NOWHERE

    @property
    def bidirectional_spans(self) -> BidirectionalSpans:
        if self.bidirectional is Bidirectional.NOWHERE:
            return NO_SPANS
        spans = tuple((span.lo, span.hi) for span in self.spans)
        return BidirectionalSpans(windowed=spans, full=spans if self.bidirectional is Bidirectional.EVERYWHERE else ())


def inputs_within(media: PromptMedia, start: int, end: int) -> tuple[MediaInput, ...]:
    """The inputs that have placeholders among the tokens `start` to `end` of their sequence."""
    return tuple(each for each in media.inputs if each.start < end and start < each.end)


def row_media(media: PromptMedia, start: int, end: int, embedded: Mapping[bytes, MediaEmbeddings]) -> RowMedia:
    """The media of a sequence's tokens `start` to `end`, prompt or output.

    embedded: by digest, of at least `inputs_within` these tokens.
    """
    spans = []
    for each in inputs_within(media, start, end):
        lo, hi = max(start, each.start), min(end, each.end)
        rows = slice(lo - each.start, hi - each.start)
        whole = embedded[each.digest]
        part = MediaEmbeddings(whole.rows[rows], tuple(layer[rows] for layer in whole.deep))
        spans.append(EmbeddedSpan(lo - start, hi - start, part))
    return RowMedia(media_positions(media, start, end), tuple(spans), media.bidirectional)


def media_positions(media: PromptMedia, start: int, end: int) -> npt.NDArray[np.int32]:
    """Positions `[3, n]` of a sequence's tokens `start` to `end`, prompt or output."""
    later = np.arange(start, end, dtype=np.int32) + np.int32(media.rope_delta)
    positions = np.stack([later] * 3)
    if media.positions is not None:
        of_prompt = np.asarray(media.positions)[:, start:end]
        positions[:, : of_prompt.shape[1]] = of_prompt
    return positions


def entry_at(positions: TokenPositions, start: int, end: int) -> RowMedia:
    """For a prediction head, which reads each token at the position of the one before it."""
    return RowMedia(_on_all_axes(positions.at(start - 1, end - 1)))


def packed_positions(rows: Sequence[Row], shift: int = 0) -> npt.NDArray[np.int32]:
    """Positions of packed rows: `[T]`, or `[3, T]` if the axes differ anywhere.

    shift: added to the indices of tokens where neither their media nor the row give positions.
    """
    given = [_given_positions(row) for row in rows]
    plain = [np.arange(row.start + shift, row.start + shift + len(row.token_ids), dtype=np.int32) for row in rows]
    if all(each is None for each in given):
        return np.concatenate(plain)
    parts = [_on_all_axes(own) if each is None else each for own, each in zip(plain, given, strict=True)]
    positions = np.concatenate(parts, axis=1)
    return positions if (positions != positions[0]).any() else positions[0]


def _given_positions(row: Row) -> npt.NDArray[np.int32] | None:
    if row.positions is None:
        return None if row.media is None else row.media.positions
    if row.media is not None:
        raise ValueError("a row has positions from its media or given ones, not both")
    return _on_all_axes(row.positions.at(row.start, row.end))


def _on_all_axes(positions: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    return np.broadcast_to(positions, (3, len(positions)))


@dataclass(frozen=True, slots=True, eq=False)
class StepMedia:
    """The spans of all rows of a step, at their indices among its packed tokens; not empty."""

    spans: tuple[EmbeddedSpan, ...]
    num_tokens: int

    def embeddings(self, of_tokens: mx.array) -> mx.array:
        """The tokens' embeddings `[1, T, hidden]`, replaced by media."""
        return self._filled(of_tokens[0], [span.embeddings.rows for span in self.spans])[None]

    def text_ids(self, ids: mx.array) -> mx.array:
        """The ids `[1, T]`, 0 for media: Gemma 4's deeper layers look up padding there."""
        return self._filled(ids[0], [mx.zeros(span.hi - span.lo) for span in self.spans])[None]

    def deep(self) -> list[mx.array]:
        """Additions to the outputs of the first layers, `[1, T, hidden]` each."""
        first = self.spans[0].embeddings
        zeros = mx.zeros((self.num_tokens, first.rows.shape[1]), first.rows.dtype)
        layers = range(len(first.deep))
        return [self._filled(zeros, [span.embeddings.deep[layer] for span in self.spans])[None] for layer in layers]

    def _filled(self, background: mx.array, rows: Sequence[mx.array]) -> mx.array:
        parts, end = [], 0
        for span, row in zip(self.spans, rows, strict=True):
            parts += [background[end : span.lo], row.astype(background.dtype)]
            end = span.hi
        return mx.concatenate([*parts, background[end:]])


def step_media(rows: Sequence[Row]) -> StepMedia | None:
    spans = [
        EmbeddedSpan(row.lo + span.lo, row.lo + span.hi, span.embeddings)
        for row in rows
        if row.media is not None
        for span in row.media.spans
    ]
    return StepMedia(tuple(spans), rows[-1].hi) if spans else None


class Deepstack:
    """Adds parts of a step's media to the outputs of a text model's first layers (Qwen3-VL, arXiv 2511.21631).

    Layers get a subclass of their class at the first such step; models without media never change.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = layers
        self._added: list[mx.array] = []
        self._restores: list[Restore] = []

    def set(self, added: Sequence[mx.array]) -> None:
        """Set what the layers add from now on, beginning with the first layer; empty for nothing."""
        self._added = list(added)
        for index in range(len(self._restores), len(added)):
            self._restores.append(self._wrap(index))

    def restore(self) -> None:
        while self._restores:
            self._restores.pop()()

    def _wrap(self, index: int) -> Restore:
        layer = self._layers[index]
        original = type(layer)

        def call(module: nn.Module, *arguments: Any, **options: Any) -> Any:
            output = original.__call__(module, *arguments, **options)
            return output + self._added[index].astype(output.dtype) if index < len(self._added) else output

        return override_forward(layer, call)
