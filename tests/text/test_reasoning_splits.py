"""Thinking comes to the same text however the output was split, also where it holds calls.

Chat templates write a newline behind a start marker of thinking and one before an end marker (Qwen3's: '<think>\\n' +
reasoning.strip('\\n') + '\\n</think>\\n\\n'): these belong to the markers, everything else is what the model thought.
"""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text.encoders import ENCODERS, Call
from text.transcripts import FAMILIES, Got, parse

from headrace.families.family import ModelFamily
from headrace.families.registry import find_family
from headrace.tool_calls.calls import CallParser, CallSink
from headrace.tool_calls.reader import Reader, Reading
from headrace.types.chat import ToolDefinition

TOOLS = (
    ToolDefinition("now", None, {"type": "object", "properties": {}}),
    ToolDefinition(
        "store", None, {"type": "object", "properties": {"text": {"type": "string"}, "count": {"type": "integer"}}}
    ),
)
NOW: Call = ("now", {})
STORE: Call = ("store", {"text": "some\nwords"})
UNDECLARED: Call = ("launch", {"text": "x"})

# Families whose thinking is set apart by markers within the text.
THINKING = (
    "deepseek-r1", "deepseek-v3.1", "deepseek-v3.2", "gemma4", "glm4.6", "granite3.3", "hunyuan-a13b", "hy3",
    "kimi-k2-thinking", "lfm2.5", "magistral", "minimax-m2", "nemotron-nano-v2", "nemotron3", "qwen3", "qwen3.5",
    "seed-oss", "smollm3", "step3.5",
)  # fmt: skip

ENCODER_OF = {
    "glm4.6": "glm with newlines", "hunyuan-a13b": "hunyuan A13B", "hy3": "hunyuan Hy3",
}  # fmt: skip


def family_and_calls(name: str) -> tuple[ModelFamily, list[str]]:
    """A family, and what its calls look like: one, several of which one is undeclared, and an unfinished one."""
    family = find_family(*FAMILIES[name])
    tool_format, encode = ENCODERS[ENCODER_OF.get(name, family.tool_format or "")]
    assert tool_format == family.tool_format
    whole = [encode([NOW]), encode([STORE]), encode([STORE, NOW]), encode([UNDECLARED]), encode([NOW, UNDECLARED])]
    return family, [*whole, encode([STORE])[:-12]]


def thought(pieces: list[str] | str, family: ModelFamily) -> Got:
    return parse(pieces, family, TOOLS, thinking_open=True)


def in_pieces(text: str, cuts: list[int]) -> list[str]:
    cuts = sorted(cuts)
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("name", THINKING)
@pytest.mark.parametrize("before", ["x\n", "x", "x\n\n", ""])
@pytest.mark.parametrize("behind", ["\n", "", "\n\n", " \n", "\nso\n"])
def test_the_newline_before_a_end_marker_is_no_thought_behind_a_call_either(
    name: str, before: str, behind: str
) -> None:
    family, calls = family_and_calls(name)
    for call in calls:
        text = f"{before}{call}{behind}{family.think_close}\n\ny"
        expected = f"{before}{call}{behind}".removesuffix("\n")
        cuts = random.Random(text).choices(range(len(text)), k=5)
        for pieces in ([text], list(text), in_pieces(text, cuts)):
            got = thought(pieces, family)
            assert (got.reasoning, got.content, got.calls) == (expected, "y", ())


@pytest.mark.parametrize("name", THINKING)
@given(st.data())
@settings(max_examples=12)
def test_thinking_with_calls_in_it_comes_to_the_same_in_any_pieces(name: str, data: st.DataObject) -> None:
    family, calls = family_and_calls(name)
    markers = [family.think_close or "", f"\n{family.think_open}"]
    parts = st.sampled_from([*calls, *markers, "\n", "\n\n", " ", "word", "`"])
    text = "".join(data.draw(st.lists(parts, min_size=1, max_size=6)))
    whole = thought([text], family)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=12))
    assert thought(list(text), family).told == whole.told
    assert thought(in_pieces(text, cuts), family).told == whole.told
    assert all(call in ("now", "store") for call, _ in whole.calls)


