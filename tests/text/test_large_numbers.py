"""A number in a call that IEEE 754's doubles can't hold reaches no client as a number: it would read infinity."""

from __future__ import annotations

import json

import pytest
from text.encoders import ENCODERS
from text.transcripts import Got, parse

from headrace.families.family import ModelFamily
from headrace.types.chat import ToolDefinition

PLACEHOLDER = 12345671
TOO_LARGE = ("1e999", "-1E400", "1.8e308", "-1" + "0" * 40 + "e300")
LARGEST = "1.7976931348623157e308"


def every_way(name: str, part: object, value: object, number: str) -> tuple[str, Got]:
    """What a call comes to with this number in a value for a schema, whole and a character at a time."""
    tool_format, encode = ENCODERS[name]
    text = encode([("store", {"x": value})]).replace(str(PLACEHOLDER), number)
    tools = (ToolDefinition("store", None, {"type": "object", "properties": {"x": part}}),)
    family = ModelFamily(name, tool_format=tool_format)
    whole = parse([text], family, tools)
    assert parse(text, family, tools).told == whole.told
    return text, whole


@pytest.mark.parametrize("number", TOO_LARGE)
@pytest.mark.parametrize("name", sorted(ENCODERS))
def test_a_call_with_one_is_text_and_a_fault(name: str, number: str) -> None:
    for part, value in (({"type": "number"}, PLACEHOLDER), ({"type": "array"}, [PLACEHOLDER, {"a": PLACEHOLDER}])):
        text, got = every_way(name, part, value, number)
        assert (got.calls, got.is_broken) == ((), True)
        assert name == "harmony" or got.content == text


@pytest.mark.parametrize("name", sorted(ENCODERS))
@pytest.mark.parametrize(
    ("kind", "number", "expected"),
    [("number", LARGEST, float(LARGEST)), ("integer", "9" * 330, int("9" * 330)), ("integer", "1e320", 10**320)],
)
def test_the_largest_and_integers_of_any_size_are_numbers(name: str, kind: str, number: str, expected: float) -> None:
    _, got = every_way(name, {"type": kind}, PLACEHOLDER, number)
    assert [json.loads(arguments) for _, arguments in got.calls] == [{"x": expected}]


@pytest.mark.parametrize("name", sorted(ENCODERS))
def test_where_a_text_is_wanted_it_is_one(name: str) -> None:
    _, got = every_way(name, {"type": "string"}, PLACEHOLDER, "1e999")
    assert [json.loads(arguments) for _, arguments in got.calls] == [{"x": "1e999"}]
