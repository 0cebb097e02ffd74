"""A step of the engine: the scheduler's plan and the runner's results.

What is made for each row of each step is not frozen: a frozen dataclass takes four times as long to make.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.types.events import TokenLogprobs


@dataclass(slots=True)
class Chunk:
    """Tokens that advance one sequence's computed length.

    Decode is one token, verification one and its drafts, prefill many: the runner sees no phases.

    choice: the sequence's choice index.
    start: tokens of the sequence computed before; the index of token_ids[0].
    num_drafts: how many of its pending drafts the runner may append to the token_ids.
    samples: whether to sample the token after the chunk (false for all but a prompt's last chunk).
    output_index: output index of the first sampled token; keys the random draw.
    forks: sequences (choices 1, 2, …) that start from the state after this chunk. Each gets its own first token from
    the chunk's last logits, and a ChunkResult that commits nothing.
    """

    sequence_id: str
    request_id: str
    start: int
    token_ids: tuple[int, ...]
    num_drafts: int = 0
    samples: bool = True
    output_index: int = 0
    choice: int = 0
    forks: tuple[str, ...] = ()

    @property
    def is_prompt(self) -> bool:
        """Whether its tokens are the prompt's."""
        return self.output_index == 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Everything that one step computes, with at most one chunk per sequence.

    preempted: sequences to reduce to a checkpoint first; each resumes from it with its next chunk.
    """

    chunks: tuple[Chunk, ...]
    preempted: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not self.chunks and not self.preempted

    @property
    def num_tokens(self) -> int:
        """Tokens in the step over all sequences, drafts included."""
        return sum(len(chunk.token_ids) + chunk.num_drafts for chunk in self.chunks)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks if chunk.is_prompt)


@dataclass(slots=True)
class ChunkResult:
    """The result of a chunk.

    num_committed: how many of its tokens, accepted drafts included, are now in the sequence's state.
    token_ids: tokens gained: accepted drafts and the token sampled after them; empty if it did not sample.
    num_verified: drafts verified.
    vector: of a pooling model, float32 in the machine's order, after a prompt's last chunk; the token beside it means
    nothing.
    logprobs: one for each token gained, if requested.
    prompt_logprobs: of the prompt tokens start + 1 to start + num_committed that exist, if requested: what the chunk's
    tokens predicted.
    """

    sequence_id: str
    num_committed: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    num_verified: int = 0
    vector: bytes | None = None


@dataclass(frozen=True, slots=True)
class ChunkFailure:
    """A chunk whose computation raised; other chunks are unaffected."""

    sequence_id: str
    error: BaseException


@dataclass(frozen=True, slots=True)
class StepResult:
    """One result or failure for each chunk of the plan and each of its forks."""

    results: tuple[ChunkResult, ...]
    failures: tuple[ChunkFailure, ...] = ()
