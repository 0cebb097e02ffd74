"""Answer and thinking, told apart in text that arrives in any split."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headrace.families.family import ModelFamily
from headrace.families.registry import find_family
from headrace.text.plain_output import MAX_BLOCK
from headrace.text.stream_parser import StreamParser
from headrace.types.chat import ToolDefinition
from headrace.types.events import Reasoning, Text, ToolArguments

REASONING = ModelFamily(name="reasoning", think_open="<think>", think_close="</think>")
PLAIN = ModelFamily(name="plain")
HARMONY = find_family("gpt_oss")


def parse(
    pieces: list[str] | str,
    *,
    family: ModelFamily = REASONING,
    thinking_open: bool = False,
    stop: tuple[str, ...] = (),
    is_cut: bool = False,
) -> list[tuple[str, str]]:
    """(kind, text) in order, neighbours of one kind joined."""
    parser = StreamParser(family, thinking_open=thinking_open, stop_strings=stop)
    joined: list[tuple[str, str]] = []
    events = [event for piece in ([pieces] if isinstance(pieces, str) else pieces) for event in parser.push(piece)]
    for event in [*events, *parser.finish(cut=is_cut)]:
        kind = {Text: "text", Reasoning: "thought"}[type(event)]
        if joined and joined[-1][0] == kind:
            joined[-1] = (kind, joined[-1][1] + event.text)
        else:
            joined.append((kind, event.text))
    return joined


FRAGMENTS = st.sampled_from(
    ["<think>", "</think>", "\n", "<", "</thi", "think>", "```\n", "`", " ", "a", "stop", "st", "é👩‍👧", "op"]
)


@given(st.lists(st.one_of(FRAGMENTS, st.text(max_size=3)), max_size=14), st.booleans(), st.data())
@settings(max_examples=250)
def test_any_split_gives_the_same_events(fragments: list[str], thinking_open: bool, data: st.DataObject) -> None:
    text = "".join(fragments)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    stop = data.draw(st.sampled_from([(), ("stop",), ("<",), ("\n\n", "a<think")]))
    whole = parse(text, thinking_open=thinking_open, stop=stop)
    assert parse(pieces, thinking_open=thinking_open, stop=stop) == whole
    assert parse(list(text), thinking_open=thinking_open, stop=stop) == whole


@given(st.lists(st.one_of(FRAGMENTS, st.text(max_size=3)), max_size=14), st.booleans())
@settings(max_examples=150)
def test_only_markers_and_the_newlines_around_them_are_dropped(fragments: list[str], thinking_open: bool) -> None:
    text = "".join(fragments)
    kept = "".join(part for _, part in parse(text, thinking_open=thinking_open))
    dropped = r"(?:\n?<think>\n?|\n?</think>\n{0,2})*"
    assert re.fullmatch(dropped + dropped.join([*map(re.escape, kept), ""]), text)


@given(st.lists(st.one_of(FRAGMENTS, st.text(max_size=3)), max_size=14), st.booleans())
def test_less_than_a_marker_and_a_stop_string_is_held_back(fragments: list[str], thinking_open: bool) -> None:
    parser = StreamParser(REASONING, thinking_open=thinking_open, stop_strings=("stop here",))
    reference = StreamParser(REASONING, thinking_open=thinking_open, stop_strings=("stop here",))
    whole = sum(len(event.text) for event in (*reference.push("".join(fragments)), *reference.finish()))
    given_out = sum(len(event.text) for piece in fragments for event in parser.push(piece))
    # A block that begins in mid-answer waits for its end, so only what stands before it is bound to have come.
    assume("<think>" not in "".join(fragments).lstrip().removeprefix("<think>"))
    assert whole - given_out <= len("\n</think>") - 1 + len("stop here") - 1


@given(st.text(max_size=40))
def test_a_family_that_does_not_think_gives_text_only(text: str) -> None:
    assert parse(text, family=PLAIN, thinking_open=True) == ([("text", text)] if text else [])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>\nhm\n</think>\n\nyes", [("thought", "hm"), ("text", "yes")]),
        ("<think>hm</think>yes", [("thought", "hm"), ("text", "yes")]),
        ("\n<think>hm</think>\nyes", [("thought", "hm"), ("text", "yes")]),
        ("<think>\n\n hm \n\n</think>\n\n\n yes\n", [("thought", "\n hm \n"), ("text", "\n yes\n")]),
        ("<think>\n\n</think>\n\nyes", [("text", "yes")]),
        ("<think>\n</think>yes", [("text", "yes")]),
        ("<think>only thought</think>", [("thought", "only thought")]),
        ("a\n<think>b</think>c", [("text", "a\n"), ("thought", "b"), ("text", "c")]),
        ("<think>a</think>\n\n<think>b</think>c", [("thought", "ab"), ("text", "c")]),
        ("<think>a<think>b</think>c", [("thought", "a<think>b"), ("text", "c")]),
    ],
)
def test_closed_blocks_are_thinking(text: str, expected: list[tuple[str, str]]) -> None:
    assert parse(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "no marker at all",
        "Well.\n</think>\n\na end marker by itself",
        "put it in `<think>` and `</think>`",
        "the <think> tag",
        "```\n<think>\nplan\n</think>\n```\n",
        "````md\n```\n<think>x</think>\n````\n",
        "~~~\n<think>x</think>\n~~~",
        "a < b and <thin air",
        "\n \n\t",
        "<",
        "<think",
    ],
)
def test_what_is_not_a_block_is_text_to_the_byte(text: str) -> None:
    assert parse(text) == [("text", text)]


def test_an_end_marker_with_nothing_before_it_is_dropped() -> None:
    assert parse("</think>\n\nyes") == [("text", "yes")]


def test_a_block_in_mid_answer_counts_if_it_is_closed() -> None:
    assert parse("so<think>hm</think>yes") == [("text", "so"), ("thought", "hm"), ("text", "yes")]
    assert parse("so\n<think>hm") == [("text", "so\n<think>hm")]


def test_a_block_in_mid_answer_that_is_cut_short_counts_where_it_begins_a_line() -> None:
    assert parse("so\n<think>hm", is_cut=True) == [("text", "so\n"), ("thought", "hm")]
    assert parse("so <think>hm", is_cut=True) == [("text", "so <think>hm")]


def test_a_long_block_in_mid_answer_goes_on_before_it_is_closed() -> None:
    parser = StreamParser(REASONING, thinking_open=False)
    assert parser.push("so\n<think>" + "x" * MAX_BLOCK) == (Text("so\n"),)
    assert parser.push("y" * 20) == (Reasoning("x" * MAX_BLOCK + "y" * 20),)


def test_markers_in_backticks_end_no_thinking() -> None:
    assert parse("they mean `</think>`, I think</think>yes", thinking_open=True) == [
        ("thought", "they mean `</think>`, I think"),
        ("text", "yes"),
    ]
    assert parse("use `x`</think>`y` it is", thinking_open=True) == [("thought", "use `x`"), ("text", "`y` it is")]


def test_a_backtick_that_nothing_closes_quotes_nothing() -> None:
    assert parse("a ` b\n\nc <think>d</think>e") == [("text", "a ` b\n\nc "), ("thought", "d"), ("text", "e")]
    assert parse("``<think>` </think>``") == [("text", "``<think>` </think>``")]


def test_a_block_after_a_closed_fence_counts_again() -> None:
    assert parse("```\ncode\n```\n<think>x</think>y") == [("text", "```\ncode\n```\n"), ("thought", "x"), ("text", "y")]


def test_inline_code_with_three_marks_opens_no_fence() -> None:
    assert parse("```a```\n<think>x</think>y") == [("text", "```a```\n"), ("thought", "x"), ("text", "y")]


@pytest.mark.parametrize("cut", ["", "\n", "\n</thi", "</think"])
def test_thinking_cut_short_stays_thinking(cut: str) -> None:
    assert parse(f"<think>so far{cut}") == [("thought", f"so far{cut}")]
    assert parse(f"so far{cut}", thinking_open=True) == [("thought", f"so far{cut}")]


def test_thinking_opened_by_the_prompt_ends_at_the_end_marker() -> None:
    assert parse("hm\n</think>\n\nyes", thinking_open=True) == [("thought", "hm"), ("text", "yes")]
    assert parse("\n</think>\n\nyes", thinking_open=True) == [("text", "yes")]
    assert parse("</think>yes", thinking_open=True) == [("text", "yes")]


def test_a_start_marker_that_the_prompt_had_written_already_is_dropped() -> None:
    assert parse(list("<think>hm</think>yes"), thinking_open=True) == [("thought", "hm"), ("text", "yes")]
    assert parse(list("<thin air"), thinking_open=True) == [("thought", "<thin air")]


def test_several_things_in_one_delta_are_all_seen() -> None:
    parser = StreamParser(REASONING, thinking_open=True)
    assert parser.push("tail</think>\n\nanswer") == (Reasoning("tail"), Text("answer"))


def test_white_space_deltas_are_kept_and_come_at_once() -> None:
    parser = StreamParser(REASONING, thinking_open=False)
    assert [parser.push(piece) for piece in ("a", " ", "\n\n", "\t")] == [
        (Text("a"),),
        (Text(" "),),
        (Text("\n\n"),),
        (Text("\t"),),
    ]


def test_a_stop_string_cuts_before_itself_and_ends_the_stream() -> None:
    parser = StreamParser(REASONING, thinking_open=False, stop_strings=("END",))
    assert [parser.push(piece) for piece in ("one E", "N", "D two", " three")] == [(Text("one "),), (), (), ()]
    assert parser.stopped
    assert parser.finish() == ()


def test_what_only_looked_like_a_stop_string_comes_back() -> None:
    parser = StreamParser(REASONING, thinking_open=False, stop_strings=("END",))
    assert parser.push("one E") + parser.push("Nd") == (Text("one "), Text("ENd"))
    assert parser.push("E") + parser.finish() == (Text("E"),)
    assert not parser.stopped


def test_stop_strings_do_not_fire_inside_thinking() -> None:
    text = "<think>END</think>answer END more"
    assert parse(text, stop=("END",)) == [("thought", "END"), ("text", "answer ")]


def test_stop_strings_do_not_fire_inside_a_call() -> None:
    tool = ToolDefinition("f", None, {"type": "object", "properties": {"a": {"type": "string"}}})
    family = ModelFamily(name="caller", tool_format="qwen_xml")
    parser = StreamParser(family, thinking_open=False, stop_strings=("END", "<para"), tools=(tool,))
    call = "<tool_call>\n<function=f>\n<parameter=a>\nthe END\n</parameter>\n</function>\n</tool_call>"
    events = [event for char in f"So: {call} then END more" for event in parser.push(char)]
    events += parser.finish()
    arguments = "".join(event.text for event in events if isinstance(event, ToolArguments))
    assert json.loads(arguments) == {"a": "the END"}
    assert parser.stop_string == "END"
    said = "".join(event.text for event in events if isinstance(event, Text))
    assert said.strip() == "So:then"  # white space beside a call belongs to it


def test_a_stop_string_does_not_reach_over_a_think_block() -> None:
    assert parse("E\n<think>x</think>ND", stop=("E\nND",)) == [("text", "E\n"), ("thought", "x"), ("text", "ND")]


def test_a_marker_is_not_answer_text_that_could_stop() -> None:
    assert parse("<think>x</think>a<b", stop=("<",)) == [("thought", "x"), ("text", "a")]
    assert parse("<thin", stop=("<",)) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "<|channel|>analysis<|message|>Plan.<|end|><|start|>assistant<|channel|>final<|message|>Hello!",
            [("thought", "Plan."), ("text", "Hello!")],
        ),
        (
            "<|channel|>analysis<|message|>A.<|end|><|start|>assistant<|channel|>analysis<|message|>B.<|end|>"
            "<|start|>assistant<|channel|>final<|message|>< and | and <|",
            [("thought", "A.B."), ("text", "< and | and <|")],
        ),
        ("<|channel|>final<|message|>At once.", [("text", "At once.")]),
        ("<|channel|>analysis<|message|>cut sh", [("thought", "cut sh")]),
        ("no header", [("text", "no header")]),
    ],
)
def test_harmony_messages_are_thinking_and_answer(text: str, expected: list[tuple[str, str]]) -> None:
    assert parse(text, family=HARMONY) == expected
    assert parse(list(text), family=HARMONY) == expected


def test_a_channel_of_gemma_is_thinking() -> None:
    text = "<|channel>thought\nNo tool needed.<channel|>Hello."
    assert parse(list(text), family=find_family("gemma4")) == [("thought", "No tool needed."), ("text", "Hello.")]


def test_half_a_header_within_the_answer_is_text() -> None:
    text = "<|channel|>final<|message|>a\n<|start|>assistant"
    assert parse(text, family=HARMONY) == [("text", "a\n<|start|>assistant")]
    assert parse(list(text), family=HARMONY) == [("text", "a\n<|start|>assistant")]


@pytest.mark.parametrize("text", ["<response>yes</response>", "<response>\nyes\n</response>"])
def test_an_element_around_the_answer_belongs_to_no_text(text: str) -> None:
    granite = find_family("granite", "</think>")
    assert parse(list(f"<think>hm</think>{text}"), family=granite) == [("thought", "hm"), ("text", "yes")]
    assert parse("</response> alone", family=granite) == [("text", "</response> alone")]


def test_sentences_may_set_thinking_apart() -> None:
    text = "Here's my thought process: hm\nHere is my response: yes"
    assert parse(list(text), family=find_family("granite")) == [("thought", " hm"), ("text", " yes")]
