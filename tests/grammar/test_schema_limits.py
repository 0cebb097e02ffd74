"""Limits of numbers and texts let through what jsonschema lets through, and the texts of each kind that it does not."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from datetime import datetime, time
from typing import Any

import jsonschema
import pytest
from grammar.call_answers import begun, takes_whole
from grammar.schemas import closed

from headrace.errors import InvalidRequest
from headrace.grammar.compile import AllowedCalls, OutputForm
from headrace.grammar.schema import compiled_schema, is_found, schema_violation
from headrace.types.chat import Structure, ToolDefinition

CALL = "<tool_call>\n<function=odd>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"


def taken_json(schema: Any, texts: Sequence[str]) -> list[str]:
    constraint = begun(OutputForm(Structure("json_schema", schema), None, None, None))
    return [text for text in texts if takes_whole(constraint, text)]


def taken_strings(schema: Any, texts: Sequence[str]) -> list[str]:
    return [json.loads(text) for text in taken_json(schema, [json.dumps(text, ensure_ascii=False) for text in texts])]


def taken_unquoted(schema: Any, texts: Sequence[str]) -> list[str]:
    tool = ToolDefinition("odd", None, closed({"a": schema}), strict=True)
    constraint = begun(OutputForm(None, AllowedCalls((tool,), True, False), "qwen_xml", None))
    return [text for text in texts if takes_whole(constraint, CALL.format(text))]


@pytest.mark.parametrize(
    ("bounds", "inside"),
    [
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 0.001}, "0.0001"),
        ({"exclusiveMinimum": 0, "maximum": 0.5}, "0.5"),
        ({"exclusiveMinimum": -0.0, "maximum": 1e-10}, "0.00000000001"),
        ({"exclusiveMinimum": 0.0, "minimum": -1, "maximum": 0.99}, "0.98"),
        ({"exclusiveMinimum": 0, "minimum": 0.3, "maximum": 0.99}, "0.3"),
        ({"exclusiveMinimum": 2, "maximum": 2.5}, "2.25"),
        ({"exclusiveMinimum": 1000, "exclusiveMaximum": 1000.000001}, "1000.0000001"),
        ({"exclusiveMaximum": 0, "minimum": -0.5}, "-0.5"),
        ({"exclusiveMaximum": 0, "exclusiveMinimum": -0.5}, "-0.25"),
        ({"exclusiveMaximum": -2, "minimum": -2.5}, "-2.25"),
        ({"exclusiveMinimum": 0, "maximum": 0.5, "multipleOf": 0.25}, "0.25"),
        ({"allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.5}]}, "0.25"),
        ({"exclusiveMinimum": 0, "$ref": "#/$defs/half", "$defs": {"half": {"maximum": 0.5}}}, "0.25"),
        # What llguidance keeps by itself.
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 1}, "0.00000001"),
        ({"exclusiveMinimum": -1, "maximum": -0.5}, "-0.5"),
        ({"exclusiveMinimum": 0}, "0.00000001"),
    ],
)
def test_an_open_bound_is_no_value_of_its_range(bounds: dict[str, Any], inside: str) -> None:
    schema = {"type": "number", **bounds}
    ends = ("0", "-0", "0.0", "-0.0", "0.00", "1", "1.0", "-1", "2", "2.0", "2.00", "-2", "-2.0", "1000", "1000.0")
    taken = taken_json(schema, [*ends, inside, "0.5", "0.50", "-0.5", "2.5", "-2.5", "0.001", "1000.000001"])
    assert inside in taken
    assert [text for text in taken if not jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))] == []


def test_bounds_of_another_property_leave_a_range_as_it_is() -> None:
    schema = closed({"lr": {"type": "number", "exclusiveMinimum": 0}, "d": {"type": "number", "maximum": 1e-100}})
    assert taken_json(schema, ['{"lr":0.00000005,"d":0}', '{"lr":0,"d":0}']) == ['{"lr":0.00000005,"d":0}']


DAYS = [
    f"{year:04}-{day}"
    for year in (0, 1, 4, 96, 100, 400, 1600, 1900, 1996, 2000, 2022, 2023, 2024, 2028, 2100, 2400, 9996, 9999)
    for day in ("02-28", "02-29", "02-30", "02-31", "04-30", "04-31", "12-31", "12-32", "13-01", "00-10", "01-00")
]
TIMES = [
    *("00:00:00Z", "23:59:59Z", "12:30:00.5Z", "12:30:00.123456789Z", "12:30:00+05:30", "12:30:00-23:59"),
    # Leap seconds come at the end of a month's last minute only, and there is no hour 24.
    *("12:00:60Z", "23:59:60+01:00", "23:59:61Z", "24:00:00Z", "12:60:00Z", "12:00:00+24:00", "12:00:00", "12:00Z"),
]


@pytest.mark.parametrize("taken", [taken_strings, taken_unquoted])
def test_a_date_is_one_of_the_calendar(taken: Callable[[Any, Sequence[str]], list[str]]) -> None:
    checker = jsonschema.FormatChecker()
    real = [day for day in DAYS if checker.conforms(day, "date")]
    assert taken({"type": "string", "format": "date"}, DAYS) == real
    moments = taken({"type": "string", "format": "date-time"}, [f"{day}T12:00:00Z" for day in DAYS])
    assert moments == [f"{day}T12:00:00Z" for day in real]


@pytest.mark.parametrize("taken", [taken_strings, taken_unquoted])
def test_a_time_is_one_of_every_day(taken: Callable[[Any, Sequence[str]], list[str]]) -> None:
    times = taken({"type": "string", "format": "time"}, TIMES)
    moments = taken({"type": "string", "format": "date-time"}, [f"2024-02-29T{each}" for each in TIMES])
    assert times == TIMES[:6]
    assert moments == [f"2024-02-29T{each}" for each in times]
    assert all(time.fromisoformat(each) and datetime.fromisoformat(f"2024-02-29T{each}") for each in times)


@pytest.mark.parametrize(
    ("more", "fitting"),
    [
        ({"pattern": "^2024"}, ["2024-02-29", "2024-03-01"]),
        ({"pattern": "-01$", "allOf": [{"pattern": "^2024"}]}, ["2024-03-01"]),
        ({"maxLength": 10}, ["2023-03-01", "2024-02-29", "2024-03-01"]),
        ({"enum": ["2023-02-29", "2024-02-29", "x"]}, ["2024-02-29"]),
    ],
)
def test_a_date_keeps_the_other_limits_of_its_text(more: dict[str, Any], fitting: list[str]) -> None:
    schema = {"type": "string", "format": "date", **more}
    assert taken_strings(schema, ["2023-02-29", "2023-03-01", "2024-02-29", "2024-03-01", "x"]) == fitting


CHARACTERS = [*"[]{}()!#&~-+,^$\\/>|:;.\"'", "a", "b", "z", "A", "0", "é", "\b", " ", "[]", "a]", "-]", ":]", "{}"]


@pytest.mark.parametrize("taken", [taken_strings, taken_unquoted])
@pytest.mark.parametrize(
    "pattern",
    [
        *(r"^[^[\]]+$", r"^[()[\]{}]+$", r"^[[\]]$", "^[[a]]$", "^[[]$", "^[[:alpha:]]$", "^[a[b]$", "^[^[]$"),
        *("^[!--]$", "^[+--]$", "^[a-z--[aeiou]]$", "^[--a]$", "^[-a]$", "^[a-]$", "^[^-]$", r"^[!-\-]$"),
        *(
            "^[&&a]$",
            "^[a-z&&[aeiou]]$",
            "^[~~]$",
            "^[a~~b]$",
            r"^[\\\]]$",
            "^[)--]$",
        ),
        *(
            "^[$]$",
            "^[a^]$",
            "^[.]$",
            "^{$",
            "^{}$",
            "^a{1}$",
            "[[]",
            "[&&]]$",
            r"^\[[[]?\]$",
            r"^[\b]$",
            r"^[\x61-\x62]$",
        ),
    ],
)
def test_a_class_of_a_pattern_has_the_characters_that_it_has_in_a_schema(
    pattern: str, taken: Callable[[Any, Sequence[str]], list[str]]
) -> None:
    schema = {"type": "string", "pattern": pattern}
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # of classes in classes
        fitting = [text for text in CHARACTERS if jsonschema.Draft202012Validator(schema).is_valid(text)]
    assert taken(schema, CHARACTERS) == fitting
    assert [text for text in CHARACTERS if is_found(pattern, text)] == fitting
    assert [text for text in CHARACTERS if schema_violation(schema, json.dumps(text)) is None] == fitting


@pytest.mark.parametrize(
    ("pattern", "fitting"),
    [
        ("^[^]$", ["a", "\n", "]", "😀", "-", "é"]),
        ("^[^]a]$", ["]a]"]),
        (r"^[\w-]$", ["a", "-"]),
        (r"^[\d-a]$", ["a", "-"]),
        (r"^[^\d-a]$", ["\n", "]", "😀", "é"]),
        (r"^\cJ$", ["\n"]),
        (r"^[\cJ]$", ["\n"]),
        (r"^\u{61}$", ["a"]),
        (r"^\x{e9}$", ["é"]),  # Rust's spelling, which stays
        (r"^\ud83d\ude00$", ["😀"]),
        (r"^[\ud83d\ude00]$", ["😀"]),
        (r"^\<a\>$", ["<a>"]),
        (r"^a\0$", ["a\0"]),
    ],
)
def test_patterns_are_read_as_ecmascript_where_it_differs_from_other_languages(
    pattern: str, fitting: list[str]
) -> None:
    """Expected: ECMA-262, 22.2.1 Patterns."""
    texts = ["a", "\n", "]", "a]", "😀", "<a>", "a\0", "]a]", "-", "é"]
    assert taken_strings({"type": "string", "pattern": pattern}, texts) == fitting
    assert [text for text in texts if is_found(pattern, text)] == fitting


def test_names_of_properties_are_held_to_the_same_classes() -> None:
    schema = {"type": "object", "patternProperties": {"^[a[]$": {"const": 1}}, "additionalProperties": False}
    texts = ['{"[": 1}', '{"a": 1}', '{"b": 1}', '{"[": 2}']
    taken = taken_json(schema, texts)
    assert taken == [text for text in texts if jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))]


@pytest.mark.parametrize("pattern", ["[a", "[]", "[^a", "(", "[z-a]", "[a--]", "a{2,1}", "*"])
def test_a_pattern_that_nothing_can_be_made_of_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidRequest, match="can't be enforced"):
        compiled_schema({"type": "string", "pattern": pattern}, "response_format")