@pytest.mark.parametrize("name", THINKING)
def test_calls_that_end_thinking_are_calls_only_if_all_of_them_are_declared(name: str) -> None:
    family, (now, _, both, undeclared, mixed, _) = family_and_calls(name)
    for text, names in ((now, ["now"]), (both, ["store", "now"]), (undeclared, []), (mixed, [])):
        for pieces in ([f"hm\n{text}\n"], list(f"hm\n{text}\n")):
            got = thought(pieces, family)
            assert [call for call, _ in got.calls] == names
            assert got.reasoning == ("hm" if names else f"hm\n{text}\n")


# Thinking that mentions many calls

BEGINNINGS = {
    "deepseek-v3.2": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="store">\n'
    '<｜DSML｜parameter name="@" string="true">',
    "glm4.6": "<tool_call>store\n<arg_key>@</arg_key>\n<arg_value>",
    "hy3": "<tool_calls:opensource>\n<tool_call:opensource>store<tool_sep:opensource>\n<arg_key:opensource>@"
    "</arg_key:opensource>\n<arg_value:opensource>",
    "minimax-m2": '<minimax:tool_call>\n<invoke name="store">\n<parameter name="@">',
    "qwen3.5": "<tool_call>\n<function=store>\n<parameter=@>\n",
    "seed-oss": "<seed:tool_call>\n<function=store>\n<parameter=@>",
}
"""Calls up to their first value."""
MOST_READINGS = 50


def counted(text: str, family: ModelFamily, monkeypatch: pytest.MonkeyPatch) -> tuple[int, Got]:
    """How often a call was read, complete or not, and what the text came to."""
    assert family.call_syntax is not None
    parser_type = type(family.call_syntax.parser)
    read = parser_type.read
    readings: list[int] = []

    def read_and_count(self: CallParser, reader: Reader, sink: CallSink) -> Reading[None]:
        readings.append(reader.pos)
        yield from read(self, reader, sink)

    with monkeypatch.context() as patch:
        patch.setattr(parser_type, "read", read_and_count)
        got = thought([text], family)
    return len(readings), got


@pytest.mark.parametrize("name", sorted(BEGINNINGS))
def test_of_many_beginnings_of_calls_in_thinking_only_the_last_are_read_to_the_end(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reading goes over all that follows, so there must not be one for each beginning."""
    family = find_family(*FAMILIES[name])
    for number in (100, 400):
        beginnings = (BEGINNINGS[name].replace("@", "text") + "words\n") * number
        num_readings, got = counted(beginnings, family, monkeypatch)
        assert num_readings < MOST_READINGS
        assert (got.reasoning, got.content, got.calls) == (beginnings, "", ())


@pytest.mark.parametrize("name", sorted(BEGINNINGS))
def test_a_call_in_thinking_that_breaks_late_is_not_searched_for_others_from_each_of_its_beginnings(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first value is complete and fits no schema, after a reading of everything in it."""
    family = find_family(*FAMILIES[name])
    whole = ENCODERS[ENCODER_OF.get(name, family.tool_format or "")][1]([("store", {"count": "many"})])
    ends = whole[whole.index("many") :]
    for number in (100, 400):
        text = BEGINNINGS[name].replace("@", "count") * number + ends * number
        num_readings, got = counted(text, family, monkeypatch)
        assert num_readings < MOST_READINGS
        assert (got.reasoning, got.content, got.calls) == (text, "", ())


@pytest.mark.parametrize("name", sorted(BEGINNINGS))
def test_a_call_that_ends_thinking_is_found_behind_many_beginnings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family = find_family(*FAMILIES[name])
    call = ENCODERS[ENCODER_OF.get(name, family.tool_format or "")][1]([STORE])
    beginnings = BEGINNINGS[name].replace("@", "count") * 200
    for text in (f"{beginnings}\n{call}", f"{beginnings}\n{call}\n"):
        num_readings, got = counted(text, family, monkeypatch)
        assert num_readings < MOST_READINGS
        assert (got.reasoning.rstrip(), got.content) == (beginnings.rstrip(), "")
        assert [(tool, json.loads(arguments)) for tool, arguments in got.calls] == [STORE]
        assert thought(list(text), family).told == got.told
