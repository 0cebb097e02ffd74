"""Parameters between tags whose end marker the model forgot.

vLLM's parsers read a value up to its end marker, the next parameter or the call's end marker:
`<parameter=(.*?)(?:</parameter>|(?=<parameter=)|(?=</function>)|$)`. Here a closed value may contain such tags.
"""

from __future__ import annotations

import json

import pytest
from text.encoders import ENCODERS, TAGGED, Call
from text.transcripts import FAMILIES, Got, parse

from headrace.families.family import ModelFamily
from headrace.families.registry import find_family
from headrace.tool_calls.tag_values import MAX_DOUBT
from headrace.types.chat import ToolDefinition

STRING = {"type": "string"}
TOOLS = (
    ToolDefinition(
        "look_up", None, {"type": "object", "properties": {"city": STRING, "state": STRING, "unit": STRING}}
    ),
    ToolDefinition(
        "store",
        None,
        {"type": "object", "properties": {"list": {"type": "array"}, "item": {"type": "object"}, "count": STRING}},
    ),
)
PLACE: Call = ("look_up", {"city": "Dallas", "state": "TX", "unit": "fahrenheit"})
SYNTAXES = sorted(TAGGED)
OWN_WRAPPERS = sorted({"glm with newlines", "glm without newlines", "qwen_xml", "seed_oss"})
"""Syntaxes in which each call is a separate construct."""


def every_cut(text: str, family: ModelFamily) -> Got:
    """What a text comes to, which is the same however it is cut."""
    whole = parse([text], family, TOOLS)
    assert parse(text, family, TOOLS).told == whole.told
    for place in range(1, len(text)):
        assert parse([text[:place], text[place:]], family, TOOLS).told == whole.told
    return whole


def told(got: Got) -> tuple[list[Call], str, bool]:
    return [(name, json.loads(arguments)) for name, arguments in got.calls], got.content, got.is_broken


def family_of(name: str) -> ModelFamily:
    return ModelFamily(name, tool_format=ENCODERS[name][0], think_open="<think>", think_close="</think>")


def value_end(text: str, value: str) -> tuple[int, int]:
    """Where the end marker of a value begins and ends, with the newline before it if there is one."""
    start = text.index(value) + len(value)
    return start, text.index(">", start) + 1


def behind_name(call: str) -> int:
    """Where the line of a call's name ends, or the name in a syntax without lines."""
    end = call.rindex("look_up") + len("look_up")
    return call.index("\n", end) if "\n" in call else end


def without_ends(text: str, *values: str) -> str:
    for value in values:
        start, end = value_end(text, value)
        text = text[:start] + text[end:]
    return text


@pytest.mark.parametrize("name", ["qwen3-coder", "qwen3.5", "nemotron3", "step3.5"])
def test_a_parameter_ends_where_the_next_one_begins(name: str) -> None:
    """The output of vLLM's test_extract_tool_calls_missing_closing_parameter_tag."""
    text = (
        "Let me see:\n<tool_call>\n<function=look_up>\n<parameter=city>\nDallas\n<parameter=state>\nTX\n</parameter>\n"
        "<parameter=unit>\nfahrenheit\n</parameter>\n</function>\n</tool_call>"
    )
    assert told(every_cut(text, find_family(*FAMILIES[name]))) == ([PLACE], "Let me see:", False)


@pytest.mark.parametrize("name", SYNTAXES)
@pytest.mark.parametrize(
    "open_values",
    [["Dallas"], ["TX"], ["Dallas", "TX"], ["fahrenheit"], ["TX", "fahrenheit"], ["Dallas", "TX", "fahrenheit"]],
)
def test_any_end_marker_of_a_value_may_be_missing(name: str, open_values: list[str]) -> None:
    text = without_ends(ENCODERS[name][1]([PLACE]), *open_values)
    for behind in ("", "\nI wait."):
        assert told(every_cut(text + behind, family_of(name))) == ([PLACE], behind.strip(), False)


@pytest.mark.parametrize("name", SYNTAXES)
def test_the_next_call_ends_a_value_without_end_marker(name: str) -> None:
    """The end markers of the first call precede it."""
    encode = ENCODERS[name][1]
    other = ("look_up", {"city": "Ulm"})
    text = encode([PLACE, other])
    assert told(every_cut(without_ends(text, "fahrenheit"), family_of(name))) == ([PLACE, other], "", False)
    assert told(every_cut(without_ends(text, "fahrenheit", "Ulm"), family_of(name))) == ([PLACE, other], "", False)


