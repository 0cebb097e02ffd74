"""What steps cost, as measured, and how many prompt tokens running streams can bear."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median_low

from headrace.scheduler.prefill import PREFILL_GRID

SLOWDOWN = 4.0
"""A step that also computes prompts is planned to take this many times a plain decode step.

So streams that run keep a quarter of their speed while others' prompts are computed, for as long as the rest is
enough for the least chunk, one block of the grid. A smaller number holds newcomers back, and steps with a few rows cost
nearly what steps with all of them do.
"""

MEDIA_SLOWDOWN = 1.75
"""The same while a prompt with images or videos is among them, so that streams wait for two steps at most.

Its tower has taken its time before, in slices, and what is left of the prompt is mostly short: it loses little.
"""

REMEASURE_EVERY = 16
"""After this many steps in a row with prompts, one goes without: a plain step is what all is measured by."""

_TRUSTED = 2
"""Measurements before a number is relied on: the lower of two is no first step that waited for a compiler."""


@dataclass(slots=True)
class _PlainSteps:
    """Latest decode-only steps with about the same number of rows; num_mixed: steps with prompts since the last."""

    durations_s: deque[float] = field(default_factory=lambda: deque(maxlen=5))
    num_mixed: int = 0


class Pace:
    """Learns from the duration of steps; takes a step as a plain one for its rows plus an amount per prompt token.

    Medians of the latest measurements, so that a step that was held up by something else counts for nothing.
    Plain steps are kept apart by the power of two of their rows. The same durations give the same plans.
    """

    def __init__(self) -> None:
        self._plain: dict[int, _PlainSteps] = {}
        self._prompt_token_s: deque[float] = deque(maxlen=9)

    def observe(self, num_rows: int, num_prompt_tokens: int, duration_s: float) -> None:
        """A step with this many decoding rows and prompt tokens has taken `duration_s`."""
        plain = self._plain_steps(num_rows)
        if num_prompt_tokens == 0:
            plain.durations_s.append(duration_s)
            plain.num_mixed = 0
            return
        plain.num_mixed += 1
        # fewer tokens than a block cost what a step costs at least, and say nothing about long prompts
        if num_prompt_tokens >= PREFILL_GRID:
            of_prompts = duration_s - self.plain_step_s(num_rows)
            self._prompt_token_s.append(max(0.0, of_prompts) / num_prompt_tokens)

    def plain_step_s(self, num_rows: int) -> float:
        """Seconds of a step that computes one token in each of `num_rows` rows; 0 if no plain step was measured.

        Until such a step has been measured, the one with the nearest number of rows stands in for it.
        """
        kind = num_rows.bit_length()
        measured = [other for other, plain in self._plain.items() if len(plain.durations_s) >= _TRUSTED]
        if kind not in measured and measured:
            kind = min(measured, key=lambda other: (abs(other - kind), other))
        durations = self._plain[kind].durations_s if kind in self._plain else ()
        return median_low(durations) if durations else 0.0

    @property
    def prompt_token_s(self) -> float:
        """Seconds that a prompt token adds to a step; 0 if that was never measured."""
        return median_low(self._prompt_token_s) if self._prompt_token_s else 0.0

    def spare_s(self, num_rows: int, slowdown: float = SLOWDOWN) -> float:
        """Seconds that a step beside `num_rows` decoding rows may spend on others' prompts; 0 if nothing is known."""
        return (slowdown - 1) * self.plain_step_s(num_rows) if self._is_known else 0.0

    def prompt_budget(self, num_rows: int, chunk_tokens: int, slowdown: float = SLOWDOWN) -> int:
        """Prompt tokens for a step beside `num_rows` decoding rows, at most `chunk_tokens`; 0 for a plain step.

        Without rows it is all of `chunk_tokens`; else a multiple of PREFILL_GRID, at least one if that fits.
        """
        if num_rows == 0:
            return chunk_tokens
        if not self._is_known or self._plain_steps(num_rows).num_mixed >= REMEASURE_EVERY:
            return 0
        return self._tokens_within(self.spare_s(num_rows, slowdown), chunk_tokens)

    def budget_within(self, limit_s: float, chunk_tokens: int) -> int:
        """Prompt tokens for a step that may spend `limit_s` on them; one block as long as nothing was measured."""
        if limit_s <= 0:
            return 0
        return self._tokens_within(limit_s, chunk_tokens if self._prompt_token_s else min(chunk_tokens, PREFILL_GRID))

    @property
    def _is_known(self) -> bool:
        return any(len(plain.durations_s) >= _TRUSTED for plain in self._plain.values())

    def _tokens_within(self, spare_s: float, chunk_tokens: int) -> int:
        """At least a block of the grid, so that prompts go on whatever they take."""
        if self.prompt_token_s * chunk_tokens <= spare_s:
            return chunk_tokens
        num_blocks = int(spare_s / (self.prompt_token_s * PREFILL_GRID))
        return min(chunk_tokens, max(1, num_blocks) * PREFILL_GRID)

    def _plain_steps(self, num_rows: int) -> _PlainSteps:
        return self._plain.setdefault(num_rows.bit_length(), _PlainSteps())
