"""Who makes room, for an older sequence's next token or for somebody else's turn.

Only sequences that decode do: prompts share a step's tokens by turns, and come to their end.
"""

from __future__ import annotations

from collections.abc import Iterable

from headrace.scheduler.sequence import Sequence
from headrace.scheduler.waiting import SessionShares
from headrace.types.request import GenerationRequest

SLICE_TOKENS = 32
"""A sequence that goes on gains so many tokens before it makes room for a turn again: keeping its state and bringing it
back has to pay, and whoever is outranked all the time still comes to its end."""

LEAD_TOKENS = 512
"""A session has been served so many tokens more than one that waits before it makes room for it."""


def younger_ones(sequence: Sequence, started: Iterable[Sequence]) -> list[Sequence]:
    """Those that make room for another token of a sequence, the youngest first; none that comes before it.

    started: all sequences in the order of their age.
    """
    behind = list(started)
    behind = behind[behind.index(sequence) + 1 :]
    priority = sequence.request.priority
    return [each for each in reversed(behind) if _is_decoding(each) and each.request.priority >= priority]


def outranked(request: GenerationRequest, started: Iterable[Sequence], shares: SessionShares) -> list[Sequence]:
    """Those that make room for a turn of the request, in that order: a lower priority's, or a better served session's.

    started: all sequences in the order of their age; of equals the youngest goes first.
    """

    def is_outranked(sequence: Sequence) -> bool:
        if not _is_decoding(sequence) or sequence.num_output - sequence.num_output_before < SLICE_TOKENS:
            return False
        other = sequence.request
        if other.priority != request.priority:
            return other.priority > request.priority
        return shares.lead(other.session, request.session) >= LEAD_TOKENS

    def claim(sequence: Sequence) -> tuple[int, tuple[float, int]]:
        return sequence.request.priority, shares.rank(sequence.request.session)

    return sorted(filter(is_outranked, reversed(list(started))), key=claim, reverse=True)


def _is_decoding(sequence: Sequence) -> bool:
    return sequence.is_decoding and not sequence.is_preempted
