"""A loaded model that runs packed steps."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from headrace.backend.cuda.shapes import LONGEST_WINDOW
from headrace.backend.kernels import Kernels
from headrace.backend.transfer import pick, to_device
from headrace.errors import ModelError
from headrace.models.compiled import CompiledSteps
from headrace.models.install import Patches
from headrace.models.levels import Level, Levels, positions_refusal, windows_of
from headrace.models.lora import BASE, Loras
from headrace.models.media import Deepstack, StepMedia, packed_positions, step_media
from headrace.models.mixers.cuda_delta import CudaDeltaMixer
from headrace.models.mixers.rowwise import run_rows
from headrace.models.patches import views_of
from headrace.models.positions import find_sections
from headrace.models.sharding import all_gathered
from headrace.models.step import PackedStep, Row
from headrace.models.vlm import VlmWrapper
from headrace.state.hidden import HiddenState
from headrace.state.layer import LayerKey
from headrace.state.sequence import SequenceState
from headrace.types.model import TokenIds


class PackedModel:
    """Runs one forward for rows of any lengths.

    levels: how each class of mixers takes part.
    """

    def __init__(self, model: Any, levels: Levels, kernels: Kernels) -> None:
        self.model = model
        self.levels = levels
        self.kernels = kernels
        self.positions_refusal = positions_refusal(model, levels)
        """Why rows can't have given positions; None if they can."""
        self._windows = windows_of(model)
        self.loras = Loras(model)
        self._patches = Patches(model, levels, kernels, find_sections(model))
        self._deepstack = Deepstack(model.layers)
        self._is_whole = Level.WHOLE in levels.values()
        fused = self._patches.fused
        self._compiled = CompiledSteps(self._body, fused, self._windows, kernels) if fused else None
        self._num_ids: int | None = None
        self._is_token: mx.array | None = None

    @property
    def layer_lines(self) -> tuple[str, ...]:
        replaced = self._patches.replaced
        levels = (
            f"{one.__name__}: {'kernels' if one in replaced else level.value}" for one, level in self.levels.items()
        )
        line = f"layers: {', '.join(levels)}"
        if not replaced:
            return (line,)
        counts = " and ".join(f"{number} {one.__name__}" for one, number in replaced.items())
        compiled = "" if self._compiled is None else ", steps of few tokens compiled"
        return line, f"kernels: {counts}{compiled}"

    def forward(self, rows: Sequence[Row], picks: Sequence[int], ids: mx.array | None = None) -> mx.array:
        """Run the rows' tokens, in order, as one packed row.

        picks: indices into the packed tokens whose logits are wanted, ascending, at least one.
        ids: the tokens `[T]` where some are on the device only; then only the number of the rows' `token_ids` counts.
        Returns logits `[len(picks), num_ids]`, not evaluated; the states' windows are then written.
        """
        logits = self.graph(rows, picks, ids)
        if self._patches.writes_in_place:
            # even if the caller needs no logits: only they depend on what the last layers write
            mx.async_eval(logits)
        return logits

    def compute(self, state: SequenceState, token_ids: Sequence[int], num_certain: int | None = None) -> mx.array:
        """Compute and keep tokens of one sequence. Gives their logits `[n, num_ids]` in float32, evaluated."""
        state.begin(len(token_ids), num_certain)
        logits = self.forward([Row(state, token_ids)], range(len(token_ids))).astype(mx.float32)
        mx.eval(logits, state.arrays())
        state.commit(len(token_ids))
        return logits

    def graph(self, rows: Sequence[Row], picks: Sequence[int], ids: mx.array | None = None) -> mx.array:
        """As `forward`, but not launched as a whole: evaluate the logits before anything else is done with the rows."""
        loras = self.loras if any(row.adapter != BASE for row in rows) else None
        if self._compiled is not None and loras is None:
            are_short = [row.is_short and row.recorder is None for row in rows]
            if any(are_short) and not all(are_short):
                return self._in_two(rows, are_short, picks, ids)
        return self._graph(rows, picks, ids, loras)

    def _in_two(
        self, rows: Sequence[Row], are_short: Sequence[bool], picks: Sequence[int], ids: mx.array | None
    ) -> mx.array:
        starts = [0, *accumulate([len(row.token_ids) for row in rows])]
        parts: list[mx.array] = []
        order: list[int] = []
        for is_short in (True, False):
            own = [number for number, each in enumerate(are_short) if each is is_short]
            tokens = [token for number in own for token in range(starts[number], starts[number + 1])]
            index_of = {token: index for index, token in enumerate(tokens)}
            wanted = [pick for pick in picks if pick in index_of]
            own_rows, own_picks = [rows[number] for number in own], [index_of[pick] for pick in wanted]
            # chunks beside drafts use the same compiled variant as chunks alone
            are_known = ids is None or all(row.has_known_ids for row in own_rows)
            own_ids = None if ids is None or are_known else mx.take(ids, to_device(tokens, mx.int32))
            if not wanted:  # any token's logits, so that there is something to launch
                own_rows, own_picks = [replace(row, recorder=None) for row in own_rows], [len(tokens) - 1]
            found = self._graph(own_rows, own_picks, own_ids, None)
            mx.async_eval(found)
            parts.append(found[: len(wanted)])
            order += wanted
        return pick(mx.concatenate(parts), sorted(range(len(order)), key=order.__getitem__))

    def _graph(self, rows: Sequence[Row], picks: Sequence[int], ids: mx.array | None, loras: Loras | None) -> mx.array:
        step = self._pack(rows, picks, loras)
        if loras is None:
            return self._graph_of(step, rows, picks, ids)
        with loras.step([row.adapter for row in rows for _ in row.token_ids], picks):
            return self._graph_of(step, rows, picks, ids)

    def _graph_of(self, step: PackedStep, rows: Sequence[Row], picks: Sequence[int], ids: mx.array | None) -> mx.array:
        tokens = [token for row in rows for token in row.token_ids]
        tap, media = self._patches.tap, step_media(rows)
        logits = None
        if self._compiled is not None and step.loras is None and media is None:
            logits = self._compiled_logits(self._compiled, step, rows, tokens if ids is None else ids, picks)
        if logits is None:
            ids = (to_device(tokens, mx.int32) if ids is None else ids)[None]
            wanted = to_device(picks, mx.int32)
            if self._is_whole:
                # embeddings `[1, T, hidden]` where some tokens stand for media
                inputs = ids if media is None else media.embeddings(self.model.embed(ids))
                rows_alone = run_rows(self.model, lambda: make_prompt_cache(self.model), step, inputs)
                return self._of_tokens(rows_alone[wanted])
            logits = self._logits(step, media, ids, wanted)
            logits = logits if self._patches.is_tapped else logits[wanted]
        if tap.hidden is not None:
            self._hand_to_head(step, tap.hidden)
            tap.hidden = None
        return self._of_tokens(logits)

    def _of_tokens(self, logits: mx.array) -> mx.array:
        """Logits without those of unused ids. The cut at the end is a view; only gaps take an operation."""
        if self._num_ids is not None and logits.shape[-1] > self._num_ids:
            logits = logits[:, : self._num_ids]
        return logits if self._is_token is None else mx.where(self._is_token, logits, -mx.inf)

    def launch(self, logits: mx.array, rows: Sequence[Row]) -> list[mx.array]:
        """Launch the rest of the last forward of these rows; returns `unevaluated`.

        Calls MLX only if something is left: each call gives other threads the interpreter, and waits to get it back.
        """
        states = self.unevaluated(rows)
        if states or not self._patches.writes_in_place:
            mx.async_eval(logits, states)
        return states

    def unevaluated(self, rows: Sequence[Row]) -> list[mx.array]:
        """Arrays that the rows' next steps start from and that are not computed with the last logits."""
        if self._compiled is None:
            # rows may share arrays
            return list({id(array): array for row in rows for array in row.state.arrays()}.values())
        # hidden rows are computed on the way to the logits
        return [array for row in rows if row.state.snapshot_points for array in row.state.arrays()]

    def _logits(self, step: PackedStep, media: StepMedia | None, ids: mx.array, picks: mx.array) -> mx.array:
        try:
            with self._patches.tap.picking(picks):
                views, embeddings = views_of(step, self._windows), {}
                if media is not None:
                    self._deepstack.set(media.deep())
                    embeddings = {"input_embeddings": media.embeddings(self.embed(ids))}
                    ids = media.text_ids(ids)
                logits: mx.array = self.model(ids, cache=views, **embeddings).squeeze(0)  # an index would copy them
        finally:
            self._deepstack.set(())
        return logits

    def _compiled_logits(
        self,
        compiled: CompiledSteps,
        step: PackedStep,
        rows: Sequence[Row],
        ids: Sequence[int] | mx.array,
        picks: Sequence[int],
    ) -> mx.array | None:
        tap = self._patches.tap
        # logits of all tokens of windows: steps with fewer would be further variants
        takes_all = all(row.is_short for row in rows)
        taken = range(step.num_tokens) if takes_all else picks
        found = compiled.run(step, ids, taken, variant=(tap.keeps_hidden, tap.is_normed))
        if found is None:
            return None
        logits, *hidden = found
        tap.hidden = hidden[0] if hidden else None
        if len(picks) < len(taken):
            return logits[to_device(picks, mx.int32)]
        return logits if logits.shape[0] == len(picks) else logits[: len(picks)]

    def _body(
        self, step: PackedStep, ids: mx.array, picks: mx.array | None, others: Sequence[mx.array]
    ) -> list[mx.array]:
        """Logits, and the hidden rows if they are kept, of a step that is being compiled."""
        tap = self._patches.tap
        with tap.picking(picks):
            logits = self.model(ids[None], cache=views_of(step, self._windows)).squeeze(0)
        hidden, tap.hidden = tap.hidden, None
        return [logits] if hidden is None else [logits, hidden]

    def _pack(self, rows: Sequence[Row], picks: Sequence[int], loras: Loras | None) -> PackedStep:
        lo = 0
        for row in rows:
            row.pack(lo, row.state.length, row.state.num_certain)
            lo = row.hi
            if row.media is not None:
                row.bidirectional = row.media.bidirectional_spans
            if row.recorder is not None:
                row.picks = tuple(pick for pick in picks if row.lo <= pick < row.hi)
                if row.picks:
                    row.recorder.begin()
        return PackedStep(rows, packed_positions(rows), self.kernels, loras=loras)

    @property
    def largest_window(self) -> int:
        """The largest sliding window in tokens, the current one included; 0 without such layers."""
        parts = [part for entry in self._windows for part in (entry if isinstance(entry, tuple) else (entry,))]
        return max((part for part in parts if part is not None), default=0)

    @property
    def most_drafts(self) -> int:
        """The most draft tokens of a row: tables of running states keep that many unverified tokens."""
        has_tables = any(isinstance(mixer, CudaDeltaMixer) for mixer in self._patches.fused.values())
        return LONGEST_WINDOW - 1 if has_tables else sys.maxsize

    @property
    def is_compiled(self) -> bool:
        """Whether steps of a few tokens run as compiled functions, as where the host limits their speed."""
        return self._compiled is not None

    @property
    def launches_ahead(self) -> bool:
        """Whether the next step should be launched before this one's tokens are read, see `engine/forward.py`.

        A module with its own cache would have to copy it for each token.
        """
        keeps_caches = {Level.ROWS, Level.WHOLE} & set(self.levels.values())
        return self.is_compiled or (self.kernels.overlaps_steps and not keeps_caches)

    @property
    def num_new_variants(self) -> int:
        """Steps so far that needed a new variant, see `CompiledSteps`."""
        return 0 if self._compiled is None else self._compiled.num_new_variants

    @property
    def takes_media(self) -> bool:
        """Whether rows may hold media: positions and spans of their tokens reach every layer, or need not."""
        return isinstance(self.model, VlmWrapper) or not {Level.ROWS, Level.WHOLE} & set(self.levels.values())

    @property
    def has_axes(self) -> bool:
        return self._patches.has_axes

    def _hand_to_head(self, step: PackedStep, hidden: mx.array) -> None:
        """Put the hidden states of the rows into their states, for the prediction head to process."""
        for row in step.rows:
            state = row.state.layer(self.hidden_key, HiddenState)
            state.write(row.start, hidden, row.state.snapshot_points, row.lo, row.hi)
            # created inside the window, so that restored entries of the head are committed with the rest
            row.state.full_attention(self.head_key, first=1)

    @property
    def head_key(self) -> LayerKey:
        """The key of a prediction head's keys and values in a state, after the model's own layers."""
        return (len(self._windows),)

    @property
    def hidden_key(self) -> LayerKey:
        return (len(self._windows) + 1,)

    def keep_tokens(self, tokens: TokenIds) -> None:
        """Give logits of these ids only: `[n, tokens.end]`, -inf for missing ones."""
        self._num_ids, self._is_token = tokens.end, None
        if tokens.missing:
            self._is_token = mx.array(np.isin(np.arange(tokens.end), list(tokens.missing), invert=True))

    def keep_hidden(self, is_wanted: bool, is_normed: bool = True) -> None:
        """Whether states keep hidden rows for a prediction head. Raises ModelError if the model can't hand them on.

        is_normed: after the model's last norm, as the heads of these families need them.
        """
        if is_wanted and not self._patches.is_tapped:
            raise ModelError("the model runs as a whole, a row at a time: its hidden rows can't be read")
        self._patches.tap.keeps_hidden = is_wanted
        self._patches.tap.is_normed = is_normed

    @property
    def text_model(self) -> Any:
        """The module with the trunk as `model`, and the output matrix: the `language_model` of wrappers."""
        return self.model.get("language_model", self.model)

    def embed(self, ids: mx.array) -> mx.array:
        """Token ids `[1, T]` to embeddings `[1, T, hidden]`, for models that only look them up in one table."""
        embeddings: mx.array = self.text_model.model.embed_tokens(ids)
        return embeddings

    def project(self, hidden: mx.array) -> mx.array:
        """Normed hidden rows `[1, n, hidden]` to logits `[n, num_ids]`, as at the end of the model's forward."""
        text = self.text_model
        if "lm_head" in text:
            return self._of_tokens(all_gathered(text.lm_head(hidden), text).squeeze(0))
        return self._of_tokens(text.model.embed_tokens.as_linear(hidden).squeeze(0))

    def restore(self) -> None:
        """Restore the untouched model; this object can't be used afterwards."""
        self._deepstack.restore()
        self._patches.restore()
