"""Learns from measured steps how many prompt tokens a step may compute beside running streams."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median_low

from headrace.recent_times import RecentTimes
from headrace.scheduler.prefill import PREFILL_GRID

SLOWDOWN = 3.0
"""A step with prompts may take this many times as long as a slow decode-only step.

So while prompts are computed, a stream's longest gaps triple, and prompts get two thirds of the time. A smaller number
delays new requests, although steps with few rows cost nearly as much as full ones.
"""

STREAM_GAP_S = 0.025
"""A step with prompts may take this long in any case: at 40 tokens a second a stream is faster than its reader.

Short steps waste time: on an H200, whose decode-only steps took 5 ms, 35,200 tokens of prompts took 3.3 s in 199 steps
beside streams, of which the tokens' own work was at most 1.1 s. Where n > 2 prompts wait for each stream, the limit is
n / 2 times this, so that a burst's prompts are not computed one in a step beside the first streams.
"""

MEDIA_SLOWDOWN = 1.75
"""SLOWDOWN while one of the prompts has images or videos: streams wait for two steps at most.

The media were encoded before, in slices, and the remaining prompt is mostly short, so it loses little.
"""

REMEASURE_EVERY = 16
"""After this many consecutive steps with prompts, one runs without, and one before it has half as many prompt tokens.

Steps without prompts are the baseline; chunks of two sizes separate the fixed cost of a chunk from the cost per token.
Until both are known, every second chunk has half the size.
"""

_SHALLOW = 1024
"""Preceding prompt tokens up to which a token costs about the same."""


class StepTimeModel:
    """Step time = decode-only time by row count + a fixed cost per prompt chunk + a cost per prompt token by depth.

    depth: the number of tokens that precede one in its prompt, which attention reads. Deterministic: the same durations
    give the same plans.
    """

    def __init__(self) -> None:
        self._decode_s = RecentTimes[int]()
        """By powers of two of the rows."""
        self._token_s = RecentTimes[int]()
        """By powers of two of the depth."""
        self._chunk_s = RecentTimes[None]()
        self._last_chunk: _ChunkTime | None = None
        self._largest_chunk = 0
        """Tokens of the largest chunk so far."""
        self._num_mixed = 0
        """Steps with prompts since the last one without."""

    def observe(self, num_rows: int, num_prompt_tokens: int, duration_s: float, depth: int = 0) -> None:
        """Record a step's duration. depth: mean depth of its prompt tokens."""
        if num_prompt_tokens == 0:
            self._decode_s.add(num_rows.bit_length(), duration_s)
            self._num_mixed = 0
            return
        self._num_mixed += 1
        depth += _SHALLOW
        chunk = _ChunkTime(num_prompt_tokens, depth, max(0.0, duration_s - self.decode_step_s(num_rows)))
        if self._last_chunk is not None and (fixed_s := chunk.fixed_s(self._last_chunk)) is not None:
            self._chunk_s.add(None, fixed_s)
        self._last_chunk, self._largest_chunk = chunk, max(self._largest_chunk, num_prompt_tokens)
        self._token_s.add(depth.bit_length(), max(0.0, chunk.seconds - self.chunk_s) / num_prompt_tokens)

    def decode_step_s(self, num_rows: int) -> float:
        """Seconds of a step that only decodes `num_rows` rows; 0 if never measured."""
        return median_low(_nearest(self._decode_s, num_rows))

    @property
    def chunk_s(self) -> float:
        """Fixed seconds that a prompt chunk adds to a step; 0 if never measured."""
        return self._chunk_s.usual(None) or 0.0

    def prompt_token_s(self, depth: int = 0) -> float:
        """Seconds per prompt token beyond that; 0 if never measured."""
        return median_low(_nearest(self._token_s, depth + _SHALLOW))

    def spare_s(self, num_rows: int, slowdown: float = SLOWDOWN, num_prompts: int = 1) -> float:
        """Seconds that a step may spend on that many prompts beside `num_rows` decoding rows; 0 if unknown."""
        if not self._decode_s.known():
            return 0.0
        rising = _nearest(self._decode_s, num_rows)
        # the second slowest: the slowest may have been disturbed
        slow_s = rising[max(len(rising) - 2, (len(rising) - 1) // 2)]
        gap_s = STREAM_GAP_S * max(1.0, num_prompts / (2 * num_rows))
        return max(slowdown * slow_s, gap_s) - self.decode_step_s(num_rows)

    def prompt_budget(
        self, num_rows: int, chunk_tokens: int, slowdown: float = SLOWDOWN, depth: int = 0, num_prompts: int = 1
    ) -> int:
        """Prompt tokens for a step beside `num_rows` decoding rows; 0 for a decode-only step.

        At most `chunk_tokens`, and all of them if no rows decode. num_prompts: that the tokens may come from.
        """
        if num_rows == 0:
            return chunk_tokens
        if not self._decode_s.known() or self._num_mixed >= REMEASURE_EVERY:
            return 0
        budget = self._tokens_within(self.spare_s(num_rows, slowdown, num_prompts), chunk_tokens, depth)
        is_halved = self._num_mixed % 2 if self._chunk_s.usual(None) is None else self._num_mixed == REMEASURE_EVERY - 1
        return -(-budget // 2) if is_halved else budget

    def budget_within(self, limit_s: float, chunk_tokens: int, depth: int = 0) -> int:
        """Prompt tokens for a step that may spend `limit_s` on them; 0 if there is no time."""
        return self._tokens_within(limit_s, chunk_tokens, depth) if limit_s > 0 else 0

    def _tokens_within(self, limit_s: float, chunk_tokens: int, depth: int) -> int:
        """At least 1; more where the fixed cost would dominate, so that the tokens may cost as much as the chunk.

        At most four times as many as in the largest chunk so far, because extrapolation is unsafe, and at least one
        grid block while the fixed cost is unknown.
        """
        limit_tokens_s, token_s = max(limit_s - self.chunk_s, self.chunk_s), self.prompt_token_s(depth)
        affordable = chunk_tokens if token_s * chunk_tokens <= limit_tokens_s else int(limit_tokens_s / token_s)
        if self._chunk_s.usual(None) is None:
            affordable = max(affordable, PREFILL_GRID)
        return min(chunk_tokens, max(PREFILL_GRID, 4 * self._largest_chunk), max(1, affordable))


@dataclass(frozen=True, slots=True)
class _ChunkTime:
    """The prompt tokens of one step, and the time they added to it."""

    num_tokens: int
    depth: int
    seconds: float

    def fixed_s(self, other: _ChunkTime) -> float | None:
        """The fixed cost by a line through two chunks; None if they are too similar.

        Chunks at different depths differ in their cost per token, too.
        """
        if self.depth.bit_length() != other.depth.bit_length():
            return None
        small, large = sorted((self, other), key=lambda chunk: chunk.num_tokens)
        if 3 * small.num_tokens > 2 * large.num_tokens:
            return None
        slope = (large.seconds - small.seconds) / (large.num_tokens - small.num_tokens)
        return min(max(0.0, small.seconds - slope * small.num_tokens), small.seconds, large.seconds)


def _nearest(times: RecentTimes[int], count: int) -> list[float]:
    return times.nearest(lambda octave: 2 * abs(octave - count.bit_length()) + (octave > count.bit_length())) or [0.0]
