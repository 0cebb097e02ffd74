"""POST /v1/messages: the body's fields and blocks, in all the forms that clients send."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from headrace.api.json_body import StrictBody
from headrace.api.openai_sampling import GenerationBody, ShortText
from headrace.api.openai_tools import TOOL_MARKERS

Name = Annotated[str, Field(min_length=1, max_length=256)]


class SourceBody(StrictBody):
    """Where an image's or document's content is."""

    without_effect: ClassVar[frozenset[str]] = frozenset({"cache_control"})

    type: str
    media_type: str | None = None
    data: str | None = None
    url: str | None = None
    content: str | Annotated[list[BlockBody], Field(fail_fast=True)] | None = None


class BlockBody(StrictBody):
    """A content block; its other fields depend on its type."""

    # Markers for caches, what vouches for a block's origin, and where its text comes from.
    without_effect: ClassVar[frozenset[str]] = frozenset(
        {"cache_control", "caller", "citations", "context", "data", "signature", "title"}
    )

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
    """A client tool if it has no type or `custom`, else one that runs on Anthropic's servers."""

    without_effect: ClassVar[frozenset[str]] = TOOL_MARKERS

    type: str | None = None
    name: Name
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None

    @property
    def is_foreign(self) -> bool:
        return self.type not in (None, "custom")


class ToolChangeBody(StrictBody):
    """A tool that the conversation adds or removes: one of `tools` by name, or a new one."""

    type: str
    name: Name | None = None
    definition: ToolBody | None = None


class ToolChoiceBody(StrictBody):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingBody(StrictBody):
    """`thinking`: off if the type is `disabled`. `display` has no effect: thinking is always shown."""

    type: str
    budget_tokens: Annotated[int | None, Field(ge=0, lt=2**31)] = None
    display: Any = None


class FormatBody(StrictBody):
    type: str
    schema_: Annotated[dict[str, Any] | bool | None, Field(alias="schema")] = None


class OutputBody(StrictBody):
    effort: str | None = None
    format: FormatBody | None = None


class MetadataBody(StrictBody):
    user_id: str | None = None


class MessagesBody(GenerationBody):
    """The supported fields."""

    neutral_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "compaction": (),
        "container": (),
        "mcp_servers": ([],),
        "thread": (),
    }
    without_effect: ClassVar[frozenset[str]] = frozenset(
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
    )

    messages: Annotated[list[MessageBody], Field(fail_fast=True, min_length=1)]
    system: str | Annotated[list[BlockBody], Field(fail_fast=True)] | None = None
    max_tokens: Annotated[int | None, Field(ge=0)] = None
    stop_sequences: Annotated[list[ShortText], Field(fail_fast=True, max_length=64)] | None = None
    tools: Annotated[list[ToolBody], Field(fail_fast=True, max_length=4096)] | None = None
    tool_choice: ToolChoiceBody | None = None
    thinking: ThinkingBody | None = None
    output_config: OutputBody | None = None
    output_format: FormatBody | None = None
    metadata: MetadataBody | None = None


BLOCKS_WITHOUT_EFFECT = frozenset({"redacted_thinking"})
"""Blocks that mean nothing to any other model than their author."""

UNPARSED_INPUT = "__unparsedToolInput"
"""Where arguments that are not a JSON object stand, as the model wrote them; the name is Claude Code's."""
