"""POST /v1/responses: its body and its translation to a ChatRequest.

Fields are declared here and in openai_sampling.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import ConfigDict, Field

from headrace.api.ids import new_id
from headrace.api.json_body import JsonBody, StrictBody, check, check_at, ignored_names, read_object, unknown_fields
from headrace.api.openai_chat import Effort
from headrace.api.openai_sampling import (
    MAX_LOGPROBS,
    Call,
    SamplingBody,
    sampling_options,
)
from headrace.api.openai_tools import refuse_large_arguments
from headrace.api.responses_items import (
    SKIPPED_ITEMS,
    Item,
    ReadItem,
    ReferenceItem,
    input_items,
    item_type,
    read_items,
)
from headrace.api.responses_tools import DeclaredTools, declared_tools, tool_choice
from headrace.api.responses_turns import chat_turns
from headrace.errors import ContextTooLong, HeadraceError, InvalidRequest
from headrace.types.chat import ChatMessage, ChatRequest, Structure, TextPart
from headrace.types.model import ModelTraits


class PlainFormat(StrictBody):
    type: Literal["text", "json_object"]


class SchemaFormat(StrictBody):
    model_config = ConfigDict(populate_by_name=True)

    type: Literal["json_schema"]
    # Only used by the client.
    name: str | None = None
    description: str | None = None
    # BaseModel already has a method named `schema`.
    json_schema: Annotated[dict[str, Any] | bool, Field(alias="schema")]
    strict: bool | None = None


class TextBody(StrictBody):
    """`text`. No open model's template reads verbosity."""

    format: Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningBody(StrictBody):
    """`reasoning`. Any summary is the whole thinking; nothing shortens it."""

    effort: Effort | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None


def wants_summary(reasoning: ReasoningBody | None) -> bool:
    asked = None if reasoning is None else reasoning.summary or reasoning.generate_summary
    return asked not in (None, "", "none")


def requested_structure(text: TextBody | None) -> Structure | None:
    form = text.format if text is not None else None
    if isinstance(form, SchemaFormat):
        return Structure("json_schema", form.json_schema, "text.format")
    return Structure("json_object", path="text.format") if form is not None and form.type == "json_object" else None


_LOGPROBS = "message.output_text.logprobs"
_ENCRYPTED = "reasoning.encrypted_content"
_WITHOUT_EFFECT = frozenset(
    {
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)


class ResponsesBody(SamplingBody):
    """The supported fields."""

    neutral_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "background": (False,),
        "chat_template_kwargs": ({},),
        "context_management": ([],),
        "conversation": (),
        "enable_thinking": (),
        "grammar": ("",),
        "guided_choice": (),
        "guided_grammar": (),
        "guided_json": (),
        "guided_regex": (),
        "messages": (),
        "moderation": (),
        "prompt": (),
        "response_format": (),
        "structured_outputs": (),
    }
    without_effect: ClassVar[frozenset[str]] = frozenset(
        {
            "client_metadata",
            "max_tool_calls",
            "metadata",
            "prompt_cache_options",
            "prompt_cache_retention",
            "safety_identifier",
            "service_tier",
            "truncation",
        }
    )

    # Text or items; see input_items.
    input: Any = None
    instructions: str | None = None
    max_output_tokens: Annotated[int | None, Field(ge=0)] = None
    previous_response_id: str | None = None
    store: bool | None = None
    include: Annotated[list[str], Field(fail_fast=True)] | None = None
    tools: list[Any] | None = None
    # A mode or an object; see tool_choice.
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: TextBody | None = None
    reasoning: ReasoningBody | None = None
    thinking_token_budget: Annotated[int | None, Field(ge=0)] = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None
    # A response has one choice and no log-probabilities of the prompt.
    n: Literal[1] | None = None
    prompt_logprobs: None = None


