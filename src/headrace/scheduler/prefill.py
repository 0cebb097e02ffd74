"""How running prompts share a step's tokens."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.scheduler.live_request import Sequence
from headrace.types.media import Bidirectional
from headrace.types.step import Chunk

PREFILL_GRID = 32
"""Prompts are split at multiples of this many tokens if that costs at most an eighth of a step's budget.

Recurrent layers compute in blocks of this length from the sequence's start. A split inside a block rounds differently,
and its position would depend on what else is running.
"""


class PrefillTurns:
    """Fair queueing of prompts: the one served least goes next.

    New prompts start at the clock, which advances at an even share. It passes a sequence that is not served, so
    newcomers can overtake a long prompt for a while but never for good. Ties: the shorter remainder. A prompt that
    could not use the rest of the last budget, because it would have left the grid, goes first: small newcomers slow the
    clock down.
    """

    def __init__(self) -> None:
        self._clock = 0.0

    def join(self, sequence: Sequence) -> None:
        sequence.virtual_time = self._clock

    def plan(self, prompts: Iterable[Sequence], budget: int) -> list[Chunk]:
        """Chunks of some of the prompts (given oldest first) of 1 to `budget` tokens in all.

        Larger only if a single chunk cannot be split.
        """
        ordered = sorted(prompts, key=_rank)
        chunks: list[Chunk] = []
        left = budget
        for sequence in ordered:
            num_tokens = _chunk_length(sequence, left, may_leave_grid=not chunks)
            sequence.is_passed_over = num_tokens == 0 and left > 0
            if num_tokens > 0:
                chunks.append(sequence.next_chunk(num_tokens))
                sequence.virtual_time += num_tokens
                left -= num_tokens
        if ordered:
            self._clock += (budget - left) / len(ordered)
        return chunks


def next_prompt(prompts: Iterable[Sequence]) -> Sequence:
    return min(prompts, key=_rank)


def _rank(sequence: Sequence) -> tuple[bool, float, int]:
    return not sequence.is_passed_over, sequence.virtual_time, sequence.num_uncomputed


def _chunk_length(sequence: Sequence, budget: int, *, may_leave_grid: bool) -> int:
    """Tokens of the sequence's next prompt chunk: the whole remainder, or up to a grid line; 0 to wait for the next
    step.

    Only the first prompt of a step may leave the grid, so that every step makes progress. Bidirectional spans are never
    split, even if they exceed the budget.
    """
    if sequence.num_uncomputed <= budget:
        return sequence.num_uncomputed
    stop = sequence.num_computed + budget
    num_beyond = stop % PREFILL_GRID
    if not may_leave_grid or 8 * num_beyond <= budget:
        stop -= num_beyond
    if stop <= sequence.num_computed:
        return 0
    return _outside_of_spans(sequence, stop, budget, may_exceed=may_leave_grid) - sequence.num_computed


def _outside_of_spans(sequence: Sequence, stop: int, budget: int, *, may_exceed: bool) -> int:
    """`stop`, moved out of a bidirectional span: to its end if the budget allows, else to its start.

    A span larger than the budget is computed at once if it is first and no other prompt was served in this step.
    """
    media = sequence.request.media
    if media is None or media.bidirectional is Bidirectional.NOWHERE:
        return stop
    span = next((each for each in media.inputs if each.start < stop < each.end), None)
    if span is None:
        return stop
    if span.end <= sequence.num_computed + budget:
        return span.end
    if span.start > sequence.num_computed:
        return span.start
    return span.end if may_exceed else sequence.num_computed
