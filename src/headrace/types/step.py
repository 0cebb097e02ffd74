"""A step of the engine: what the scheduler plans and what the runner answers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens that bring one sequence's computed length up to date.

    Decode is one token, verification one plus its drafts, prefill many: the runner sees no phases.

    start: how many tokens of the sequence were computed before; token_ids[0] stands at this index.
    num_drafts: how many of the last token_ids are guesses; the rest are certain.
    samples: whether the token after the chunk is wanted (false for all but a prompt's last chunk).
    output_index: index that the first sampled token has in the output; keys the draw.
    """

    sequence_id: str
    start: int
    token_ids: tuple[int, ...]
    num_drafts: int = 0
    samples: bool = True
    output_index: int = 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """All that one step computes. At most one chunk per sequence; never empty when executed."""

    chunks: tuple[Chunk, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens in the step, over all sequences."""
        return sum(len(chunk.token_ids) for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """What became of a chunk.

    num_committed: how many of its tokens now belong to the sequence's state.
    token_ids: tokens gained: accepted drafts and the sampled one; empty if it did not sample.
    """

    sequence_id: str
    num_committed: int
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ChunkFailure:
    """A chunk whose own work raised; its neighbours are unharmed."""

    sequence_id: str
    error: BaseException


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results and failures, one for each chunk of the plan."""

    results: tuple[ChunkResult, ...]
    failures: tuple[ChunkFailure, ...] = ()
