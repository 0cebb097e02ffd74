"""A step on the device: its logits, the tokens sampled from them, and the launch of the next step before they are read.

The latter (async scheduling) keeps the device busy.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from headrace.backend.transfer import Fetched, pick, to_device
from headrace.engine.windows import LaunchedLogits, LiveSequence, Window
from headrace.models.packed import PackedModel
from headrace.models.step import Row
from headrace.sampling.draw import NO_TOKEN
from headrace.sampling.logprobs import LogprobRows, read_logprobs, token_logprobs
from headrace.sampling.rows import SamplingRow
from headrace.sampling.sampler import sample
from headrace.speculate.drafts import packed_ids
from headrace.types.events import TokenLogprobs


def logits_of(model: PackedModel, windows: Sequence[Window], rows: Sequence[Row]) -> mx.array:
    """Logits `[n, vocab_size]` of all windows; sets `lo` of each. rows: of the windows that were not launched ahead."""
    parts: list[mx.array] = []
    picks: list[int] = []
    lo = num_tokens = 0
    groups: dict[int, list[Window]] = {}
    for one in windows:
        if one.launched is not None:
            groups.setdefault(id(one.launched.logits), []).append(one)
    for together in groups.values():
        found = [one.launched for one in together if one.launched is not None]
        parts.append(pick(found[0].logits, [launched.row for launched in found]))
        for number, one in enumerate(together):
            one.lo = lo + number
        lo += len(together)
    if rows:
        new = [one for one in windows if one.launched is None]
        for one in new:
            one.lo = lo + len(picks)
            num_tokens += one.num_tokens
            picks += range(num_tokens - one.num_logits, num_tokens)
        ids = packed_ids([(one.chunk.token_ids, one.drafts) for one in new])
        # unused logits are never computed: only what is evaluated is
        parts.append(model.forward(rows, picks or [num_tokens - 1], ids))
    return mx.concatenate(parts)


class Draws:
    """All samples of one step, to be evaluated together and read afterwards."""

    def __init__(self, logits: mx.array, numbers: Sequence[int], rows: Sequence[SamplingRow]) -> None:
        """logits: `[n, vocab_size]`. numbers: the row of the logits that each of `rows` is sampled from."""
        own = pick(logits, numbers)
        self.tokens = sample(own, rows)
        """Ids `[len(rows)]`, on the device."""
        self._fetched = Fetched(self.tokens)
        self._num_top = {index: row.num_top for index, row in enumerate(rows) if row.num_top is not None}
        self._scores: LogprobRows | None = None
        if self._num_top:
            scored = to_device(list(self._num_top), mx.int32)
            # a row without a token has no log-probability, but the lookup needs an id
            ids = mx.maximum(self.tokens[scored], 0)
            self._scores = token_logprobs(own[scored], ids, max(self._num_top.values()))

    def arrays(self) -> list[object]:
        return [self._fetched.arrays, [] if self._scores is None else self._scores.arrays()]

    def read(self) -> tuple[list[int], Sequence[TokenLogprobs | None]]:
        """Each row's token, NO_TOKEN if its logits were invalid, and log-probabilities; empty if no row wants them."""
        token_ids = self._fetched.read()
        if self._scores is None:
            return token_ids, ()
        scores = dict(zip(self._num_top, read_logprobs(self._scores, list(self._num_top.values())), strict=True))
        return token_ids, [scores.get(index) for index in range(len(token_ids))]


class PromptLogprobs:
    """Log-probabilities of prompt tokens that a chunk's tokens predicted."""

    def __init__(self, logits: mx.array, window: Window) -> None:
        """logits: `[n, vocab_size]`, of the step."""
        self._num_top = window.live.request.num_prompt_logprobs or 0
        own = logits[window.lo : window.lo + len(window.following)]
        self._scores = token_logprobs(own, to_device(window.following, mx.int32), self._num_top)

    def arrays(self) -> object:
        return self._scores.arrays()

    def read(self) -> tuple[TokenLogprobs, ...]:
        return tuple(read_logprobs(self._scores, [self._num_top] * self._scores.token_ids.shape[0]))


def launch_next(model: PackedModel, windows: Sequence[Window], draws: Draws, states: Sequence[mx.array]) -> None:
    """Launch the next token of the continuing rows. All windows are plain: each has one draw, or none inside a prompt.

    states: of the windows' own step, still to be evaluated.

    Rows may join or leave meanwhile: each row keeps its logits until its next chunk. A state takes the token like a
    draft, because an answer may end with this one; see `confirm`.
    """
    mx.async_eval(draws.arrays(), states)
    for one in windows:
        if not one.is_committed:
            one.live.state.commit(one.num_tokens)
            one.is_committed = True
    drawing = [one for one in windows if one.num_draws]
    continuing = [(at, one.live, row) for at, one in enumerate(drawing) if (row := one.next_row) is not None]
    if not continuing:
        return
    for _, live, _ in continuing:
        live.state.begin(1, num_certain=0)
    rows = [row for _, _, row in continuing]
    logits = model.forward(rows, range(len(rows)), pick(draws.tokens, [at for at, _, _ in continuing]))
    model.launch(logits, rows)
    for at, (_, live, _) in enumerate(continuing):
        live.launched = LaunchedLogits(logits, at)


def confirm(live: LiveSequence, token_id: int) -> None:
    """Commit a token that was launched before it was known; if it ends the answer, drop it."""
    if token_id == NO_TOKEN:
        live.is_sound = False  # the state has continued from an invalid token
    elif token_id in live.request.stop_token_ids:
        live.state.commit(0)
        live.launched = None
    else:
        live.state.commit(1)
