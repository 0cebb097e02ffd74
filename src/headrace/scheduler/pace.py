"""How many prompt tokens a step may compute beside running streams, learned from what steps have taken."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from statistics import median_low

from headrace.scheduler.prefill import PREFILL_GRID

SLOWDOWN = 3.0
"""A step that also computes prompts is planned to take this many times a slow one of those that only decode.

So a stream's longer gaps grow to three times while others' prompts are computed, and these get two thirds of the time.
A smaller number delays newcomers, and steps with a few rows cost nearly what steps with all of them do.
"""

MEDIA_SLOWDOWN = 1.75
"""The same while a prompt with images or videos is among them, so that streams wait for two steps at most.

Its tower has taken its time before, in slices, and what is left of the prompt is mostly short: it loses little.
"""

REMEASURE_EVERY = 16
"""After this many steps in a row with prompts one goes without, and one before has half as many prompt tokens.

All is measured by steps without prompts, and pieces of two sizes tell what a piece costs from what its tokens cost;
until that is known every second one is of half the size.
"""

_NUM_KEPT = 5
"""Measurements of each kind. Their median is used, so that a step that was held up by something else counts little."""

_TRUSTED = 2
"""Measurements before a number is relied on: the lower of two is no first step that waited for a compiler."""

_SHALLOW = 1024
"""Tokens of a prompt that precede others without making them much dearer."""


class Pace:
    """A step takes what it takes without prompts, an amount for the piece of a prompt, and one for each of its tokens.

    The first is kept by the number of decoding rows, the last by the depth: the number of tokens that precede one in
    its prompt, which attention reads. The same durations give the same plans.
    """

    def __init__(self) -> None:
        self._plain_s = _Latest()
        self._token_s = _Latest()
        self._piece_s: deque[float] = deque(maxlen=_NUM_KEPT)
        self._pieces: deque[_Piece] = deque(maxlen=_NUM_KEPT)
        self._num_mixed = 0
        """Steps with prompts since the last one without."""

    def observe(self, num_rows: int, num_prompt_tokens: int, duration_s: float, depth: int = 0) -> None:
        """A step with this many decoding rows and prompt tokens, which had this depth on average, took `duration_s`."""
        if num_prompt_tokens == 0:
            self._plain_s.add(num_rows, duration_s)
            self._num_mixed = 0
            return
        self._num_mixed += 1
        depth += _SHALLOW
        piece = _Piece(num_prompt_tokens, depth, max(0.0, duration_s - self.plain_step_s(num_rows)))
        if self._pieces and (found := piece.price_without_tokens(self._pieces[-1])) is not None:
            self._piece_s.append(found)
        self._pieces.append(piece)
        self._token_s.add(depth, max(0.0, piece.seconds - self.piece_s) / num_prompt_tokens)

    def plain_step_s(self, num_rows: int) -> float:
        """Seconds of a step that only decodes `num_rows` rows; 0 if no such step was measured."""
        return self._plain_s.median(num_rows)

    @property
    def piece_s(self) -> float:
        """Seconds that a piece of a prompt adds to a step, however few its tokens; 0 if that was never measured."""
        return median_low(self._piece_s) if self._knows_pieces else 0.0

    @property
    def _knows_pieces(self) -> bool:
        return len(self._piece_s) >= _TRUSTED

    def prompt_token_s(self, depth: int = 0) -> float:
        """Seconds that each prompt token adds to that; 0 if that was never measured."""
        return self._token_s.median(depth + _SHALLOW)

    def spare_s(self, num_rows: int, slowdown: float = SLOWDOWN) -> float:
        """Seconds that a step beside `num_rows` decoding rows may spend on others' prompts; 0 if nothing is known."""
        if not self._plain_s.is_trusted:
            return 0.0
        return slowdown * self._plain_s.slow(num_rows) - self.plain_step_s(num_rows)

    def prompt_budget(self, num_rows: int, chunk_tokens: int, slowdown: float = SLOWDOWN, depth: int = 0) -> int:
        """Prompt tokens for a step beside `num_rows` decoding rows, at most `chunk_tokens`; 0 for a plain step.

        Without rows it is all of `chunk_tokens`.
        """
        if num_rows == 0:
            return chunk_tokens
        if not self._plain_s.is_trusted or self._num_mixed >= REMEASURE_EVERY:
            return 0
        budget = self._tokens_within(self.spare_s(num_rows, slowdown), chunk_tokens, depth)
        is_half = self._num_mixed % 2 if not self._knows_pieces else self._num_mixed == REMEASURE_EVERY - 1
        return -(-budget // 2) if is_half else budget

    def budget_within(self, limit_s: float, chunk_tokens: int, depth: int = 0) -> int:
        """Prompt tokens for a step that may spend `limit_s` on them; 0 for no time."""
        return self._tokens_within(limit_s, chunk_tokens, depth) if limit_s > 0 else 0

    def _tokens_within(self, limit_s: float, chunk_tokens: int, depth: int) -> int:
        """At least 1, and more where most of the time would be the price of the piece: its tokens may take as much.

        At most four times as many as in the latest pieces, for what is unknown may be dear. At least a block of the
        grid as long as the price of a piece is unknown.
        """
        tokens_s, token_s = max(limit_s - self.piece_s, self.piece_s), self.prompt_token_s(depth)
        affordable = chunk_tokens if token_s * chunk_tokens <= tokens_s else int(tokens_s / token_s)
        if not self._knows_pieces:
            affordable = max(affordable, PREFILL_GRID)
        largest = max((piece.num_tokens for piece in self._pieces), default=0)
        return min(chunk_tokens, max(PREFILL_GRID, 4 * largest), max(1, affordable))


class _Latest:
    """The latest measurements for each power of two of a count."""

    def __init__(self) -> None:
        self._kept: dict[int, deque[float]] = {}

    def add(self, count: int, seconds: float) -> None:
        self._kept.setdefault(count.bit_length(), deque(maxlen=_NUM_KEPT)).append(seconds)

    @property
    def is_trusted(self) -> bool:
        return any(len(kept) >= _TRUSTED for kept in self._kept.values())

    def median(self, count: int) -> float:
        """For the nearest count of which there are enough; 0 if nothing was measured."""
        return median_low(self._nearest(count) or [0.0])

    def slow(self, count: int) -> float:
        """The longest but one, or the median of a few."""
        rising = sorted(self._nearest(count)) or [0.0]
        return rising[max(len(rising) - 2, (len(rising) - 1) // 2)]

    def _nearest(self, count: int) -> Collection[float]:
        def distance(octave: int) -> tuple[bool, int, int]:
            return len(self._kept[octave]) < _TRUSTED, abs(octave - count.bit_length()), octave

        return self._kept[min(self._kept, key=distance)] if self._kept else ()


@dataclass(frozen=True, slots=True)
class _Piece:
    """Prompt tokens of one step, and what they added to its duration."""

    num_tokens: int
    depth: int
    seconds: float

    def price_without_tokens(self, other: _Piece) -> float | None:
        """What a line through this piece and another one gives for no tokens; None if they are too much alike.

        Pieces at different depths differ in what their tokens cost, too.
        """
        if self.depth.bit_length() != other.depth.bit_length():
            return None
        small, large = sorted((self, other), key=lambda piece: piece.num_tokens)
        if 3 * small.num_tokens > 2 * large.num_tokens:
            return None
        slope = (large.seconds - small.seconds) / (large.num_tokens - small.num_tokens)
        return min(max(0.0, small.seconds - slope * small.num_tokens), small.seconds, large.seconds)
