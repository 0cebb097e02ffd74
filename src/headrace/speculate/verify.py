"""Verifying drafts without a trace in the text.

Every token is drawn as if nothing had been drafted: from the logits of its place, with the number that belongs to the
request's seed and the token's index. A draft is right if it is the token that was drawn. So drafts never change the
text, greedy or random, whoever made them and however many there are.

A draft d that owes nothing to the drawn number is then right with probability P(d), which is what speculative sampling
(Leviathan et al., arXiv 2211.17192, and Chen et al., arXiv 2302.01318) reaches as well: for a certain draft the sum of
min(P, Q) over all tokens is P(d).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from headrace.sampling.adjustment import Mask
from headrace.sampling.sampler import SamplingRow


def row_after(row: SamplingRow, drafts: Sequence[int], mask: Mask | None = None) -> SamplingRow:
    """How the place behind these drafts is drawn, if `row` is how their first place is: they count as output.

    `row.history` is not changed, and must not change before the new row is drawn. mask: what may come there.
    """
    if not drafts and mask is row.mask:
        return row
    history = row.history.followed_by(drafts) if row.history is not None else None
    return replace(row, output_index=row.output_index + len(drafts), history=history, mask=mask)


def window_rows(
    row: SamplingRow, drafts: Sequence[int], masks: Sequence[Mask | None] | None = None
) -> list[SamplingRow]:
    """How each place of a window is drawn: one before each draft and one behind the last, K + 1 in all.

    row: of the window's first place. Each place is drawn as if the drafts before it were right: otherwise what is drawn
    there is not looked at.
    masks: what may come at each place by the request's constraint, K + 1 of them; None if it has none.
    """
    places = range(len(drafts) + 1)
    return [row_after(row, drafts[:place], masks[place] if masks is not None else None) for place in places]


def gained_tokens(drafts: Sequence[int], drawn: Sequence[int]) -> tuple[int, ...]:
    """What a window adds to the output: the right drafts, and the token drawn behind them.

    drawn: what `sample` gave for the rows of `window_rows`, K + 1 ids for K drafts. The tokens gained are the first of
    these; if the logits of the last one were not fit to be drawn from, it is NO_TOKEN.
    Raises ValueError if the lengths don't fit.
    """
    if len(drawn) != len(drafts) + 1:
        raise ValueError(f"{len(drawn)} drawn tokens do not fit {len(drafts)} drafts")
    num_right = next((place for place, draft in enumerate(drafts) if draft != drawn[place]), len(drafts))
    return tuple(drawn[: num_right + 1])
