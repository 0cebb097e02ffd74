"""What comes out: token ids from the engine, events from a session."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class FinishReason(StrEnum):
    """Why an output ended."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CONTENT_FILTER = "content_filter"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probabilities under the model's raw distribution: before bias, penalties and temperature.

    top: the most likely (token id, log-probability), best first, as many as were asked for.
    rank: 1 for the most likely token.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """Tokens that one step of the engine added to one choice of a request.

    token_ids: new tokens in order, the stop token left out; may be empty at the finish.
    finish_reason: set once, on the last output of the choice.
    num_cached_tokens: prompt tokens that were not computed for this request.
    logprobs: one for each token if they were asked for.
    prompt_logprobs: on the first output of choice 0 if asked for; None for the prompt's first token, which has none.
    """

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    choice: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


@dataclass(frozen=True, slots=True)
class Started:
    """The prompt is rendered and queued; the first event of every session."""

    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Text:
    """Answer text, in order, never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Thinking text, in order, never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call to a declared tool begins; `index` counts the calls of this answer from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """A piece of a call's arguments; all pieces of an index joined are valid JSON."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request. Cached tokens were really skipped; reasoning is part of output."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0
    num_reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of every session that ended well."""

    reason: FinishReason
    usage: Usage


Event = Started | Text | Reasoning | ToolCallStart | ToolArguments | Finished
