"""A call that is written in some syntax comes back as it was, whatever its arguments hold and however it is split."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text.encoders import ENCODERS, TAGGED, Call
from text.transcripts import parse

from headrace.families.family import ModelFamily
from headrace.text.call_reader import MAX_HELD
from headrace.text.stream_parser import StreamParser
from headrace.tool_calls.syntaxes import SYNTAXES
from headrace.tool_calls.tag_values import MAX_DOUBT
from headrace.types.chat import ToolDefinition
from headrace.types.events import Text, ToolArguments, ToolCallStart

SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "share": {"type": "number"},
        "flag": {"type": "boolean"},
        "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "item": {"$ref": "#/$defs/item"},
        "list": {"type": "array", "items": {"$ref": "#/$defs/item"}},
    },
    "required": ["text"],
    "$defs": {
        "item": {
            "type": "object",
            "properties": {"key": {"type": "string"}, "next": {"anyOf": [{"$ref": "#/$defs/item"}, {"type": "null"}]}},
        }
    },
}
TOOLS = (ToolDefinition("store", None, SCHEMA), ToolDefinition("now", None, {"type": "object", "properties": {}}))
MARKERS = sorted(
    {marker for syntax in SYNTAXES.values() for marker in (*syntax.parser.start_markers, *syntax.parser.markers)}
    | {
        "<think>",
        "</think>",
        "</function>",
        "</parameter>",
        "</invoke>",
        "<parameter=text>",
        "```",
        "`",
        '"',
        "'",
        "\\",
    }
)

# Any character but surrogates, with odd ones made likely: joiners, a mark on its own, line ends of other systems.
ODD = st.sampled_from(
    ["\r\n", "\t", "\u2028", "\u200d", "\u0301", "👩🏽‍💻", "\ufeff", "\x00", "\x7f", "\\n", "\\u00e9", "{}", "\n"]
)
ANYTHING = st.lists(st.one_of(st.text(max_size=8), ODD, st.sampled_from(MARKERS)), max_size=6).map("".join)
NUMBERS = st.one_of(st.integers(-(2**70), 2**70), st.floats(allow_nan=False, allow_infinity=False))


def family(name: str) -> ModelFamily:
    return ModelFamily(name, tool_format=name, think_open="<think>", think_close="</think>")


def arguments(strings: st.SearchStrategy[str]) -> st.SearchStrategy[dict[str, Any]]:
    """Arguments that fit the schema; `text` is always there."""
    leaf = st.fixed_dictionaries({"key": strings}, optional={"next": st.none()})
    item = st.one_of(leaf, st.fixed_dictionaries({"key": strings, "next": leaf}))
    return st.fixed_dictionaries(
        {"text": strings},
        optional={
            "count": st.integers(-(2**70), 2**70),
            "share": NUMBERS,
            "flag": st.booleans(),
            "limit": st.one_of(st.none(), st.integers()),
            "item": item,
            "list": st.lists(item, max_size=3),
        },
    )


def calls_with(strings: st.SearchStrategy[str]) -> st.SearchStrategy[list[Call]]:
    store = st.tuples(st.just("store"), arguments(strings))
    return st.lists(st.one_of(store, st.just(("now", {}))), min_size=1, max_size=3)


def without_tags(text: str) -> str:
    """Strings between tags can't hold every run of end markers: nothing would mark the end."""
    return re.sub(r"</?[^<>]*>?", "", text)


@pytest.mark.parametrize("name", sorted(set(ENCODERS) - {"gemma4"} - TAGGED))
@given(calls_with(ANYTHING), st.data())
@settings(max_examples=15)
def test_escaped_arguments_come_back_exactly(name: str, calls: list[Call], data: st.DataObject) -> None:
    check(name, calls, data)


@pytest.mark.parametrize("name", sorted({*TAGGED, "gemma4"}))
@given(calls_with(ANYTHING.map(without_tags)), st.data())
@settings(max_examples=15)
def test_bare_arguments_come_back_exactly(name: str, calls: list[Call], data: st.DataObject) -> None:
    check(name, calls, data)