@pytest.mark.parametrize("name", SYNTAXES)
def test_arrays_and_objects_need_no_end_marker(name: str) -> None:
    call: Call = ("store", {"list": ["a", "</x>"], "item": {"b": 1}, "count": "3"})
    text = ENCODERS[name][1]([call])
    text = without_ends(text, json.dumps(call[1]["list"]), json.dumps(call[1]["item"]))
    assert told(every_cut(text, family_of(name))) == ([call], "", False)


@pytest.mark.parametrize("name", ["qwen_xml", "seed_oss"])
def test_an_empty_value_may_lack_its_end_marker(name: str) -> None:
    wrapper = "tool_call" if name == "qwen_xml" else "seed:tool_call"
    text = (
        f"<{wrapper}>\n<function=look_up>\n<parameter=city>\n<parameter=state>\nTX\n</parameter>\n</function>\n"
        f"</{wrapper}>"
    )
    (call,), content, is_broken = told(every_cut(text, family_of(name)))
    assert ({key: value.strip() for key, value in call[1].items()}, content) == ({"city": "", "state": "TX"}, "")
    assert not is_broken


@pytest.mark.parametrize("name", SYNTAXES)
@pytest.mark.parametrize("length", [1, MAX_DOUBT // 8])
def test_a_closed_value_keeps_what_looks_like_the_next_parameter(name: str, length: int) -> None:
    encode = ENCODERS[name][1]
    example = encode([("look_up", {"state": "TX" * length})])
    quoted = example[behind_name(example) : value_end(example, "TX" * length)[1]]
    opening = quoted[: quoted.index("TX")]
    for value in (f"it reads{quoted}\nand so on", f"so{opening}", f"a whole one:\n{example}\nand on"):
        call: Call = ("look_up", {"city": value, "state": "Ohio", "unit": "x"})
        assert told(every_cut(encode([call]), family_of(name))) == ([call], "", False)


@pytest.mark.parametrize("name", SYNTAXES)
def test_a_closed_value_keeps_what_looks_like_the_end_of_the_call(name: str) -> None:
    encode = ENCODERS[name][1]
    now = encode([("look_up", {})])
    ends = now[behind_name(now) :]
    for value in (f"it ends with{ends}\nand so on", f"no arguments:\n{now}", f"no arguments:\n{now}\nand\n{now}"):
        call: Call = ("look_up", {"city": value, "state": "Ohio"})
        assert told(every_cut(encode([call]), family_of(name))) == ([call], "", False)


@pytest.mark.parametrize("name", SYNTAXES)
def test_a_parameter_of_another_name_ends_no_value(name: str) -> None:
    """One that the tool lacks, or that has been given."""
    encode = ENCODERS[name][1]
    for key in ("population", "city"):
        example = encode([("look_up", {key: "TX"})])
        opening = example[behind_name(example) : example.index("TX")]
        call: Call = ("look_up", {"city": f"so{opening}TX", "state": "Ohio"})
        assert told(every_cut(encode([call]), family_of(name))) == ([call], "", False)


@pytest.mark.parametrize("name", SYNTAXES)
def test_an_output_cut_off_in_a_value_is_no_whole_call(name: str) -> None:
    text = without_ends(ENCODERS[name][1]([PLACE]), "Dallas", "fahrenheit")
    for end in range(text.index("fahrenheit") + len("fahrenheit") + 1):
        assert parse([text[:end]], family_of(name), TOOLS, is_cut=True).calls == ()


@pytest.mark.parametrize("name", OWN_WRAPPERS)
@pytest.mark.parametrize("join", ["", "\n"])
def test_the_next_call_ends_one_without_end_markers(name: str, join: str) -> None:
    encode = ENCODERS[name][1]
    other, empty = ("look_up", {"city": "Ulm"}), ("look_up", {})
    last_end = value_end(encode([PLACE]), "fahrenheit")[1]
    for calls, first_end in (([PLACE, other], last_end), ([PLACE, other, PLACE], last_end), ([PLACE, empty], last_end)):
        text = encode(calls[:1])[:first_end] + join + encode(calls[1:])
        assert told(every_cut(text, family_of(name))) == (calls, "", False)
    twice = encode([PLACE])[:last_end] + join
    assert told(every_cut(twice * 2, family_of(name))) == ([PLACE, PLACE], "", False)


def test_a_call_without_arguments_and_end_marker_precedes_another() -> None:
    """As GLM 4.7 writes calls, without newlines."""
    text = "<tool_call>look_up<tool_call>look_up<arg_key>city</arg_key><arg_value>Ulm</arg_value></tool_call>"
    assert told(every_cut(text, family_of("glm without newlines"))) == (
        [("look_up", {}), ("look_up", {"city": "Ulm"})],
        "",
        False,
    )
