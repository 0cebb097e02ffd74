"""What a grammar took for a value is what the reader of the output takes for it, whatever the value quotes."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
from grammar.call_answers import (
    ByteTokenizer,
    begun,
    guarantees_of,
    parsed,
    random_output,
    special_of,
    takes,
    takes_whole,
    ways_out_of,
)
from grammar.schemas import closed

from headrace.families.family import ModelFamily
from headrace.grammar.compile import AllowedCalls, OutputForm, ThinkingForm
from headrace.text.stream_parser import StreamParser
from headrace.tool_calls.forms import MAYBE_NEWLINE, CallForm, TagBody
from headrace.tool_calls.syntaxes import SYNTAXES
from headrace.types.chat import Structure, ToolDefinition
from headrace.types.events import ToolArguments, ToolCallStart

SCHEMAS: dict[str, Any] = {
    "send": closed(
        {
            "text": {"type": "string"},
            "limit": {"type": "integer", "minimum": 0, "maximum": 99},
            "label": {"type": "string", "maxLength": 40},
            "lines": {"type": ["string", "array"], "items": {"type": "string"}, "maxItems": 2},
            "rows": {"type": ["integer", "array"], "items": {"type": "string"}, "maxItems": 2, "maximum": 9},
        },
        ["text", "limit", "lines"],
    ),
    "note": closed({"text": {"type": "string"}, "label": {"type": "string"}}, ["text", "label"]),
}
TOOLS = tuple(ToolDefinition(name, None, schema, strict=True) for name, schema in SCHEMAS.items())
TAGGED = {
    name: syntax.forms for name, syntax in SYNTAXES.items() if any(isinstance(f.body, TagBody) for f in syntax.forms)
}
THINK = ("<think>", "</think>")


def pattern(marker: str) -> str:
    return re.escape(marker).replace(re.escape(MAYBE_NEWLINE), "\\n?")


def calls_of(output: str, forms: tuple[CallForm, ...]) -> list[tuple[str, dict[str, str]]]:
    """The calls of an output, by a reading that ends each value at the first end marker outside of JSON's brackets."""
    for form in forms:
        body = form.body
        if not isinstance(body, TagBody) or not output.startswith(form.start_marker):
            continue
        name_end = pattern(body.tags.name_end + body.tags.newline)
        head = rf"\s*(?:{pattern(form.start_marker)}|{pattern(form.join)})?\s*{pattern(body.before.lstrip())}"
        found, rest = [], output
        while (opened := re.match(rf"{head}(?P<name>send|note){name_end}", rest)) is not None:
            arguments, rest = arguments_of(body, opened["name"], rest[opened.end() :])
            found.append((opened["name"], arguments))
        assert rest.strip() == form.close, rest
        return found
    raise AssertionError(output)


def arguments_of(body: TagBody, tool: str, rest: str) -> tuple[dict[str, Any], str]:
    arguments, tags = {}, body.tags
    keys = "|".join(pattern(tags.after_key(is_text=each)) for each in (True, False))
    while (
        opened := re.match(rf"{pattern(tags.key_open)}(?P<key>\w+)(?:{keys}){pattern(tags.frame)}", rest)
    ) is not None:
        key, rest = opened["key"], rest[opened.end() :]
        if rest[0] in "[{" and key in ("lines", "rows"):
            arguments[key], end = json.JSONDecoder().raw_decode(rest)
            _, _, rest = rest[end:].partition(tags.value_close)
        else:
            text, _, rest = rest.partition(tags.value_close)
            text = text.removesuffix(tags.frame) if tags.frame else text
            arguments[key] = json.loads(text) if key in ("limit", "rows") else text
        behind = re.match(pattern(tags.newline), rest)
        assert behind is not None, rest
        rest = rest[behind.end() :]
    end_marker = re.match(pattern(body.after), rest)
    assert end_marker is not None, (tool, rest)
    return arguments, rest[end_marker.end() :]