def check(name: str, calls: list[Call], data: st.DataObject) -> None:
    tool_format, encode = ENCODERS[name]
    text = encode(calls)
    got = parse([text], family(tool_format), TOOLS)
    assert [(tool, json.loads(told)) for tool, told in got.calls] == calls
    assert (got.content, got.reasoning, got.is_broken) == ("", "", False)
    assert len(set(got.ids)) == len(calls)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(pieces, family(tool_format), TOOLS).told == got.told
    assert parse(text, family(tool_format), TOOLS).told == got.told


@pytest.mark.parametrize("name", sorted(TAGGED))
@pytest.mark.parametrize("order", [("text",), ("text", "count"), ("count", "text")])
def test_a_value_between_tags_may_hold_its_own_syntax(name: str, order: tuple[str, ...]) -> None:
    tool_format, encode = ENCODERS[name]
    example = encode([("store", {"text": "one\ntwo", "count": 1})])
    end_markers = example[example.index("two") + 3 :]
    for value in (
        f"# An example\n{example}\nThat is all.\n",
        f"two of them\n{example}\n{example}\nend",
        end_markers.split(">")[0] + "> by itself, with text behind it",
        example[:10],
        "a < b, </b>, <parameter, </param",
    ):
        given_arguments = {"text": value, "count": 7}
        call = ("store", {key: given_arguments[key] for key in order})
        text = encode([call])
        for pieces in ([text], list(text)):
            got = parse(pieces, family(tool_format), TOOLS)
            assert [(tool, json.loads(told)) for tool, told in got.calls] == [call]
            assert got.content == ""


@pytest.mark.parametrize("name", sorted(TAGGED))
def test_a_closing_sequence_within_a_value_is_told_from_the_last_one(name: str) -> None:
    tool_format, encode = ENCODERS[name]
    call = ("store", {"text": "every call ends with"})
    text = encode([call])
    end_markers = text[text.index("ends with") + len("ends with") :]
    longer = ("store", {"text": f"every call ends with{end_markers}\nRemember that."})
    for pieces in ([encode([longer])], list(encode([longer]))):
        got = parse(pieces, family(tool_format), TOOLS)
        assert [(tool, json.loads(told)) for tool, told in got.calls] == [longer]
    followed = f"{text}\nThat was the call."
    got = parse(followed, family(tool_format), TOOLS)
    assert ([(tool, json.loads(told)) for tool, told in got.calls], got.content) == ([call], "That was the call.")


@pytest.mark.parametrize("name", sorted(TAGGED))
def test_prose_behind_a_call_is_held_back_for_so_long_only(name: str) -> None:
    tool_format, encode = ENCODERS[name]
    parser = StreamParser(family(tool_format), thinking_open=False, tools=TOOLS)
    parser.push(encode([("store", {"text": "x"})]))
    told = [event for _ in range(MAX_DOUBT) for event in parser.push("prose ")]
    assert any(isinstance(event, ToolCallStart) for event in told)
    assert sum(len(event.text) for event in told if isinstance(event, Text)) > 6 * MAX_DOUBT - MAX_DOUBT - 200


@pytest.mark.parametrize("name", sorted(set(ENCODERS) - {"glm with newlines", "lfm2 bare"}))
def test_long_arguments_are_told_while_they_are_written(name: str) -> None:
    tool_format, encode = ENCODERS[name]
    text = encode([("store", {"text": "All that is written comes soon. " * 200})])
    parser = StreamParser(family(tool_format), thinking_open=False, tools=TOOLS)
    pushed = told = 0
    most = 0
    for start in range(0, len(text), 4):
        pushed += len(text[start : start + 4])
        told += sum(
            len(event.text) for event in parser.push(text[start : start + 4]) if isinstance(event, ToolArguments)
        )
        most = max(most, pushed - told)
    assert most < MAX_HELD + 100


@pytest.mark.parametrize("name", sorted(ENCODERS))
def test_markup_without_tools_or_of_undeclared_ones_is_text(name: str) -> None:
    tool_format, encode = ENCODERS[name]
    text = encode([("store", {"text": "x", "count": 1})])
    shown = parse(text, family(tool_format), ()).content
    others = parse(text, family(tool_format), (ToolDefinition("other", None, {}),))
    assert others.calls == ()
    if tool_format != "harmony":  # whose headers belong to no text
        assert (shown, others.content) == (text, text)


