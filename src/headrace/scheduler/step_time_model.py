"""Learns from measured steps how many prompt tokens a step may compute beside running streams."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from statistics import median_low

from headrace.scheduler.prefill import PREFILL_GRID

SLOWDOWN = 3.0
"""A step with prompts may take this many times as long as a slow decode-only step.

So while prompts are computed, a stream's longest gaps triple, and prompts get two thirds of the time. A smaller number
delays new requests, although steps with few rows cost nearly as much as full ones.
"""

STREAM_GAP_S = 0.025
"""A step with prompts may take this long in any case: at 40 tokens a second a stream is faster than its reader.

On an H200, whose steps took 5 ms, 35,200 tokens of prompts came in 199 chunks of 12 ms beside streams: 3.3 s, of which
at most 1.1 s were the tokens' own.
"""

MEDIA_SLOWDOWN = 1.75
"""The same while one of the prompts has images or videos: streams wait for two steps at most.

Its media were encoded before, in slices, and the remaining prompt is mostly short, so it loses little.
"""

REMEASURE_EVERY = 16
"""After this many consecutive steps with prompts, one runs without, and one before it has half as many prompt tokens.

Steps without prompts are the baseline; chunks of two sizes separate the fixed cost of a chunk from the cost per token.
Until both are known, every second chunk has half the size.
"""

_NUM_KEPT = 5
"""Measurements kept of each kind. The median is used, so one disturbed step counts little."""

_TRUSTED = 2
"""Measurements needed before a value is used: the lower of two excludes a first step that compiled."""

_SHALLOW = 1024
"""Preceding prompt tokens up to which a token costs about the same."""


class StepTimeModel:
    """Step time = decode-only time by row count + a fixed cost per prompt chunk + a cost per prompt token by depth.

    depth: the number of tokens that precede one in its prompt, which attention reads. Deterministic: the same durations
    give the same plans.
    """

    def __init__(self) -> None:
        self._plain_s = _Latest()
        self._token_s = _Latest()
        self._piece_s: deque[float] = deque(maxlen=_NUM_KEPT)
        self._pieces: deque[_Piece] = deque(maxlen=_NUM_KEPT)
        self._num_mixed = 0
        """Steps with prompts since the last one without."""

    def observe(self, num_rows: int, num_prompt_tokens: int, duration_s: float, depth: int = 0) -> None:
        """Record a step's duration. depth: mean depth of its prompt tokens."""
        if num_prompt_tokens == 0:
            self._plain_s.add(num_rows, duration_s)
            self._num_mixed = 0
            return
        self._num_mixed += 1
        depth += _SHALLOW
        piece = _Piece(num_prompt_tokens, depth, max(0.0, duration_s - self.decode_step_s(num_rows)))
        if self._pieces and (found := piece.price_without_tokens(self._pieces[-1])) is not None:
            self._piece_s.append(found)
        self._pieces.append(piece)
        self._token_s.add(depth, max(0.0, piece.seconds - self.piece_s) / num_prompt_tokens)

    def decode_step_s(self, num_rows: int) -> float:
        """Seconds of a step that only decodes `num_rows` rows; 0 if never measured."""
        return self._plain_s.median(num_rows)

    @property
    def piece_s(self) -> float:
        """Fixed seconds that a prompt chunk adds to a step; 0 if never measured."""
        return median_low(self._piece_s) if self._knows_pieces else 0.0

    @property
    def _knows_pieces(self) -> bool:
        return len(self._piece_s) >= _TRUSTED

    def prompt_token_s(self, depth: int = 0) -> float:
        """Seconds per prompt token beyond that; 0 if never measured."""
        return self._token_s.median(depth + _SHALLOW)

    def spare_s(self, num_rows: int, slowdown: float = SLOWDOWN) -> float:
        """Seconds that a step may spend on prompts beside `num_rows` decoding rows; 0 if unknown."""
        if not self._plain_s.is_trusted:
            return 0.0
        return max(slowdown * self._plain_s.slow(num_rows), STREAM_GAP_S) - self.decode_step_s(num_rows)

    def prompt_budget(self, num_rows: int, chunk_tokens: int, slowdown: float = SLOWDOWN, depth: int = 0) -> int:
        """Prompt tokens for a step beside `num_rows` decoding rows, at most `chunk_tokens`; 0 for a decode-only step.

        All of `chunk_tokens` if there are no such rows.
        """
        if num_rows == 0:
            return chunk_tokens
        if not self._plain_s.is_trusted or self._num_mixed >= REMEASURE_EVERY:
            return 0
        budget = self._tokens_within(self.spare_s(num_rows, slowdown), chunk_tokens, depth)
        is_half = self._num_mixed % 2 if not self._knows_pieces else self._num_mixed == REMEASURE_EVERY - 1
        return -(-budget // 2) if is_half else budget

    def budget_within(self, limit_s: float, chunk_tokens: int, depth: int = 0) -> int:
        """Prompt tokens for a step that may spend `limit_s` on them; 0 if there is no time."""
        return self._tokens_within(limit_s, chunk_tokens, depth) if limit_s > 0 else 0

    def _tokens_within(self, limit_s: float, chunk_tokens: int, depth: int) -> int:
        """At least 1; more where the fixed cost would dominate, so that the tokens may cost as much as the chunk.

        At most four times as many as in recent chunks, because extrapolation is unsafe, and at least one grid block
        while the fixed cost is unknown.
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
        """For the nearest count with enough measurements; 0 if there are none."""
        return median_low(self._nearest(count) or [0.0])

    def slow(self, count: int) -> float:
        """The second longest, or the median if there are few."""
        rising = sorted(self._nearest(count)) or [0.0]
        return rising[max(len(rising) - 2, (len(rising) - 1) // 2)]

    def _nearest(self, count: int) -> Collection[float]:
        def distance(octave: int) -> tuple[bool, int, int]:
            return len(self._kept[octave]) < _TRUSTED, abs(octave - count.bit_length()), octave

        return self._kept[min(self._kept, key=distance)] if self._kept else ()


@dataclass(frozen=True, slots=True)
class _Piece:
    """The prompt tokens of one step, and the time they added to it."""

    num_tokens: int
    depth: int
    seconds: float

    def price_without_tokens(self, other: _Piece) -> float | None:
        """The fixed cost by a line through two chunks; None if they are too similar.

        Chunks at different depths differ in their cost per token, too.
        """
        if self.depth.bit_length() != other.depth.bit_length():
            return None
        small, large = sorted((self, other), key=lambda piece: piece.num_tokens)
        if 3 * small.num_tokens > 2 * large.num_tokens:
            return None
        slope = (large.seconds - small.seconds) / (large.num_tokens - small.num_tokens)
        return min(max(0.0, small.seconds - slope * small.num_tokens), small.seconds, large.seconds)