def nasty_pieces(forms: tuple[CallForm, ...]) -> list[str]:
    """Parts of calls, alone and put together as a value would quote them, and what else may confuse a reader."""
    pieces = ["`", "```\n", "\n\n", "[", '["', '"]', "\\", *THINK, '{"name": "note", "arguments": {}}', "Send it. "]
    for form in forms:
        body = form.body
        pieces.append(form.start_marker)
        if isinstance(body, TagBody):
            tags, after_key = body.tags, body.tags.after_key(is_text=True)
            head = body.before + "note" + tags.name_end + tags.newline
            value = tags.key_open + "label" + after_key + "x" + tags.value_close + tags.newline
            whole = [head, value, tags.value_close + tags.newline, body.after, tags.value_close + body.after]
            whole += [form.start_marker + head + value, form.start_marker + head, tags.key_open + "limit" + after_key]
            pieces += [each.replace(MAYBE_NEWLINE, "") for each in whole]
    return pieces


@pytest.mark.parametrize("has_special", [True, False])
@pytest.mark.parametrize("name", TAGGED)
def test_arguments_are_read_as_the_grammar_took_them(name: str, has_special: bool) -> None:
    special = special_of(name, has_special)
    tokenizer = ByteTokenizer(special)
    form = OutputForm(None, AllowedCalls(TOOLS, True, True), name, None)
    guarantees = guarantees_of(form, special)
    rng = np.random.default_rng(5)
    num_quoting = 0
    for seed in range(4):
        output = random_output(
            begun(form, special), tokenizer, ways_out_of(name), seed, pieces=nasty_pieces(TAGGED[name])
        )
        if not any(isinstance(each.body, TagBody) and output.startswith(each.start_marker) for each in TAGGED[name]):
            continue  # Hunyuan's older syntax is JSON
        expected = calls_of(output, TAGGED[name])
        num_quoting += any("note" in str(value) for _, arguments in expected for value in arguments.values())
        cuts = rng.integers(len(output), size=5).tolist()
        for where in ((), cuts, range(len(output))):
            text, calls = parsed(name, output, TOOLS, guarantees, cuts=where)
            assert calls == expected, output
            assert not text.strip()
    assert num_quoting or has_special  # special tokens can not come in a text


QWEN_CALL = "<tool_call>\n<function=note>\n<parameter=text>\n{}\n</parameter>\n<parameter=label>\n{}\n</parameter>\n"
QWEN_END = "</function>\n</tool_call>"
QUOTED = "<tool_call>\n<function=note>\n<parameter=text>\nx"


def test_a_value_that_quotes_the_opening_of_a_call_ends_at_the_first_end_marker() -> None:
    form = OutputForm(None, AllowedCalls(TOOLS, True, True), "qwen_xml", None)
    output = QWEN_CALL.format(QUOTED, "low") + QWEN_END
    assert takes_whole(begun(form), output)
    for cuts in ((), range(len(output))):
        _, calls = parsed("qwen_xml", output, TOOLS, guarantees_of(form), cuts=cuts)
        assert calls == [("note", {"text": QUOTED, "label": "low"})]


def test_a_model_that_writes_freely_may_quote_whole_calls() -> None:
    whole = f"{QUOTED}\n</parameter>\n{QWEN_END}"
    _, calls = parsed("qwen_xml", QWEN_CALL.format(whole, "low") + QWEN_END, TOOLS)
    assert calls == [("note", {"text": whole, "label": "low"})]


@pytest.mark.parametrize("name", [name for name, syntax in SYNTAXES.items() if syntax.forms])
def test_the_grammar_knows_every_start_marker_that_a_call_is_read_from(name: str) -> None:
    """Else a call could come that nothing holds. Tokens of older versions, which a model does not write, are left."""
    form = OutputForm(None, AllowedCalls(TOOLS, False, True), name, None)
    for start_marker in SYNTAXES[name].parser.start_markers:
        output = f"So: {start_marker}"
        text, calls = parsed(name, output, TOOLS, guarantees_of(form))
        assert takes_whole(begun(form), output) == (
            not any(start_marker == each.start_marker for each in SYNTAXES[name].forms)
        )
        assert (text, calls) == (output, [])