# Calls of deepseek_v3 contain a fence, and those of harmony are separate messages.
@pytest.mark.parametrize("name", sorted(set(ENCODERS) - {"deepseek_v3", "harmony"}))
@pytest.mark.parametrize("quote", ["`{}`", "```\n{}\n```", "``{}``", "~~~\n{}\n~~~\n"])
def test_a_call_that_is_quoted_is_prose(name: str, quote: str) -> None:
    tool_format, encode = ENCODERS[name]
    text = "So it looks:\n" + quote.format(encode([("store", {"text": "x"})])) + " and so on."
    assert parse(text, family(tool_format), TOOLS).told == (text, "", (), "stop", False)


@pytest.mark.parametrize("name", sorted(ENCODERS))
def test_a_call_that_breaks_off_is_text_and_a_missing_end_marker_is_none(name: str) -> None:
    tool_format, encode = ENCODERS[name]
    text = encode([("store", {"text": "some words"})])
    cut = text[: text.index("words")]
    got = parse(cut, family(tool_format), TOOLS, is_cut=True)
    assert got.calls == ()
    assert tool_format == "harmony" or got.content == cut
    for end in range(text.index("words") + len("words") + 1, len(text)):
        for is_cut in (False, True):
            got = parse([text[:end]], family(tool_format), TOOLS, is_cut=is_cut)
            if got.calls:
                assert json.loads(got.calls[0][1]) == {"text": "some words"}
                assert got.content == ""
            else:
                assert tool_format == "harmony" or got.content.strip() == text[:end].strip()


def fragments(tool_format: str) -> st.SearchStrategy[str]:
    """Calls of a syntax, pieces of them, its markers, and what quotes, interrupts or outlasts them."""
    written = [
        encode([("store", {"text": "x"}), ("now", {})]) for name, encode in ENCODERS.values() if name == tool_format
    ]
    written += [encode([("other", {"a": 1})]) for name, encode in ENCODERS.values() if name == tool_format]
    written += [encode([("now", {}), ("other", {"a": 1})]) for name, encode in ENCODERS.values() if name == tool_format]
    written += [text.replace("{}", nothing) for text in written for nothing in ("null", "") if "{}" in text]
    pieces = [piece for text in written for piece in re.findall(r"<[^<>]*>|\w+|\s+|[^\w\s]", text)]
    parser = SYNTAXES[tool_format].parser
    markers = [*parser.start_markers, *parser.markers, "<think>", "</think>"]
    others = ["`", "```\n", "\n\n", "\n", "\n</think>\n\n", " ", "word", "x" * (MAX_HELD - 20), '"', "{", "}", "[", "]"]
    whole = st.sampled_from(written)
    cut = st.tuples(whole, st.integers(0, 80)).map(lambda pair: pair[0][: pair[1]])
    return st.one_of(whole, cut, st.sampled_from(pieces), st.sampled_from([*markers, *others]))


@pytest.mark.parametrize("tool_format", sorted(SYNTAXES))
@given(st.data(), st.booleans(), st.booleans())
@settings(max_examples=20)
def test_any_split_of_anything_comes_to_the_same(
    tool_format: str, data: st.DataObject, thinking_open: bool, is_cut: bool
) -> None:
    text = "".join(data.draw(st.lists(fragments(tool_format), max_size=7)))
    how = {"thinking_open": thinking_open, "is_cut": is_cut}
    whole = parse([text], family(tool_format), TOOLS, **how)
    assert parse(text, family(tool_format), TOOLS, **how).told == whole.told
    size = data.draw(st.integers(2, 40))
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    assert parse(pieces, family(tool_format), TOOLS, **how).told == whole.told
    for _, told in whole.calls:
        if not (is_cut or whole.is_broken):
            json.loads(told)


@pytest.mark.parametrize("tool_format", sorted(SYNTAXES))
@given(st.data())
@settings(max_examples=10)
def test_no_beginning_takes_what_follows_hostage(tool_format: str, data: st.DataObject) -> None:
    beginning = "".join(data.draw(st.lists(fragments(tool_format), max_size=4))).replace("<think>", "")
    parser = StreamParser(family(tool_format), thinking_open=False, tools=TOOLS)
    parser.push(beginning)
    told = sum(
        len(event.text)
        for _ in range(400)
        for event in parser.push("and so on, ever further. ")
        if not isinstance(event, ToolCallStart)
    )
    assert told > 400 * 25 - 2 * (MAX_HELD + MAX_DOUBT)
