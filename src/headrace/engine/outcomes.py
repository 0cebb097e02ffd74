"""A step's result for a chunk, as reported to the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.engine.draws import Drawn
from headrace.engine.windows import Window
from headrace.errors import GenerationFailed, GrammarFailed
from headrace.grammar.constraint import Constraint
from headrace.types.events import TokenLogprobs
from headrace.types.step import Chunk, ChunkFailure, ChunkResult


@dataclass(slots=True)
class Outcome:
    """A step's tokens for a chunk: what its window gained, and one for each of its forks. error: why none."""

    gained: Sequence[Drawn] = ()
    forks: Sequence[Drawn] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    error: Exception | None = None


def result_of(window: Window, num_committed: int, token_ids: tuple[int, ...], outcome: Outcome) -> ChunkResult:
    """Of a chunk whose tokens were sampled."""
    return ChunkResult(
        window.chunk.sequence_id,
        num_committed,
        token_ids,
        tuple([one.logprobs for one in outcome.gained if one.logprobs is not None]),
        outcome.prompt_logprobs,
        window.num_drafts,
    )


def failures_of(chunk: Chunk, error: BaseException) -> list[ChunkFailure]:
    """Of the chunk and its forks."""
    return [ChunkFailure(sequence_id, error) for sequence_id in (chunk.sequence_id, *chunk.forks)]


def not_drawn(sequence_id: str, constraint: Constraint | None) -> ChunkFailure:
    """Of a sequence without a token at some position."""
    if constraint is not None:
        return ChunkFailure(sequence_id, GrammarFailed("the answer's grammar leaves no token that can be drawn"))
    error = GenerationFailed("no token can be drawn: the logits are not numbers, or every token is banned")
    return ChunkFailure(sequence_id, error)
