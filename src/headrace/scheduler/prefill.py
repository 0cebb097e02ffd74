"""How running prompts share the tokens of a step."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.scheduler.sequence import Sequence
from headrace.types.media import TwoWay
from headrace.types.step import Chunk

PREFILL_GRID = 32
"""A prompt is split at multiples of this many tokens where that costs an eighth of a step's budget at most.

Recurrent layers compute in blocks of this length, anchored at the sequence's start. A split inside a block
rounds differently, and where it falls depends on who else is running.
"""


class PrefillTurns:
    """Whose prompt is computed next: the one that was served least.

    The clock, where a newcomer's count begins, runs at the pace of an even share: it passes a sequence
    that is not served, so newcomers can overtake a long prompt for a while but never for good. Between
    equals the shorter rest goes first. A prompt that could not use the rest of the last step's budget,
    because it would have left the grid, goes before all others: small newcomers slow the clock down.
    """

    def __init__(self) -> None:
        self._clock = 0.0

    def join(self, sequence: Sequence) -> None:
        """Start the count of a sequence whose prompt is to be computed from now on."""
        sequence.virtual_time = self._clock

    def plan(self, prompts: Iterable[Sequence], budget: int) -> list[Chunk]:
        """Chunks of some of the prompts, given from old to young, with at most `budget` tokens, at least 1.

        More only for a single chunk of tokens that can't be parted.
        """
        turns = sorted(prompts, key=_turn)
        chunks: list[Chunk] = []
        left = budget
        for sequence in turns:
            num_tokens = _chunk_length(sequence, left, may_leave_grid=not chunks)
            sequence.is_passed_over = num_tokens == 0 and left > 0
            if num_tokens > 0:
                chunks.append(sequence.next_chunk(num_tokens))
                sequence.virtual_time += num_tokens
                left -= num_tokens
        if turns:
            self._clock += (budget - left) / len(turns)
        return chunks


def first_in_turn(prompts: Iterable[Sequence]) -> Sequence:
    """The prompt that gets a step's first tokens, and mostly all of them."""
    return min(prompts, key=_turn)


def _turn(sequence: Sequence) -> tuple[bool, float, int]:
    return not sequence.is_passed_over, sequence.virtual_time, sequence.num_wanted


def _chunk_length(sequence: Sequence, budget: int, *, may_leave_grid: bool) -> int:
    """Tokens of the sequence's next prompt chunk: its whole rest, or up to a grid line; 0 to wait for the next step.

    Only the step's first prompt may leave the grid, so that every step makes progress.
    Tokens that see each other are never parted, be they more than the budget.
    """
    if sequence.num_wanted <= budget:
        return sequence.num_wanted
    stop = sequence.num_computed + budget
    num_beyond = stop % PREFILL_GRID
    if not may_leave_grid or 8 * num_beyond <= budget:
        stop -= num_beyond
    if stop <= sequence.num_computed:
        return 0
    return _outside_of_runs(sequence, stop, budget, may_exceed=may_leave_grid) - sequence.num_computed


def _outside_of_runs(sequence: Sequence, stop: int, budget: int, *, may_exceed: bool) -> int:
    """`stop`, moved where it would part tokens that see each other: behind them within the budget, else before them.

    What is first and larger than the budget is computed at once nevertheless, where nobody else is served before.
    """
    media = sequence.request.media
    if media is None or media.two_way is TwoWay.NOWHERE:
        return stop
    run = next((each for each in media.inputs if each.start < stop < each.end), None)
    if run is None:
        return stop
    if run.end <= sequence.num_computed + budget:
        return run.end
    if run.start > sequence.num_computed:
        return run.start
    return run.end if may_exceed else sequence.num_computed
