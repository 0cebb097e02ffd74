"""What a client asked for, a chat or a completion, after its dialect has been translated away."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.types.media import AS_MADE, MediaOptions

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class TextPart:
    """A run of text inside a message."""

    text: str


@dataclass(frozen=True, slots=True)
class MediaPart:
    """An image or a video inside a message.

    source: a URL, a `data:` URL, base64 or a path. param: the field that it came in, for errors.
    """

    kind: Literal["image", "video"]
    # Megabytes, of which no template shows anything: digests of what templates have shown are made of the rest.
    source: str = field(repr=False)
    options: MediaOptions = AS_MADE
    param: str = field(default="messages", compare=False)


ContentPart = TextPart | MediaPart


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the assistant made; `arguments` is JSON text exactly as it was given."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolDefinition:
    """A function that the model may call; `parameters` is its JSON schema, which strict arguments must fit.

    is_deferred: may be called, but is no part of the prompt's head; the conversation tells the model about it.
    """

    name: str
    description: str | None
    parameters: Mapping[str, Any]
    strict: bool = False
    is_deferred: bool = False


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model calls tools.

    mode: `none` it does not, `auto` as it likes, `required` at least one call. names: the only tools that it may
    call, None for every declared one; a single name with `required` is a named choice. is_parallel: several calls in
    one answer may come.
    """

    mode: Literal["none", "auto", "required"] = "auto"
    names: tuple[str, ...] | None = None
    is_parallel: bool = True


@dataclass(frozen=True, slots=True)
class Structure:
    """The form that the answer must have, thinking left out.

    kind: what `value` is: a JSON schema (mapping or boolean), nothing for any JSON object, a regular expression, a
    tuple of texts of which one must come, or a grammar in Lark's syntax as llguidance reads it. path: the field that
    said it, which an error names.
    """

    kind: Literal["json_schema", "json_object", "regex", "choice", "grammar"]
    value: Any = None
    path: str = field(default="response_format", compare=False)


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn. `developer` arrives here as `system`; absent content is an empty tuple.

    param: the field that the id of a tool's result came in, for errors.
    """

    role: Role
    content: tuple[ContentPart, ...] = ()
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    param: str = field(default="messages", compare=False)


@dataclass(frozen=True, slots=True)
class RequestedSampling:
    """Sampling as the client said it; `None` means that the client left it to us."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    min_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class RequestedStop:
    """When to end, as the client said it; `max_tokens=None` means up to the context's end."""

    max_tokens: int | None = None
    strings: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class RequestedAnswers:
    """How many answers, what is told about their tokens, and how far ahead they are guessed; see GenerationRequest.

    counts_progress: token counts come with every event, not only at the end.
    """

    num_choices: int = 1
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    max_draft_tokens: int | None = None
    counts_progress: bool = False


@dataclass(frozen=True, slots=True)
class RequestedSparse:
    """Whether a long prompt may be thinned, as the client said it.

    prefill: True and False are said in so many words, None leaves it to the server. keep: share of the uncached tokens
    that is computed; None is the server's.
    """

    prefill: bool | None = None
    keep: float | None = None


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A whole chat request, free of any dialect. `session`, `priority`, `cache_salt` as in GenerationRequest."""

    request_id: str
    messages: tuple[ChatMessage, ...]
    tools: tuple[ToolDefinition, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    structure: Structure | None = None
    sampling: RequestedSampling = RequestedSampling()
    stop: RequestedStop = RequestedStop()
    answers: RequestedAnswers = RequestedAnswers()
    sparse: RequestedSparse = RequestedSparse()
    session: str = ""
    priority: int = 0
    cache_salt: str = ""
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None
    thinking_budget: int | None = None
    """The most tokens that thinking may take; then it is closed and the answer begins. None is no limit."""
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Further variables for the chat template (`chat_template_kwargs`)."""
    continue_final_message: bool = False
    """The last message is an unfinished assistant turn that the model goes on with."""


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """Prompts to be continued as they stand, without a chat template; each a text or token ids.

    Choices are counted on over the prompts: those of prompt p are p * num_choices and the ones after it.
    stop.max_tokens: 0 asks for nothing but the prompt's own scores.
    echo: each answer begins with its prompt.
    """

    request_id: str
    prompts: tuple[str | tuple[int, ...], ...]
    sampling: RequestedSampling = RequestedSampling()
    stop: RequestedStop = RequestedStop()
    answers: RequestedAnswers = RequestedAnswers()
    sparse: RequestedSparse = RequestedSparse()
    session: str = ""
    priority: int = 0
    cache_salt: str = ""
    echo: bool = False
