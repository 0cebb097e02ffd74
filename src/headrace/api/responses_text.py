"""`text` and `reasoning` of /v1/responses: structured output and reasoning effort."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from headrace.api.json_body import StrictBody
from headrace.api.openai_chat import Effort
from headrace.types.chat import Structure


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
