"""A step of the engine: what the scheduler plans and what the runner answers."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.types.events import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens that bring one sequence's computed length up to date.

    Decode is one token, verification one and its drafts, prefill many: the runner sees no phases.

    choice: which of its request's continuations the sequence is.
    start: how many tokens of the sequence were computed before; token_ids[0] stands at this index.
    num_drafts: how many of the guesses that the runner holds ready it may add to the window, behind the token_ids.
    samples: whether the token after the chunk is wanted (false for all but a prompt's last chunk).
    output_index: index that the first sampled token has in the output; keys the draw.
    forks: sequences (choices 1, 2, …) that begin with the state after this chunk. Each gets a first token of its own,
    drawn from the chunk's last logits, and a ChunkResult that commits nothing.
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


@dataclass(frozen=True, slots=True)
class StepPlan:
    """All that one step computes. At most one chunk per sequence.

    preempted: sequences that make room first: a checkpoint of their state is kept, and each goes on from there with its
    next chunk, in whichever step that comes.
    """

    chunks: tuple[Chunk, ...]
    preempted: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not self.chunks and not self.preempted

    @property
    def num_tokens(self) -> int:
        """Tokens in the step, over all sequences, drafts too."""
        return sum(len(chunk.token_ids) + chunk.num_drafts for chunk in self.chunks)

    @property
    def num_prompt_tokens(self) -> int:
        """Of these, the prompts'."""
        return sum(len(chunk.token_ids) for chunk in self.chunks if chunk.output_index == 0)


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """What became of a chunk.

    num_committed: how many of its tokens, right drafts included, now belong to the sequence's state.
    token_ids: tokens gained: right drafts and the token drawn behind them; empty if it did not sample.
    num_verified: drafts that were verified; what was gained beyond one token were the right ones among them.
    logprobs: one for each token gained, if the request asked for them.
    prompt_logprobs: of the prompt tokens start + 1 to start + num_committed that exist, if asked for: what the chunk's
    tokens predicted.
    """

    sequence_id: str
    num_committed: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    num_verified: int = 0


@dataclass(frozen=True, slots=True)
class ChunkFailure:
    """A chunk whose own work raised; its neighbours are unharmed."""

    sequence_id: str
    error: BaseException


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results and failures, one for each chunk of the plan and for each of its forks."""

    results: tuple[ChunkResult, ...]
    failures: tuple[ChunkFailure, ...] = ()
