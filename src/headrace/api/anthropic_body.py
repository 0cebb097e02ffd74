"""POST /v1/messages: the body's fields and blocks, in all the shapes in which clients send them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from headrace.api.json_body import StrictBody
from headrace.api.openai_fields import FieldRules, unknown_inner_fields
from headrace.api.openai_sampling import CacheSalt, SparseBody, StopText

Name = Annotated[str, Field(min_length=1, max_length=256)]


class SourceBody(StrictBody):
    """Where the content of an image or a document is."""

    type: str
    media_type: str | None = None
    data: str | None = None
    url: str | None = None
    content: str | Annotated[list[BlockBody], Field(fail_fast=True)] | None = None


class BlockBody(StrictBody):
    """A block of content; which other fields it has depends on its type."""

    type: str
    text: str | None = None
    thinking: str | None = None
    source: SourceBody | str | None = None
    id: str | None = None
    name: str | None = None
    input: Any = None
    tool_use_id: str | None = None
    tool_name: str | None = None
    content: str | Annotated[list[BlockBody], Field(fail_fast=True)] | None = None
    is_error: bool | None = None
    tool: ToolChangeBody | None = None


class MessageBody(StrictBody):
    """One turn. A system message in mid-conversation is a note to the model, or changes its tools."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[BlockBody], Field(fail_fast=True)]


class ToolBody(StrictBody):
    """A tool: the client's own if it has no type or `custom`, else one that Anthropic's servers know."""

    type: str | None = None
    name: Name
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class ToolChangeBody(StrictBody):
    """A tool that a conversation adds or removes: one of `tools` by its name, or a new one."""

    type: str
    name: Name | None = None
    definition: ToolBody | None = None


class ToolChoiceBody(StrictBody):
    """Whether tools are called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingBody(StrictBody):
    """Whether the model thinks: not if the type is `disabled`. `display` has no effect: thinking is always shown."""

    type: str
    budget_tokens: Annotated[int | None, Field(ge=0, lt=2**31)] = None
    display: Any = None


class FormatBody(StrictBody):
    """The form of the answer."""

    type: str
    schema_: Annotated[dict[str, Any] | bool | None, Field(alias="schema")] = None


class OutputBody(StrictBody):
    """`output_config`."""

    effort: str | None = None
    format: FormatBody | None = None


class MetadataBody(StrictBody):
    """`metadata`."""

    user_id: str | None = None


class MessagesBody(SparseBody):
    """Fields that are honoured."""

    model: str | None = None
    messages: Annotated[list[MessageBody], Field(fail_fast=True, min_length=1)]
    system: str | Annotated[list[BlockBody], Field(fail_fast=True)] | None = None
    max_tokens: Annotated[int | None, Field(ge=0)] = None
    stop_sequences: Annotated[list[StopText], Field(fail_fast=True, max_length=64)] | None = None
    temperature: Annotated[float | None, Field(ge=0, le=2, allow_inf_nan=False)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1, allow_inf_nan=False)] = None
    top_k: Annotated[int | None, Field(ge=-1, lt=2**31)] = None
    tools: Annotated[list[ToolBody], Field(fail_fast=True, max_length=4096)] | None = None
    tool_choice: ToolChoiceBody | None = None
    thinking: ThinkingBody | None = None
    output_config: OutputBody | None = None
    output_format: FormatBody | None = None
    metadata: MetadataBody | None = None
    cache_salt: CacheSalt | None = None
    stream: bool | None = None


MESSAGES_FIELDS = FieldRules(
    {"compaction": (), "container": (), "mcp_servers": ([],), "thread": ()},
    frozenset(
        {
            "anthropic_version",
            "betas",
            "billing_policy",
            "cache_control",
            "context_management",
            "diagnostics",
            "fallbacks",
            "inference_geo",
            "service_tier",
            "speed",
            "user_profile_id",
            "workspace_id",
        }
    ),
)

BLOCKS_WITHOUT_EFFECT = frozenset({"redacted_thinking"})
"""Blocks that say nothing to a model that didn't write them."""

UNPARSED_INPUT = "__unparsedToolInput"
"""Where arguments that are no JSON object stand, as the model wrote them: the name is Claude Code's."""


_OBJECTS: Mapping[str, type[BaseModel]] = {
    "output_config": OutputBody,
    "output_format": FormatBody,
    "thinking": ThinkingBody,
}


def unknown_nested_fields(value: Mapping[str, Any]) -> tuple[str, ...]:
    """Fields inside a checked body's messages and its objects that nobody knows."""
    sent = {name for message in value["messages"] for name in message} - MessageBody.model_fields.keys()
    return tuple(sorted(f"messages[].{name}" for name in sent)) + unknown_inner_fields(value, _OBJECTS)
