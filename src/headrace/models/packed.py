"""A loaded model that runs packed steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from headrace.backend.kernels import Kernels
from headrace.models.install import Installation, Level, Levels, windows_of
from headrace.models.media import Deepstack, RowMedia, packed_positions, step_media
from headrace.models.mixers.whole import run_rows
from headrace.models.seams import views_of
from headrace.models.step import PackedStep, RowSpan
from headrace.state.sequence import SequenceState


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's tokens in a step; the state's window is open and as long as they are.

    media: what the sequence's media mean for these tokens; None if it has none.
    """

    state: SequenceState
    token_ids: Sequence[int]
    media: RowMedia | None = None


class PackedModel:
    """One forward for rows of any lengths.

    `levels` says how each class of mixers takes part; `undo` gives the untouched model back.
    """

    def __init__(self, model: Any, levels: Levels, kernels: Kernels) -> None:
        self.model = model
        self.levels = levels
        self.kernels = kernels
        self._windows = windows_of(model)
        self._installation = Installation(model, levels, kernels)
        self._deepstack = Deepstack(model.layers)
        self._is_whole = Level.WHOLE in levels.values()

    def forward(self, rows: Sequence[Row], picks: Sequence[int]) -> mx.array:
        """Run the rows' tokens, in order, as one packed row.

        picks: indices into the packed tokens whose logits are wanted, ascending, at least one.
        Gives logits `[len(picks), vocab_size]`, not evaluated, and leaves the states' windows written.
        """
        step = self._pack(rows)
        ids = mx.array([[token for row in rows for token in row.token_ids]], dtype=mx.int32)
        wanted = mx.array(list(picks), dtype=mx.int32)
        if self._is_whole:
            return run_rows(self.model, lambda: make_prompt_cache(self.model), step, ids)[wanted]
        tap = self._installation.tap
        tap.picks = wanted
        try:
            logits: mx.array = self.model(ids, cache=views_of(step, self._windows), **self._media(rows, ids))[0]
        finally:
            tap.picks = None
            self._deepstack.set(())
        return logits if self._installation.is_tapped else logits[wanted]

    def _pack(self, rows: Sequence[Row]) -> PackedStep:
        spans: list[RowSpan] = []
        lo = 0
        for row in rows:
            hi = lo + len(row.token_ids)
            spans.append(RowSpan(row.state, lo, hi, row.state.length, row.state.num_certain))
            lo = hi
        positions = packed_positions([(row.state.length, len(row.token_ids), row.media) for row in rows])
        return PackedStep(tuple(spans), mx.array(positions), self.kernels)

    def _media(self, rows: Sequence[Row], ids: mx.array) -> dict[str, mx.array]:
        """Arguments for the model's forward where tokens of the step stand for media; prepares deeper layers."""
        media = step_media([(len(row.token_ids), row.media) for row in rows])
        if media is None:
            return {}
        self._deepstack.set(media.deep())
        inner: Any = self.model.get("language_model", self.model)
        return {"input_embeddings": media.embeddings(inner.model.embed_tokens(ids))}

    @property
    def takes_media(self) -> bool:
        """Whether rows may hold media: the positions of all their tokens reach every layer."""
        return self._installation.has_axes and not {Level.ROWS, Level.WHOLE} & set(self.levels.values())

    def undo(self) -> None:
        """Take everything off the model again; this object is of no use afterwards."""
        self._deepstack.undo()
        self._installation.undo()
