"""Computes figures from measurements."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from headrace.bench.answer import Answer
from headrace.bench.rounds import Outcome, PlayedLevel, PlayedRound


@dataclass(frozen=True, slots=True)
class Spread:
    """Of several measurements of the same thing."""

    minimum: float
    median: float
    maximum: float


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one round, or of its answers of one kind. Faulty answers only count in num_failed.

    ttft_s: median time to the first text.
    tpot_s: median over answers of the mean time per output token after the first.
    gap_s: median time between two pieces of text, max_gap_s: the longest.
    end_to_end_s: median time to the end.
    output_tokens_per_s: all output tokens over the round's wall time. None where there is nothing to measure.
    """

    num_answers: int
    num_failed: int
    num_prompt_tokens: float | None
    num_cached_tokens: float | None
    num_output_tokens: int
    ttft_s: float | None
    tpot_s: float | None
    gap_s: float | None
    max_gap_s: float | None
    end_to_end_s: float | None
    output_tokens_per_s: float | None


@dataclass(frozen=True, slots=True)
class Difference:
    """Two different answers to the same question."""

    stream: int
    conversation: int
    turn: int
    first: str
    second: str


@dataclass(frozen=True, slots=True)
class Sameness:
    """How many of the comparable answers were the same, and the first pair that was not."""

    num_compared: int
    num_same: int
    difference: Difference | None


def spread(values: Iterable[float | None]) -> Spread | None:
    present = [value for value in values if value is not None]
    return Spread(min(present), statistics.median(present), max(present)) if present else None


def ttft_s(answer: Answer) -> float | None:
    return answer.arrivals_s[0] - answer.started_s if answer.arrivals_s else None


def tpot_s(answer: Answer) -> float | None:
    """Mean seconds per output token after the first; None for less than two tokens or a single piece of text."""
    if answer.num_output_tokens < 2 or len(answer.arrivals_s) < 2:
        return None
    return (answer.arrivals_s[-1] - answer.arrivals_s[0]) / (answer.num_output_tokens - 1)


def gaps_s(answer: Answer) -> list[float]:
    arrivals = answer.arrivals_s
    return [later - earlier for earlier, later in zip(arrivals, arrivals[1:], strict=False)]


def kinds_of(level: PlayedLevel) -> tuple[str, ...]:
    """Kinds of questions in the order of their first appearance; none where there is only one."""
    kinds = tuple(dict.fromkeys(outcome.kind for played in level.rounds for outcome in played.outcomes))
    return kinds if len(kinds) > 1 else ()


def figures_of(played: PlayedRound, kind: str | None = None) -> Figures:
    answers = [outcome.answer for outcome in played.outcomes if kind in (None, outcome.kind)]
    proper = [answer for answer in answers if answer.fault is None]
    gaps = [gap for answer in proper for gap in gaps_s(answer)]
    num_output_tokens = sum(answer.num_output_tokens for answer in proper)
    return Figures(
        num_answers=len(answers),
        num_failed=len(answers) - len(proper),
        num_prompt_tokens=_median(answer.num_prompt_tokens for answer in proper),
        num_cached_tokens=_median(answer.num_cached_tokens for answer in proper),
        num_output_tokens=num_output_tokens,
        ttft_s=_median(map(ttft_s, proper)),
        tpot_s=_median(map(tpot_s, proper)),
        gap_s=_median(gaps),
        max_gap_s=max(gaps, default=None),
        end_to_end_s=_median(answer.ended_s - answer.started_s for answer in proper),
        output_tokens_per_s=num_output_tokens / played.wall_s if proper and played.wall_s > 0 else None,
    )


def ratio(
    ours: PlayedLevel, theirs: PlayedLevel, figure: Callable[[Figures], float | None], kind: str | None = None
) -> Spread | None:
    """Theirs over ours, round by round: both were run next to each other, on the same questions."""
    return spread(
        _quotient(figure(figures_of(their, kind)), figure(figures_of(our, kind)))
        for our, their in zip(ours.rounds, theirs.rounds, strict=True)
    )


def sameness(first: PlayedRound, second: PlayedRound, *, ignore_ends: bool = False) -> Sameness:
    """Compare the answers to the same questions; faulty ones are skipped.

    ignore_ends: ignore white space at the ends of a text, which some servers strip.
    """
    others = {_place(outcome): outcome.answer for outcome in second.outcomes}
    num_compared = num_same = 0
    difference = None
    for outcome in first.outcomes:
        answer, other = outcome.answer, others.get(_place(outcome))
        if other is None or answer.fault is not None or other.fault is not None:
            continue
        num_compared += 1
        if _said(answer, ignore_ends) == _said(other, ignore_ends):
            num_same += 1
        elif difference is None:
            difference = Difference(*_place(outcome), _text(answer), _text(other))
    return Sameness(num_compared, num_same, difference)


def faults(levels: Sequence[PlayedLevel]) -> list[str]:
    return [
        f"{level.target}, {level.workload}, {level.streams} streams: {outcome.answer.fault}"
        for level in levels
        for played in (*level.rounds, level.again)
        for outcome in played.outcomes
        if outcome.answer.fault is not None
    ]


def _place(outcome: Outcome) -> tuple[int, int, int]:
    return outcome.stream, outcome.conversation, outcome.turn


def _said(answer: Answer, ignore_ends: bool) -> tuple[str, str]:
    if ignore_ends:
        return answer.reasoning.strip(), answer.content.strip()
    return answer.reasoning, answer.content


def _text(answer: Answer) -> str:
    return answer.reasoning + answer.content


def _median(values: Iterable[float | None]) -> float | None:
    found = spread(values)
    return None if found is None else found.median


def _quotient(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else above / below
