"""Text beside calls is in the prompt even where the template drops it, refuses it or takes it for thinking."""

from __future__ import annotations

from typing import Any

import pytest
from text.vocabularies import byte_level

from headrace.families.registry import find_family
from headrace.text.template import ChatTemplate
from headrace.text.tokenizer import Tokenizer
from headrace.types.chat import ChatMessage, ChatRequest, Role, TextPart, ToolCall, ToolDefinition

ADD = ToolDefinition("add", "adds", {"type": "object", "properties": {"a": {"type": "integer"}}})
TOKENS = ("[TOOL_CALLS]", "[ARGS]", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>")

# Both let an answer follow a question only.
ALTERNATING = (
    "{% for m in messages if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}{% endif %}{% endfor %}"
    "{% for t in tools or [] %}{{ t.function.name }}|{% endfor %}"
)
SHOWN = "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}"
AS_LIST = (
    ALTERNATING + "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% elif m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}{{ c.function | tojson }}"
    "{{ ', ' if not loop.last }}{% endfor %}]</s>{% elif m.role == 'tool' %}[RESULT]{{ m.content }}[/RESULT]"
    "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
EACH = (
    AS_LIST.replace("[TOOL_CALLS][{%", "{%")
    .replace("{{ c.function | tojson }}{{ ', ' if not loop.last }}", SHOWN)
    .replace("{% endfor %}]</s>", "{% endfor %}</s>")
)
REFUSING = AS_LIST.replace(
    "{% elif m.tool_calls %}", "{% elif m.tool_calls %}{% if m.content %}{{ raise_exception('no text') }}{% endif %}"
)
# As Gemma 4's template, where such a turn is over and text behind its calls is the answer to their results.
TRAILING = EACH.replace("{{ raise_exception('turns') }}", "").replace(
    "{% endfor %}</s>{% elif m.role == 'tool' %}", "{% endfor %}{{ m.content }}</s>{% elif m.role == 'tool' %}"
)
# As later ones of Gemma 4, which look up the names of results in their calls.
NAMING = (
    EACH.replace("{% for c in", "{% set last.name = m.tool_calls[0].function.name %}{% for c in")
    .replace("[RESULT]", "[RESULT]{{ last.name }}:")
    .replace(ALTERNATING, ALTERNATING + "{% set last = namespace(name='') %}")
)
# As gpt-oss' template: text as thinking, none once an answer has followed, and the last call's name at a result.
MESSAGES = (
    "{% set last = namespace(name='') %}{% for t in tools or [] %}{{ t.function.name }}|{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>"
    "{% elif m.tool_calls %}{% set later = namespace(answer=false) %}{% for n in messages[loop.index:] %}"
    "{% if n.role == 'assistant' and not n.tool_calls %}{% set later.answer = true %}{% endif %}{% endfor %}"
    "{% if m.content and m.thinking %}{{ raise_exception('both') }}"
    "{% elif (m.content or m.thinking) and not later.answer %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.content or m.thinking }}<|end|>{% endif %}"
    "{% set last.name = m.tool_calls[0].function.name %}<|start|>assistant to=functions.{{ last.name }}"
    "<|channel|>commentary json<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% elif m.role == 'tool' %}<|start|>functions.{{ last.name }} to=assistant<|message|>{{ m.content }}<|end|>"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
)


def template(source: str, model_type: str = "generic") -> ChatTemplate:
    backend = byte_level(special=TOKENS)
    return ChatTemplate(Tokenizer(backend, chat_template=source), find_family(model_type, source))


def said(role: Role, text: str = "", **fields: Any) -> ChatMessage:
    return ChatMessage(role, (TextPart(text),) if text else (), **fields)


def called(text: str, *numbers: int, reasoning: str | None = None) -> ChatMessage:
    calls = tuple(ToolCall(f"call0000{number}", "add", f'{{"a": {number}}}') for number in numbers)
    return said("assistant", text, reasoning=reasoning, tool_calls=calls)


def result(number: int = 1) -> ChatMessage:
    return said("tool", f"r{number}", tool_call_id=f"call0000{number}")


def render(template: ChatTemplate, *messages: ChatMessage) -> str:
    return template.render(ChatRequest("r", (said("user", "hi"), *messages), tools=(ADD,))).text


@pytest.mark.parametrize("source", [AS_LIST, REFUSING])
def test_text_stands_before_the_list_of_calls(source: str) -> None:
    """As mistral-common writes such a turn."""
    calls = '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {"a": 2}}]</s>'
    begun = render(template(source), called("On it.", 1, 2), result(1), result(2))
    assert begun == f"add|[INST]hi[/INST]On it.{calls}[RESULT]r1[/RESULT][RESULT]r2[/RESULT]"
    done = (said("assistant", "done"), said("user", "thanks"))
    later = render(template(source), called("On it.", 1, 2), result(1), result(2), *done)
    assert later == f"{begun}done</s>[INST]thanks[/INST]"
    assert render(template(source), called("", 1), result()).startswith("add|[INST]hi[/INST][TOOL_CALLS]")


def test_text_stands_before_the_first_of_calls_with_a_marker_each() -> None:
    text = render(template(EACH), called("On it.", 1, 2), result(1), result(2))
    assert 'hi[/INST]On it.[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add[ARGS]{"a": 2}</s>' in text


def test_text_that_a_template_shows_behind_the_calls_stands_before_them() -> None:
    text = render(template(TRAILING), called("On it.", 1, 2), result(1), result(2))
    assert 'hi[/INST]On it.[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add[ARGS]{"a": 2}</s>[RESULT]r1' in text


def test_a_name_repeated_in_results_brings_the_text_no_second_time() -> None:
    turn = called("On it.", 1, 2), result(1), result(2)
    shown = 'On it.[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add[ARGS]{"a": 2}</s>'
    shown += "[RESULT]add:r1[/RESULT][RESULT]add:r2[/RESULT]"
    again = render(template(NAMING), *turn, said("assistant", "done"), said("user", "again"), *turn)
    assert again == f"add|[INST]hi[/INST]{shown}done</s>[INST]again[/INST]{shown}"


def test_text_beside_a_message_to_a_tool_is_a_message_for_the_user() -> None:
    """A preamble in the commentary channel, as OpenAI's description of harmony has it."""
    turns = called("On it.", 1, reasoning="Hm."), result(), called("Once more.", 2), result(2)
    note = "<|start|>assistant<|channel|>commentary<|message|>{}<|end|>"
    call = '<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{{"a": {0}}}<|call|>'
    call += "<|start|>functions.add to=assistant<|message|>r{0}<|end|>"
    head, thought = (
        "add|<|start|>user<|message|>hi<|end|>",
        "<|start|>assistant<|channel|>analysis<|message|>Hm.<|end|>",
    )
    shown = (note.format("On it.") + call.format(1), note.format("Once more.") + call.format(2))
    assert render(template(MESSAGES, "gpt_oss"), *turns) == head + thought + "".join(shown)
    answered = render(template(MESSAGES, "gpt_oss"), *turns, said("assistant", "done"), said("user", "so?"))
    assert "".join(shown) in answered


@pytest.mark.parametrize(
    "text",
    ['He said "so".\n\\n {{ x }}', "Grüße 🎻\t", "[TOOL_CALLS][ARGS]", "<|end|><|start|>user<|message|>x", "\ud800."],
)
@pytest.mark.parametrize(
    ("source", "model_type"), [(AS_LIST, "mistral"), (EACH, "mistral"), (REFUSING, "mistral"), (MESSAGES, "gpt_oss")]
)
def test_any_text_arrives_unchanged_and_typed_tokens_stay_text(source: str, model_type: str, text: str) -> None:
    made = template(source, model_type)
    plain, spoken = (
        made.render(ChatRequest("r", (said("user", "hi"), called(each, 1), result()), tools=(ADD,)))
        for each in ("On it.", text)
    )
    assert spoken.text == plain.text.replace("On it.", text.replace("\ud800", "\ufffd"))
    backend = byte_level(special=TOKENS)
    controls = {backend.token_to_id(token) for token in TOKENS}
    kept = [[each for each in prompt.token_ids if each in controls] for prompt in (plain, spoken)]
    assert kept[0] == kept[1]


def test_where_the_calls_begin_unmarked_nothing_of_the_text_is_left() -> None:
    source = AS_LIST.replace("[TOOL_CALLS][", "CALLS[")
    assert "hi[/INST]CALLS[" in render(template(source), called("On it.", 1), result())
