"""Verifies drafts without changing the output.

Every token is sampled as if nothing had been drafted: from its position's logits, with the random number of the
request's seed and the token's index. A draft is accepted if it equals the sample. So drafts never change the text,
greedy or random, whatever their source and number.

A draft d independent of the number is accepted with probability P(d), the same as in speculative sampling (Leviathan et
al., arXiv 2211.17192, and Chen et al., arXiv 2302.01318): for a deterministic draft the sum of min(P, Q) over all
tokens is P(d).
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.sampling.rows import Mask, SamplingRow


def window_rows(
    row: SamplingRow, drafts: Sequence[int], masks: Sequence[Mask | None] | None = None
) -> list[SamplingRow]:
    """How to sample each position of a window: one before each draft and one after the last, K + 1 in all.

    row: of the window's first position. Each is sampled as if the drafts before it were accepted; otherwise its sample
    is ignored.
    masks: allowed tokens at each position, K + 1 of them; None without a constraint.
    """
    numbers = range(len(drafts) + 1)
    return [row.after(drafts[:number], None if masks is None else masks[number]) for number in numbers]


def gained_tokens(drafts: Sequence[int], drawn: Sequence[int]) -> tuple[int, ...]:
    """What a window adds to the output: the accepted drafts, and the token sampled after them.

    drawn: from `sample` for the rows of `window_rows`, K + 1 ids for K drafts. The tokens gained are the first of
    these; if the last one's logits were invalid, it is NO_TOKEN. Raises ValueError if the lengths don't match.
    """
    if len(drawn) != len(drafts) + 1:
        raise ValueError(f"{len(drawn)} drawn tokens do not fit {len(drafts)} drafts")
    num_accepted = next((number for number, draft in enumerate(drafts) if draft != drawn[number]), len(drafts))
    return tuple(drawn[: num_accepted + 1])
