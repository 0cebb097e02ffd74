"""A chat or completion request, independent of its API dialect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.types.media import DEFAULT_MEDIA_OPTIONS, MediaOptions
from headrace.types.request import SamplingParams

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class TextPart:
    text: str


@dataclass(frozen=True, slots=True)
class MediaPart:
    """An image or a video in a message.

    source: a URL, a `data:` URL, base64 or a path. param: its field, for errors.
    """

    kind: Literal["image", "video"]
    # Megabytes that no template shows; digests of what templates have shown use the rest.
    source: str = field(repr=False)
    options: MediaOptions = DEFAULT_MEDIA_OPTIONS
    param: str = field(default="messages", compare=False)


ContentPart = TextPart | MediaPart


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call by the assistant; `arguments` is its JSON text, unchanged."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolDefinition:
    """A function that the model may call; `parameters` is its JSON schema, which strict arguments must match.

    is_deferred: callable but not in the prompt's header; the conversation introduces it.
    """

    name: str
    description: str | None
    parameters: Mapping[str, Any]
    strict: bool = False
    is_deferred: bool = False


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model calls tools.

    mode: `none`, `auto`, or `required` for at least one call.
    names: the only tools that may be called, None for all; a single name with `required` is a named choice.
    is_parallel: several calls in one answer are allowed.
    """

    mode: Literal["none", "auto", "required"] = "auto"
    names: tuple[str, ...] | None = None
    is_parallel: bool = True


@dataclass(frozen=True, slots=True)
class Structure:
    """The required form of the answer, thinking excluded.

    kind: the type of `value`: a JSON schema (mapping or boolean), nothing for any JSON object, a regular expression, a
    tuple of choices, or a grammar in llguidance's Lark syntax.
    path: the request field, for errors.
    """

    kind: Literal["json_schema", "json_object", "regex", "choice", "grammar"]
    value: Any = None
    path: str = field(default="response_format", compare=False)


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn. `developer` has become `system`; missing content is an empty tuple.

    param: the field of a tool result's id, for errors.
    """

    role: Role
    content: tuple[ContentPart, ...] = ()
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    param: str = field(default="messages", compare=False)

    @property
    def texts(self) -> tuple[str, ...]:
        """All that it says, thinks and calls; media have none."""
        said = (part.text for part in self.content if isinstance(part, TextPart))
        return (*said, self.reasoning or "", *(call.arguments for call in self.tool_calls))

    @property
    def can_be_continued(self) -> bool:
        return self.role == "assistant" and not self.tool_calls and bool(self.content or self.reasoning)


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """What a request sets beside its prompt and its answer's form. Names as in GenerationRequest.

    max_tokens: None for all that the context leaves. A completion's 0 requests only the prompt's log-probabilities.
    stop_strings, stop_token_ids: end an answer, beside the model's own end tokens, which ignore_eos drops.
    counts_progress: every event has token counts, not only the last.
    reports_progress: events say how far the prompt is.
    forecast_beyond: the first event is a Forecast, exact for a prompt of more tokens than this; None for no such event.
    may_hand_over: whether another server may answer the request.
    sparse_prefill: True, False, or None to leave it to the server. sparse_keep: share of the uncached tokens to
    compute; None is the server's. adapter: the name of one; None for the model alone.
    """

    sampling: SamplingParams = SamplingParams()
    max_tokens: int | None = None
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_choices: int = 1
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    max_draft_tokens: int | None = None
    counts_progress: bool = False
    reports_progress: bool = False
    forecast_beyond: int | None = None
    may_hand_over: bool = True
    sparse_prefill: bool | None = None
    sparse_keep: float | None = None
    session: str = ""
    priority: int = 0
    cache_salt: str = ""
    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A whole chat request."""

    request_id: str
    messages: tuple[ChatMessage, ...]
    tools: tuple[ToolDefinition, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    structure: Structure | None = None
    options: GenerationOptions = GenerationOptions()
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None
    thinking_budget: int | None = None
    """The most thinking tokens; then thinking is closed and the answer begins. None is no limit."""
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Extra variables for the chat template (`chat_template_kwargs`)."""
    continue_final_message: bool = False
    """The last message is an unfinished assistant turn for the model to continue."""


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """Prompts to continue without a chat template, each a text or token ids.

    Choices are numbered across prompts: prompt p has those from p * num_choices.
    echo: each answer begins with its prompt.
    """

    request_id: str
    prompts: tuple[str | tuple[int, ...], ...]
    options: GenerationOptions = GenerationOptions()
    echo: bool = False
