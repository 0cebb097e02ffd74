"""Output: token ids from the engine, events of a request from its session.

What is made for each row of each step is not frozen: a frozen dataclass takes four times as long to make.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from enum import StrEnum
from operator import attrgetter
from typing import Any

from headrace.types.media import Route
from headrace.types.request import Bypass


class FinishReason(StrEnum):
    """Why an output ended."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probabilities of the model's raw distribution: before bias, penalties and temperature.

    top: the requested number of most likely (token id, log-probability), best first.
    rank: 1 for the most likely token.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class SparseUsage:
    """Uncached prompt tokens under sparse prefill.

    num_kept: computed.
    num_dropped: left out.
    bypasses: why prompts were computed in full, each reason once.
    """

    num_kept: int
    num_dropped: int
    bypasses: tuple[Bypass, ...] = ()


@dataclass(slots=True)
class OutputTimes:
    """Of a request, in monotonic seconds: when its first step began, its first output came, and its latest one."""

    began_s: float
    first_s: float
    last_s: float

    def __reduce__(self) -> tuple[Any, ...]:
        return OutputTimes, (self.began_s, self.first_s, self.last_s)


@dataclass(slots=True)
class TokenOutput:
    """Tokens that one step of the engine added to one choice of a request.

    token_ids: new tokens in order, the stop token left out; may be empty at the finish.
    finish_reason: set once, on the last output of the choice.
    stop_token_id: the sampled stop token that ended the choice; None if it ended otherwise.
    num_cached_tokens: prompt tokens that were not computed for this request.
    logprobs: one for each token and for the stop token after them, if they were asked for.
    num_drafted: drafts that the step verified. num_accepted: of these, how many were right.
    reuse: on the first output of choice 0: what of the prompt came out of the prefix cache, and why no more.
    sparse: on the first output of choice 0: what sparse prefill made of the prompt; None where it is off.
    prompt_logprobs: on the first output of choice 0 if asked for, which then comes before any other choice's; None for
    the prompt's first token, which has none.
    times: None for an output that no scheduler made.
    num_processed: prompt tokens cached or computed so far; only in outputs without tokens, which come after each step
    of a prompt if asked for.
    vector: see ChunkResult.
    """

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    choice: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    reuse: str | None = None
    num_drafted: int = 0
    num_accepted: int = 0
    sparse: SparseUsage | None = None
    stop_token_id: int | None = None
    times: OutputTimes | None = field(default=None, compare=False)
    num_processed: int | None = None
    vector: bytes | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # A dataclass with slots otherwise takes twice as long to cross to another process.
        return TokenOutput, _OUTPUT_FIELDS(self)

    @property
    def num_tokens(self) -> int:
        """Sampled tokens, the stop token included."""
        return len(self.token_ids) + (self.stop_token_id is not None)


_OUTPUT_FIELDS = attrgetter(*(each.name for each in fields(TokenOutput)))


@dataclass(frozen=True, slots=True)
class DecodedLogprob:
    """A token and its log-probability, as shown to clients.

    text: of the token alone; incomplete characters show as U+FFFD.
    data: the bytes that it adds to the answer; None for special and stop tokens.
    logprob, rank: see TokenLogprobs; None for a prompt's first token.
    top: the most likely tokens at this position, best first; their own `top` is empty.
    """

    token_id: int
    text: str
    data: bytes | None
    logprob: float | None
    rank: int | None
    top: tuple[DecodedLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a request would cost here, before it is queued; the first event if it was requested.

    num_prompt_tokens: of all its prompts. num_uncached_tokens: of the prompt with most of them.
    wait_s: estimated seconds by which the requests in progress delay its first token; None if unknown.
    """

    num_prompt_tokens: int
    num_uncached_tokens: int
    wait_s: float | None


@dataclass(frozen=True, slots=True)
class Started:
    """The prompts are rendered and queued; the first event of every request but for a Forecast. Token counts cover all
    prompts.

    usage_so_far: counts at the time of the call, for answers that end without a Finished.
    """

    num_prompt_tokens: int
    route: Route = Route.TEXT
    usage_so_far: Callable[[], Usage] | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class DecodedPromptLogprobs:
    """Those of one prompt's tokens, if requested; before the text of its first choice."""

    choice: int
    logprobs: tuple[DecodedLogprob, ...]


@dataclass(frozen=True, slots=True)
class Text:
    """Text of one choice, in order, never empty.

    logprobs: of the tokens whose text begins in this event, if requested. Those of all events of a choice together
    contain each of its tokens exactly once.
    """

    text: str
    choice: int = 0
    logprobs: tuple[DecodedLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Thinking of one choice, in order, never empty. `logprobs` as in Text."""

    text: str
    choice: int = 0
    logprobs: tuple[DecodedLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class HiddenLogprobs:
    """Log-probabilities of tokens without visible text: markers, white space around them, the syntax of calls.

    Comes before the next text of its choice; at a choice's end `Finished` carries them.
    """

    logprobs: tuple[DecodedLogprob, ...]
    choice: int = 0


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call to a declared tool begins; `index` counts the calls of this answer from 0."""

    index: int
    id: str
    name: str
    choice: int = 0


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """A piece of a call's arguments.

    All pieces of an index joined are valid JSON, unless the answer was cut off in a long call: by LENGTH, or because
    the model wrote invalid JSON.
    """

    index: int
    text: str
    choice: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request over all its choices; a prompt counts once.

    Cached tokens were really skipped; reasoning is part of output; accepted drafts are part of drafted.
    route: media if any prompt has some.
    sparse: over all prompts; None where sparse prefill is off.
    kv_bits: of stored keys and values; None if they are exact.
    prompt_s: from the first step of a prompt to the first output. output_s: from there to the last output. With several
    prompts, from the earliest to the latest of them, so that the two may overlap.
    times: when the first prompt's first step began, the last prompt's first output came, and the latest output; None
    before the first output.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0
    num_reasoning_tokens: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    route: Route = Route.TEXT
    sparse: SparseUsage | None = None
    kv_bits: int | None = None
    prompt_s: float = field(default=0.0, compare=False)
    output_s: float = field(default=0.0, compare=False)
    times: OutputTimes | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Progress:
    """Token counts of the request so far, before each event, if requested."""

    usage: Usage


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """How far a prompt is, after each of its steps, if requested.

    choice: the prompt's first. num_processed_tokens: cached ones included. seconds: since its first step began.
    """

    choice: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_processed_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a choice; that of the last choice ends every successful request.

    usage: of the request so far, so the last one has all of it.
    logprobs: of tokens that no earlier event covers: a stop string, the end of a call, the stop token.
    stop_string: the one that ended the choice, or None.
    """

    reason: FinishReason
    usage: Usage
    choice: int = 0
    logprobs: tuple[DecodedLogprob, ...] = ()
    stop_string: str | None = None


Event = (
    Forecast
    | Started
    | PrefillProgress
    | DecodedPromptLogprobs
    | Text
    | Reasoning
    | HiddenLogprobs
    | ToolCallStart
    | ToolArguments
    | Progress
    | Finished
)