FREE = OutputForm(None, AllowedCalls(TOOLS, False, True), "qwen_xml", ThinkingForm(*THINK, is_open=False))
NOTE = QWEN_CALL.format("a", "b") + QWEN_END


@pytest.mark.parametrize("before", ["Look: `", "```\n", "", "<think>\nI <tool_call> it\n</think>\n\n", "</think>"])
def test_where_text_may_come_the_first_start_marker_begins_a_call_also_in_quotes(before: str) -> None:
    assert takes_whole(begun(FREE), before + NOTE)
    assert not takes(begun(FREE), before + NOTE.replace("note", "nota"))
    _, calls = parsed("qwen_xml", before + NOTE, TOOLS, guarantees_of(FREE), think=THINK)
    assert calls == [("note", {"text": "a", "label": "b"})]


def test_thinking_is_thinking_whatever_it_mentions_and_is_no_answer_later() -> None:
    guarantees = guarantees_of(FREE)
    mention = f"<think>I would {NOTE}"
    assert takes(begun(FREE), mention)
    assert parsed("qwen_xml", mention, TOOLS, guarantees, think=THINK) == ("", [])
    quoted = "<think>it ends with `</think>`, so"
    assert parsed("qwen_xml", quoted, TOOLS, guarantees, think=THINK) == ("`, so", [])
    later = f"Now <think>a</think> {NOTE}"
    assert takes_whole(begun(FREE), later)
    assert parsed("qwen_xml", later, TOOLS, guarantees, think=THINK)[0] == "Now <think>a</think>"
    assert not takes(begun(FREE), "<think>a</think><think>")


def test_an_answer_with_a_form_is_told_to_the_letter() -> None:
    schema = closed({"a": {"type": "string"}}, ["a"])
    thinking = ThinkingForm(*THINK, is_open=False)
    for calls in (None, AllowedCalls(TOOLS, False, True)):
        form = OutputForm(Structure("json_schema", schema), calls, "qwen_xml", thinking)
        answer = json.dumps({"a": f"<think>x</think> {NOTE} <function=note></function>"})
        assert takes_whole(begun(form), answer)
        text, found = parsed("qwen_xml", f"<think>so</think>\n\n{answer}", TOOLS, guarantees_of(form), think=THINK)
        assert (text, found) == (answer, [])


@pytest.mark.parametrize(
    ("name", "call"), [("pythonic", "[send()]"), ("llama_json", '{"name": "send", "parameters": {}}')]
)
def test_a_call_without_a_marker_begins_the_answer_or_is_none(name: str, call: str) -> None:
    form = OutputForm(None, AllowedCalls(TOOLS, False, True), name, None)
    output = f"Let me see.\n{call}"
    assert takes_whole(begun(form), output)
    assert parsed(name, output, TOOLS, guarantees_of(form)) == (output, [])
    assert not takes(begun(form), call)


def test_a_special_token_is_not_spelled_in_other_tokens() -> None:
    special = ("<tool_call>", "<think>", "</think>")
    constraint = begun(FREE, special)
    for text in ("So <tool_call>", "<think>"):
        spelled = list(text.encode())
        assert constraint.window(spelled).num_legal == len(spelled) - 1
    thought = ByteTokenizer(special).encode("<think>") + list(b"a</think>")
    assert constraint.window(thought).num_legal == len(thought) - 1


CUT = "<tool_call>\n<function=note>\n<parameter=text>\nso far"


def test_a_held_call_is_told_as_it_comes_and_stays_a_call_when_it_is_cut() -> None:
    form = OutputForm(None, AllowedCalls(TOOLS, True, True), "qwen_xml", None)
    assert takes(begun(form), CUT)
    parser = StreamParser(
        ModelFamily("made up", tool_format="qwen_xml"), thinking_open=False, tools=TOOLS, guarantees=guarantees_of(form)
    )
    started, told = parser.push(CUT)
    assert isinstance(started, ToolCallStart)
    assert isinstance(told, ToolArguments)
    assert (started.name, told.text) == ("note", '{"text": "so far')
    assert parser.finish(cut=True) == ()
