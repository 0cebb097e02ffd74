"""Chooses which sequences to preempt, for an older sequence's next token or for another request's turn.

Only decoding sequences are preempted: prompts share a step's tokens in turns and finish.
"""

from __future__ import annotations

from collections.abc import Iterable

from headrace.scheduler.sequence import Sequence
from headrace.scheduler.waiting import FairShares
from headrace.types.request import GenerationRequest

SLICE_TOKENS = 32
"""A resumed sequence outputs this many tokens before it may be preempted for a turn again: storing and restoring its
state has to pay off, and a sequence that is preempted again and again must still finish."""

LEAD_TOKENS = 512
"""A session is preempted for another once it has been served this many tokens more."""


def younger_ones(sequence: Sequence, started: Iterable[Sequence]) -> list[Sequence]:
    """Sequences to preempt for another token of `sequence`, youngest first; never one that ranks before it.

    started: all sequences, oldest first.
    """
    behind = list(started)
    behind = behind[behind.index(sequence) + 1 :]
    priority = sequence.request.priority
    return [each for each in reversed(behind) if _is_decoding(each) and each.request.priority >= priority]


def lower_ranked(request: GenerationRequest, started: Iterable[Sequence], shares: FairShares) -> list[Sequence]:
    """Sequences to preempt for the request, in order: those of a lower priority or a better served session.

    started: all sequences, oldest first; ties: the youngest first.
    """

    def is_lower_ranked(sequence: Sequence) -> bool:
        if not _is_decoding(sequence) or sequence.num_output - sequence.num_output_before < SLICE_TOKENS:
            return False
        other = sequence.request
        if other.priority != request.priority:
            return other.priority > request.priority
        return shares.lead(other.session, request.session) >= LEAD_TOKENS

    def claim(sequence: Sequence) -> tuple[int, tuple[float, int]]:
        return sequence.request.priority, shares.rank(sequence.request.session)

    return sorted(filter(is_lower_ranked, reversed(list(started))), key=claim, reverse=True)


def _is_decoding(sequence: Sequence) -> bool:
    return sequence.is_decoding and not sequence.is_preempted
