"""`text` and `reasoning` of /v1/responses: the form of the answer and how much is thought before it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from headrace.api.json_body import StrictBody
from headrace.api.openai_chat import Effort
from headrace.types.chat import Structure


class PlainFormat(StrictBody):
    """Any text, or any JSON object."""

    type: Literal["text", "json_object"]


class SchemaFormat(StrictBody):
    """JSON that fits a schema."""

    model_config = ConfigDict(populate_by_name=True)

    type: Literal["json_schema"]
    # Only for the client to tell its formats apart.
    name: str | None = None
    description: str | None = None
    # BaseModel has a method of the field's own name.
    json_schema: Annotated[dict[str, Any] | bool, Field(alias="schema")]
    strict: bool | None = None


class TextBody(StrictBody):
    """`text`. Verbosity is a wish that no open model's template reads."""

    format: Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningBody(StrictBody):
    """`reasoning`. A summary of whatever kind is the whole thinking: nothing here shortens it."""

    effort: Effort | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None


def wants_summary(reasoning: ReasoningBody | None) -> bool:
    """Whether thinking is to come as a summary too."""
    asked = None if reasoning is None else reasoning.summary or reasoning.generate_summary
    return asked not in (None, "", "none")


def requested_structure(text: TextBody | None) -> Structure | None:
    """The form that the answer must have."""
    form = text.format if text is not None else None
    if isinstance(form, SchemaFormat):
        return Structure("json_schema", form.json_schema, "text.format")
    return Structure("json_object", path="text.format") if form is not None and form.type == "json_object" else None
