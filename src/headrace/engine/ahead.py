"""Async scheduling: launches a step before the last one's tokens are read, so that the device stays busy."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from headrace.engine.draws import Draws
from headrace.engine.windows import Ahead, LiveSequence, Window
from headrace.models.packed import PackedModel
from headrace.sampling.draw import NO_TOKEN
from headrace.sampling.rows import pick


def launch_next(model: PackedModel, windows: Sequence[Window], draws: Draws, states: Sequence[mx.array]) -> None:
    """Launch the next token of the continuing rows. All windows are plain: each has one draw, or none inside a prompt.

    states: of the windows' own step, still to be evaluated.

    Rows may join or leave meanwhile: each row keeps its logits until its next chunk. A state takes the token like a
    draft, because an answer may end with this one; see `take_over`.
    """
    mx.async_eval(draws.arrays(), states)
    for one in windows:
        if not one.is_committed:
            one.live.state.commit(one.num_tokens)
            one.is_committed = True
    drawing = [one for one in windows if one.num_draws]
    going = [(at, one.live, row) for at, one in enumerate(drawing) if (row := one.next_row) is not None]
    if not going:
        return
    for _, live, _ in going:
        live.state.begin(1, num_certain=0)
    rows = [row for _, _, row in going]
    logits = model.forward(rows, range(len(rows)), pick(draws.tokens, [at for at, _, _ in going]))
    mx.async_eval(logits, model.unevaluated(rows))
    for at, (_, live, _) in enumerate(going):
        live.ahead = Ahead(logits, at)


def take_over(live: LiveSequence, token_id: int) -> None:
    """Close the window of a token that was launched before it was known; one that ends the answer leaves nothing."""
    if token_id == NO_TOKEN:
        live.is_sound = False  # the state has continued from an invalid token
    elif token_id in live.request.stop_token_ids:
        live.state.commit(0)
        live.ahead = None
    else:
        live.state.commit(1)


def computed(windows: Sequence[Window]) -> list[mx.array]:
    """Logits that were computed ahead, with each window's `lo` its row among them."""
    launched: dict[int, list[Window]] = {}
    for one in windows:
        if one.ahead is not None:
            launched.setdefault(id(one.ahead.logits), []).append(one)
    parts: list[mx.array] = []
    lo = 0
    for together in launched.values():
        found = [one.ahead for one in together if one.ahead is not None]
        parts.append(pick(found[0].logits, [ahead.row for ahead in found]))
        for place, one in enumerate(together):
            one.lo = lo + place
        lo += len(together)
    return parts