class StoredResponses(Protocol):
    """The stored responses."""

    def conversation(self, response_id: str) -> Sequence[Item]:
        """Input and output items of a response and those before it. Raises PreviousResponseNotFound."""

    def item(self, item_id: str) -> Item:
        """One input or output item of any response. Raises NotFound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseCall(Call[ChatRequest]):
    """A parsed request with everything its answer repeats.

    body: as received.
    items: the request's own input.
    includes_encrypted: send thinking as `encrypted_content`, too, for clients that keep no other form.
    includes_summary: send thinking as a summary, too, for clients that show nothing else.
    """

    body: Mapping[str, Any]
    items: tuple[Item, ...]
    tools: DeclaredTools
    store: bool
    includes_logprobs: bool
    includes_encrypted: bool
    includes_summary: bool

    @property
    def continues_stored(self) -> bool:
        sent = self.body.get("input")
        items = sent if isinstance(sent, list) else ()
        has_references = any(item.get("type") == "item_reference" for item in items)
        return self.body.get("previous_response_id") is not None or has_references


def read_response(body: JsonBody, stored: StoredResponses, model: ModelTraits) -> ResponseCall:
    """Parse and validate a body.

    An input of more items than the context has tokens raises ContextTooLong before validation. Raises InvalidRequest,
    UnsupportedField with the field's path as its param, and what `stored` raises.
    """
    value = read_object(body)
    parsed = check(ResponsesBody, value)
    before = stored.conversation(parsed.previous_response_id) if parsed.previous_response_id is not None else ()
    items = _own_items(parsed, stored, model.max_model_len)
    own = read_items(items, "input[{}]")
    tools = declared_tools(parsed.tools or ())
    num_logprobs = _num_logprobs(parsed)
    return ResponseCall(
        request=replace(
            _request(parsed, (*read_items(before, "previous_response_id"), *own), tools),
            options=sampling_options(parsed, model.defaults, parsed.max_output_tokens, num_logprobs),
        ),
        model=parsed.model,
        stream=bool(parsed.stream),
        ignored=_ignored(parsed, items, own, tools),
        body=value,
        items=items,
        tools=tools,
        store=parsed.store is not False,
        includes_logprobs=num_logprobs is not None,
        # A client that stores no responses needs it to send thinking back; AI SDK's keeps no other form.
        includes_encrypted=parsed.store is False or _ENCRYPTED in (parsed.include or ()),
        includes_summary=wants_summary(parsed.reasoning),
    )


def _request(parsed: ResponsesBody, items: Sequence[ReadItem], tools: DeclaredTools) -> ChatRequest:
    instructions = (ChatMessage("system", (TextPart(parsed.instructions),)),) if parsed.instructions else ()
    turns = chat_turns(items)
    refuse_large_arguments(turns, "input")
    return ChatRequest(
        request_id=new_id("resp_", 24),
        messages=(*instructions, *turns),
        tools=tools.definitions,
        tool_choice=tool_choice(parsed.tool_choice, tools, is_parallel=parsed.parallel_tool_calls is not False),
        structure=requested_structure(parsed.text),
        reasoning_effort=parsed.reasoning.effort if parsed.reasoning is not None else None,
        thinking_budget=parsed.thinking_token_budget,
    )


def _own_items(parsed: ResponsesBody, stored: StoredResponses, max_model_len: int | None) -> tuple[Item, ...]:
    if parsed.input is None:
        if parsed.previous_response_id is None:
            raise InvalidRequest("input is missing", param="input")
        return ()
    items = input_items(parsed.input)
    if not items and parsed.previous_response_id is None:
        raise InvalidRequest("input must not be empty", param="input")
    if max_model_len is not None and len(items) > max_model_len:
        raise ContextTooLong.of_prompt(max_model_len, len(items), "input", at_least=True)
    return tuple(_resolved(item, f"input[{index}]", stored) for index, item in enumerate(items))


def _resolved(item: Item, path: str, stored: StoredResponses) -> Item:
    if item_type(item, path) != "item_reference":
        return item
    return stored.item(check_at(ReferenceItem, item, path).id)


def _num_logprobs(parsed: ResponsesBody) -> int | None:
    if parsed.top_logprobs or _LOGPROBS in (parsed.include or ()):
        return parsed.top_logprobs or 0
    return None


def _ignored(
    parsed: ResponsesBody, items: Sequence[Item], read: Sequence[ReadItem], tools: DeclaredTools
) -> tuple[str, ...]:
    """What has no effect. items, read: the request's own, before and after validation."""
    included = set(parsed.include or ()) - _WITHOUT_EFFECT - {_LOGPROBS, _ENCRYPTED}
    unknown = unknown_fields(parsed) | {f"include[].{name}" for name in included} | tools.ignored
    unknown |= {f"input[].{item['type']}" for item in items if item.get("type") in SKIPPED_ITEMS}
    for item in read:
        unknown |= unknown_fields(item.body, "input[].")
    return ignored_names(unknown)


# The session's errors name a chat's fields.
_PARAMS: Mapping[str, str] = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "reasoning_effort": "reasoning.effort",
    "thinking_budget": "thinking_token_budget",
}


def name_own_field(error: HeadraceError) -> None:
    """Rename a chat's field in an error to this API's."""
    head, dot, rest = (error.param or "").partition(".")
    if head in _PARAMS:
        error.param = _PARAMS[head] + dot + rest
