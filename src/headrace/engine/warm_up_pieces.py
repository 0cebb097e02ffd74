"""The pieces of a warm-up: which made-up requests build what an ordinary load needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from headrace.backend.cuda.shapes import LONGEST_WINDOW
from headrace.models.padding import next_power_of_two, padded_chunk_tokens, padded_chunks, padded_rows
from headrace.scheduler.admission import MemoryBudget
from headrace.speculate.model import LATEST_TOKENS
from headrace.state.slabs import SMALLEST_CAPACITY
from headrace.types.request import GREEDY, SamplingParams

MOST_ROWS = 64

PROMPT_TOKENS = 2 * LONGEST_WINDOW

_MANY_SNAPSHOTS = 4

_SAMPLED = replace(GREEDY, temperature=0.7, top_p=0.8, top_k=20, min_p=0.05)


@dataclass(frozen=True, slots=True)
class RowDrafts:
    """Drafts of every row of a step. by_model: by the drafter, else their tokens are known before the step."""

    number: int
    by_model: bool


NO_DRAFTS = RowDrafts(0, by_model=False)
_PLAIN_STEPS = (NO_DRAFTS,) * 4
"""The second is launched before the first one's tokens are known, the third after such a step."""


@dataclass(frozen=True, slots=True)
class WarmUpPiece:
    """Requests that start together, with prompts of `prompt_tokens`; then a step for each of `drafts`.

    joining: length of a prompt that then takes the place of the oldest row; 0 for none. num_snapshots: that each prompt
    leaves in a prefix cache, which is dropped after the piece; 0 without a cache. With one, the joining prompt begins
    like the oldest row's.
    """

    num_rows: int
    prompt_tokens: int = PROMPT_TOKENS
    sampling: SamplingParams = GREEDY
    drafts: tuple[RowDrafts, ...] = ()
    joining: int = 0
    num_snapshots: int = 0

    @property
    def max_tokens(self) -> int:
        return 8 + sum(1 + each.number for each in self.drafts)

    @property
    def num_tokens(self) -> int:
        return max(self.prompt_tokens, self.joining) + self.max_tokens

    def num_bytes(self, memory: MemoryBudget) -> int:
        """The most that it holds at once; with a cache also records of its prompts."""
        num_records = 1 + self.num_snapshots if self.num_snapshots else 0
        return self.num_rows * (memory.cost(self.num_tokens) + num_records * memory.checkpoint_bytes(self.num_tokens))


def pieces_for(
    max_rows: int, chunk_tokens: int, max_drafts: int, *, caches: bool, prefills: bool = False
) -> list[WarmUpPiece]:
    """What an ordinary load needs: steps of windows, then of chunks of prompts, the smallest first.

    max_rows, chunk_tokens: of a step. max_drafts: of a sequence at once. caches: whether there is a prefix cache.
    prefills: whether a draft model processes prompts, too.
    """
    found: list[WarmUpPiece] = []
    for num_rows in _sizes(padded_rows, max_rows):
        for sampling in (GREEDY, _SAMPLED):
            found.append(WarmUpPiece(num_rows, sampling=sampling, drafts=_PLAIN_STEPS))
            if max_drafts:
                found.append(WarmUpPiece(num_rows, sampling=sampling, drafts=_with_head_prefills(max_drafts)))
        windows = _sizes(next_power_of_two, 1 + max_drafts)
        found += [WarmUpPiece(num_rows, drafts=_both(length - 1)) for length in windows[1:-1]]
        # steps of as many tokens, whose windows may be of any length, have one variant
        found += [WarmUpPiece(num_rows, length) for length in _sizes(next_power_of_two, LONGEST_WINDOW)]
        if max_drafts:
            found += _short_prompts_beside_drafts(num_rows, max_drafts)
    for num_rows in _sizes(padded_chunks, max_rows):
        # conversations have several branch points; more rows rarely begin at once
        snapshots = [each for each in (1, _MANY_SNAPSHOTS) if num_rows * each <= max(num_rows, MOST_ROWS)] * caches
        # so short only where the prefix cache wants something of them
        found += [WarmUpPiece(num_rows, LONGEST_WINDOW, num_snapshots=each) for each in snapshots]
        for num_tokens in _sizes(padded_chunk_tokens, chunk_tokens):
            if num_tokens > num_rows * LONGEST_WINDOW:
                found += [WarmUpPiece(num_rows, num_tokens // num_rows, num_snapshots=each) for each in (0, *snapshots)]
    if prefills:
        by_model, _ = _both(max_drafts)
        lengths = [each for each in _sizes(padded_chunk_tokens, LATEST_TOKENS) if each <= chunk_tokens]
        found += [WarmUpPiece(1, length, drafts=(by_model,)) for length in lengths]
    # a row that moves to a larger slot, and one that is restored
    few = SMALLEST_CAPACITY - len(_PLAIN_STEPS) // 2
    if few <= chunk_tokens:
        found.append(WarmUpPiece(1, few, drafts=_PLAIN_STEPS, joining=few * caches, num_snapshots=int(caches)))
    # rows that don't fill their size: their tokens are gathered on the device, and its kernel is built at the first use
    found += [WarmUpPiece(rows, drafts=_PLAIN_STEPS) for rows in range(1, max_rows + 1) if padded_rows(rows) > rows][:1]
    if max_rows > 1:  # beside a row with drafts, or without
        drafts = (RowDrafts(max_drafts, by_model=True),) if max_drafts else ()
        found.append(WarmUpPiece(2, drafts=drafts, joining=PROMPT_TOKENS))
    return found


def _short_prompts_beside_drafts(num_rows: int, max_drafts: int) -> list[WarmUpPiece]:
    """Where they make a step larger than drafts alone do."""
    by_model, _ = _both(max_drafts)
    num_decoding = (num_rows - 1) * (1 + max_drafts)
    larger = [size for size in _sizes(next_power_of_two, LONGEST_WINDOW) if size > next_power_of_two(1 + max_drafts)]
    lengths = [max(1, num_rows * size // 2 + 1 - num_decoding) for size in larger]
    return [WarmUpPiece(num_rows, drafts=(by_model,), joining=length) for length in lengths if length <= LONGEST_WINDOW]


def _sizes(padded: Callable[[int], int], most: int) -> list[int]:
    return sorted({min(padded(number), most) for number in range(1, most + 1)})


def _both(number: int) -> tuple[RowDrafts, ...]:
    return RowDrafts(number, by_model=True), RowDrafts(number, by_model=False)


def _with_head_prefills(number: int) -> tuple[RowDrafts, ...]:
    """Steps with drafts, with a head prefill of one token per row, two, up to four and up to eight."""
    by_model, known = _both(number)
    few, more, many = _PLAIN_STEPS[:1], _PLAIN_STEPS[:2], _PLAIN_STEPS
    return by_model, *few, by_model, *more, by_model, known, *many, by_model
