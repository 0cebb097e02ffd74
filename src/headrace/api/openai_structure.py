"""Structured output: OpenAI's `response_format`, and vLLM's two other fields.

A body may use several of them if they agree. Schemas, expressions and grammars are passed on unchanged; the session
finds out whether they can be enforced.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from pydantic import Field

from headrace.api.json_body import StrictBody, read_json
from headrace.errors import InvalidRequest, UnsupportedField
from headrace.types.chat import Structure

Choices = Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=10_000)]


class JsonSchemaBody(StrictBody):
    """A named schema. It is enforced whether `strict` or not."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | bool | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormatBody(StrictBody):
    """`response_format`; its other fields depend on its type."""

    type: str
    json_schema: JsonSchemaBody | None = None
    schema_: Annotated[dict[str, Any] | bool | None, Field(alias="schema")] = None


class StructuredOutputsBody(StrictBody):
    """`structured_outputs`: one of these."""

    json_: Annotated[dict[str, Any] | bool | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None


class StructureBody(StrictBody):
    """All fields that define structured output."""

    response_format: ResponseFormatBody | None = None
    structured_outputs: StructuredOutputsBody | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None


def answer_structure(parsed: StructureBody) -> Structure | None:
    """The structure, None for plain text. Raises InvalidRequest, UnsupportedField with the field's path as its
    param."""
    return agreed_structure([*_of_response_format(parsed), *_of_structured_outputs(parsed), *_of_guided_fields(parsed)])


def agreed_structure(found: Sequence[Structure]) -> Structure | None:
    """The structure that all fields agree on. Raises InvalidRequest, naming the first that differs.

    Compared as JSON text: in Python `true` equals 1, and the order of properties decides the answer's.
    """
    for other in found[1:]:
        if (other.kind, json.dumps(other.value)) != (found[0].kind, json.dumps(found[0].value)):
            message = f"{found[0].path} and {other.path} exclude each other unless they are equal"
            raise InvalidRequest(message, param=other.path)
    return found[0] if found else None


def _of_response_format(parsed: StructureBody) -> Iterator[Structure]:
    asked = parsed.response_format
    if asked is None or asked.type == "text":
        return
    if asked.type == "json_object":
        # Some servers accept a schema here, too.
        schema = asked.schema_
        yield Structure("json_object") if schema is None else Structure("json_schema", schema)
    elif asked.type == "json_schema":
        named = asked.json_schema
        if named is None or named.schema_ is None:
            path = "response_format.json_schema" + ("" if named is None else ".schema")
            raise InvalidRequest(f"{path} is missing", param=path)
        yield Structure("json_schema", named.schema_)
    else:
        path = "response_format.type"
        raise UnsupportedField(f"{path} must be text, json_object or json_schema", param=path)


def _of_structured_outputs(parsed: StructureBody) -> Iterator[Structure]:
    asked = parsed.structured_outputs
    if asked is None:
        return
    path = "structured_outputs"
    if asked.structural_tag is not None:
        raise UnsupportedField(f"{path}.structural_tag is not supported", param=f"{path}.structural_tag")
    if asked.json_object:
        yield Structure("json_object", path=f"{path}.json_object")
    yield from _in_vllms_form(path + ".", asked.json_, asked.regex, asked.choice, asked.grammar)


def _of_guided_fields(parsed: StructureBody) -> Iterator[Structure]:
    return _in_vllms_form(
        "guided_", parsed.guided_json, parsed.guided_regex, parsed.guided_choice, parsed.guided_grammar
    )


def _in_vllms_form(
    prefix: str,
    schema: dict[str, Any] | bool | str | None,
    regex: str | None,
    choice: list[str] | None,
    grammar: str | None,
) -> Iterator[Structure]:
    if schema is not None:
        path = f"{prefix}json"
        yield Structure("json_schema", _schema(schema, path), path)
    if regex is not None:
        yield Structure("regex", regex, f"{prefix}regex")
    if choice is not None:
        yield Structure("choice", tuple(choice), f"{prefix}choice")
    if grammar is not None:
        yield Structure("grammar", grammar, f"{prefix}grammar")


def _schema(schema: dict[str, Any] | bool | str, path: str) -> dict[str, Any] | bool:
    if not isinstance(schema, str):
        return schema
    parsed = read_json(schema.encode(errors="surrogatepass"), path, path)
    if not isinstance(parsed, dict | bool):
        raise InvalidRequest(f"{path} must hold an object, true or false", param=path)
    return parsed
