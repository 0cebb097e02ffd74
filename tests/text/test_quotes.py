"""Backticks and code fences that nothing closes quote no calls, whatever the calls' arguments hold.

vLLM's parsers take the markers of calls wherever they stand. Here, as in CommonMark, backticks quote what is between
two runs of the same length; a run that no other one follows in its paragraph is text.
"""

from __future__ import annotations

import json

import pytest
from text.encoders import ENCODERS, TAGGED, Call
from text.transcripts import Got, parse

from headrace.families.family import ModelFamily
from headrace.tool_calls.fences import MAX_QUOTE
from headrace.types.chat import ToolDefinition

TOOLS = (
    ToolDefinition(
        "write", None, {"type": "object", "properties": {"path": {"type": "string"}, "content": {"type": "string"}}}
    ),
)
RUN: Call = ("write", {"path": "`a.md`", "content": "run `make`"})
FENCED: Call = ("write", {"path": "a.md", "content": "# A\n```python\nx = 1\n```\nand ``b``"})
LONG: Call = ("write", {"path": "a.md", "content": "# A title\n" + "Run `make`, then ``b``.\n" * 200 + "```\nx\n```"})
LONE_TICKS = ["Mind the ` in line 3.\n", "I will add a ``` fence to it.\n", "Both ` and\n`` are odd.\n"]
BARE = frozenset({"llama_json", "pythonic", "lfm2 bare"})
"""Syntaxes without a start marker."""
IN_TEXT = sorted(set(ENCODERS) - {"harmony"})


def family_of(name: str) -> ModelFamily:
    return ModelFamily(name, tool_format=ENCODERS[name][0], think_open="<think>", think_close="</think>")


def every_cut(text: str, name: str, *, is_cut: bool = False) -> Got:
    """What a text comes to, which is the same however it is cut."""
    whole = parse([text], family_of(name), TOOLS, is_cut=is_cut)
    assert parse(text, family_of(name), TOOLS, is_cut=is_cut).told == whole.told
    for place in range(1, len(text), 1 if len(text) < MAX_QUOTE else 701):
        assert parse([text[:place], text[place:]], family_of(name), TOOLS, is_cut=is_cut).told == whole.told
    return whole


def told(got: Got) -> tuple[list[Call], str, bool]:
    return [(tool, json.loads(arguments)) for tool, arguments in got.calls], got.content.rstrip(), got.is_broken


@pytest.mark.parametrize("name", IN_TEXT)
@pytest.mark.parametrize("prose", LONE_TICKS)
@pytest.mark.parametrize("calls", [[RUN], [FENCED, RUN]])
def test_lone_backticks_quote_no_call(name: str, prose: str, calls: list[Call]) -> None:
    text = prose + ENCODERS[name][1](calls)
    assert told(every_cut(text, name)) == (calls, prose.rstrip(), False)


@pytest.mark.parametrize("name", IN_TEXT)
def test_lone_backticks_quote_no_long_call(name: str) -> None:
    for prose in LONE_TICKS:
        assert told(every_cut(prose + ENCODERS[name][1]([LONG]), name)) == ([LONG], prose.rstrip(), False)


@pytest.mark.parametrize("name", sorted(set(IN_TEXT) - {"deepseek_v3"}))
@pytest.mark.parametrize("quote", ["`{}`", "``{}``", "so ` and {}\nas ` there", "```\n{}\n```"])
def test_a_call_between_quotes_is_prose_whatever_it_holds(name: str, quote: str) -> None:
    call: Call = ("write", {"path": "a.md", "content": "a ``` b"})
    written = ENCODERS[name][1]([call])
    text = f"So it looks:\n{quote.format(written)} and so on."
    assert told(every_cut(text, name)) == ([], text, False)


@pytest.mark.parametrize("name", sorted(set(IN_TEXT) - BARE))
def test_a_fence_that_never_closes_quotes_no_calls_at_its_end(name: str) -> None:
    encode = ENCODERS[name][1]
    prose = "It is:\n```python\nx = 1\n"
    for calls in ([RUN], [FENCED, RUN]):
        for behind in ("", "\n"):
            assert told(every_cut(prose + encode(calls) + behind, name)) == (calls, prose.rstrip(), False)


@pytest.mark.parametrize("name", sorted(set(IN_TEXT) - BARE))
def test_calls_in_a_fence_that_may_still_close_are_prose(name: str) -> None:
    """With text after them, or in an output that was cut off."""
    written = ENCODERS[name][1]([RUN])
    for text, is_cut in ((f"It is:\n```\n{written}\nand so on", False), (f"It is:\n```\n{written}", True)):
        assert told(every_cut(text, name, is_cut=is_cut)) == ([], text, False)


@pytest.mark.parametrize("name", sorted(TAGGED))
def test_the_beginning_of_a_call_in_backticks_is_prose_however_much_follows(name: str) -> None:
    written = ENCODERS[name][1]([("write", {"content": "@"})])
    beginning = written[: written.index("@")].replace("\n", "")
    text = f"A call begins with `{beginning}`, as said. " + "And so on, ever further.\n" * 200
    assert told(every_cut(text, name)) == ([], text.rstrip(), False)


# Messages

START = "<|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>"
FINAL = "<|channel|>final<|message|>"


@pytest.mark.parametrize("prose", ["Mind the ` in line 3.", "A ``` fence", "It is:\n```python\nx = 1"])
def test_no_quote_goes_on_in_another_message(prose: str) -> None:
    for calls in ([RUN], [FENCED], [RUN, FENCED]):
        text = f"{PREAMBLE}{prose}<|end|>{START}{ENCODERS['harmony'][1](calls)}"
        assert told(every_cut(text, "harmony")) == (calls, prose, False)
    for answer in ("Done.", "Run `make` and ```b```."):
        text = f"{PREAMBLE}{prose}<|end|>{START}{FINAL}{answer}"
        assert told(every_cut(text, "harmony")) == ([], prose + answer, False)


@pytest.mark.parametrize(
    "answer",
    [
        "The tokens are `<|start|>` and `<|end|>`.",
        "Write `<|start|>user<|message|>Hi<|end|>` first.",
        "So:\n```\n<|start|>user<|message|>Hi<|end|>\n```\nThat is all.",
    ],
)
def test_markers_of_messages_between_quotes_are_text(answer: str) -> None:
    assert told(every_cut(FINAL + answer, "harmony")) == ([], answer, False)
