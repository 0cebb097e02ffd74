"""What the engine is asked to do. It knows token ids only, never text."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class BoundaryKind(StrEnum):
    """Where a conversation may branch."""

    SYSTEM = "system"
    """After the system prompt and the tools."""
    MESSAGE = "message"
    """After a message."""
    PROMPT = "prompt"
    """Before the generation prompt."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """A prompt's first `num_tokens` tokens stay the same when the conversation goes on."""

    num_tokens: int
    kind: BoundaryKind


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn. All values are resolved: nothing is left to a default.

    temperature: under 1e-5 the most likely token is taken.
    top_p: in (0, 1], 1 is off. top_k: 0 is off. min_p: in [0, 1], 0 is off.
    seed: the draw at output index i depends on (seed, i) and on nothing else but the logits.
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt to be continued.

    prompt: token ids, not empty. max_tokens: at least 1; prompt + max_tokens fits the context.
    stop_token_ids: the first of these ends the output and is not part of it.
    """

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    boundaries: tuple[Boundary, ...] = ()
