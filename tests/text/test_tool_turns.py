"""Calls in a conversation reach every template in a form that it takes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from text.vocabularies import byte_level, chat_tokenizer

from headrace.families.registry import find_family
from headrace.text.template import ChatTemplate
from headrace.text.tokenizer import Tokenizer
from headrace.types.chat import ChatMessage, ChatRequest, Role, TextPart, ToolCall, ToolDefinition

ADD = ToolDefinition("add", "adds", {"type": "object", "properties": {"a": {"type": "integer"}}})

HEAD = "{% for tool in tools or [] %}T:{{ tool.function.name }}\n{% endfor %}{% for m in messages %}{{ m.role }}: "
TAIL = "{{ m.content }}\n{% endfor %}"
CALLS = "{% for c in m.tool_calls or [] %}"


def template(body: str, model_type: str = "generic") -> ChatTemplate:
    source = HEAD + body + TAIL
    return ChatTemplate(Tokenizer(byte_level(), chat_template=source), find_family(model_type, source))


def said(role: Role, text: str = "", **fields: Any) -> ChatMessage:
    return ChatMessage(role, (TextPart(text),) if text else (), **fields)


def called(*calls: tuple[str, str], text: str = "", reasoning: str | None = None) -> ChatMessage:
    made = tuple(ToolCall(call_id, "add", arguments) for call_id, arguments in calls)
    return said("assistant", text, reasoning=reasoning, tool_calls=made)


def render(template: ChatTemplate, *messages: ChatMessage, tools: tuple[ToolDefinition, ...] = (ADD,)) -> str:
    return template.render(ChatRequest("r", (said("user", "hi"), *messages), tools=tools)).text


CALL = called(("call_0", '{"a": 1}'))
RESULT = said("tool", "one", tool_call_id="call_0")


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        ("{{ c.function.arguments | tojson }}", '{"a": 1}'),
        ("{{ '' + c.function.arguments }}", '{"a": 1}'),
        ("{{ c.function.arguments }}", '{"a": 1}'),
        ("{% for k, v in c.function.arguments | items %}{{ k }}={{ v }}{% endfor %}", "a=1"),
    ],
)
def test_arguments_come_in_the_form_that_the_template_wants(shown: str, expected: str) -> None:
    assert f"assistant: {expected};" in render(template(f"{CALLS}{shown};{{% endfor %}}"), CALL, RESULT)


NUMBERS = ("1.10", "-2.50e-3", "1E400", "-0", "12345678901234567890.125", "3.0", "7", "1e22", "-9007199254740993")


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        ("{{ c.function.arguments | tojson }}", '{"a": [%s, "%s"]}'),
        ("{{ c.function.arguments }}", '{"a": [%s, "%s"]}'),
        ("{% for k, v in c.function.arguments | items %}{{ k }}={{ v | string }}{% endfor %}", "a=[%s, '%s']"),
        ("{{ '' + c.function.arguments }}", '{"a": [%s, "%s"]}'),
    ],
)
def test_numbers_are_rendered_as_they_were_written(shown: str, expected: str, number: str) -> None:
    turn = called(("call_0", f'{{"a": [{number}, "{number}"]}}'))
    text = render(template(f"{CALLS}{shown};{{% endfor %}}"), turn, RESULT)
    assert f"assistant: {expected % (number, number)};" in text


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        ("{{ '' + c.function.arguments }}", "{oops"),
        ("{{ c.function.arguments | tojson }}", '"{oops"'),
        ("{% for k, v in c.function.arguments | items %}{{ k }}={{ v }}{% endfor %}", "arguments={oops"),
    ],
)
def test_arguments_that_are_no_json_are_rendered_all_the_same(shown: str, expected: str) -> None:
    text = render(template(f"{CALLS}{shown};{{% endfor %}}"), called(("call_0", "{oops")), RESULT)
    assert f"assistant: {expected};" in text


def test_arguments_nested_without_an_end_are_text() -> None:
    deep = "[" * 100_000
    shown = f"{CALLS}{{{{ c.function.arguments | tojson }}}};{{% endfor %}}"
    assert f'assistant: "{deep}";' in render(template(shown), called(("call_0", deep)), RESULT)


@pytest.mark.parametrize(("depth", "is_text"), [(200, False), (201, True), (450, True)])
def test_arguments_nested_deeper_than_a_body_are_text(depth: int, is_text: bool) -> None:
    deep = '{"a": ' + "[" * (depth - 1) + "]" * (depth - 1) + "}"
    shown = f"{CALLS}{{{{ c.function.arguments | tojson }}}};{{% endfor %}}"
    expected = json.dumps(deep) if is_text else deep
    assert f"assistant: {expected};" in render(template(shown), called(("call_0", deep)), RESULT)


REFUSES_SEVERAL = (
    "{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}"
    f"{CALLS}{{{{ c.function.arguments | tojson }}}};{{% endfor %}}"
)
SHOWS_THE_FIRST = "{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments | tojson }};{% endif %}"


@pytest.mark.parametrize("body", [REFUSES_SEVERAL, SHOWS_THE_FIRST])
def test_where_a_turn_has_one_call_each_call_gets_a_turn(body: str) -> None:
    turn = called(("a", '{"a": 1}'), ("b", '{"a": 2}'), text="Both.")
    results = (said("tool", "two", tool_call_id="b"), said("tool", "one", tool_call_id="a"))
    text = render(template(body), turn, *results, said("user", "so?"))
    assert text.endswith('assistant: {"a": 1};Both.\ntool: one\nassistant: {"a": 2};\ntool: two\nuser: so?\n')


REFUSES_LONG_IDS = (
    f"{CALLS}{{% if c.id | length != 9 %}}{{{{ raise_exception('9 characters') }}}}{{% endif %}}"
    "{{ c.id }}={{ c.function.arguments | tojson }};{% endfor %}"
    "{% if m.role == 'tool' %}{{ m.tool_call_id }}={% endif %}"
)


def test_where_ids_are_short_they_are_made_so_and_always_the_same() -> None:
    short = template(REFUSES_LONG_IDS)
    text = render(short, CALL, RESULT)
    call_id = text.partition("assistant: ")[2].partition("=")[0]
    assert len(call_id) == 9
    assert call_id.isalnum()
    assert f"tool: {call_id}=one" in text
    longer = render(short, CALL, RESULT, said("assistant", "one"), called(("other", "{}")))
    assert longer.startswith(text)
    kept = called(("Ab3dEf9hI", "{}"))
    assert "assistant: Ab3dEf9hI={}" in render(short, kept)


def test_where_ids_count_calls_foreign_ones_are_counted_too() -> None:
    shown = f"{CALLS}{{{{ c.id }}}}={{{{ c.function.arguments | tojson }}}};{{% endfor %}}{{{{ m.tool_call_id }}}} "
    kimi = template(shown + "{# <|tool_calls_section_begin|> #}", "kimi_k2")
    text = render(
        kimi, called(("functions.add:0", "{}")), called(("call_1", "{}")), said("tool", "x", tool_call_id="call_1")
    )
    assert "assistant: functions.add:0={}" in text
    assert "assistant: functions.add:1={}" in text
    assert "tool: functions.add:1 x" in text


def test_results_have_the_name_of_their_call_and_may_lack_an_id() -> None:
    shown = f"{CALLS}{{{{ c.function.arguments | tojson }}}};{{% endfor %}}{{{{ m.name }}}}/{{{{ m.tool_call_id }}}} "
    turn = called(("a", '{"a": 1}'), ("b", '{"a": 2}'))
    text = render(template(shown), turn, said("tool", "one"), said("tool", "two"))
    assert text.endswith("tool: add/a one\ntool: add/b two\n")


ONLY_PEOPLE = "{% if m.role not in ('user', 'assistant') %}{{ raise_exception('who?') }}{% endif %}"


def test_where_a_template_knows_no_tools_everything_is_said_in_words() -> None:
    source = f"{{% for m in messages %}}{{{{ m.role }}}}: {ONLY_PEOPLE}{TAIL}"
    plain = ChatTemplate(Tokenizer(byte_level(), chat_template=source), find_family("generic", source))
    text = render(plain, CALL, RESULT)
    head, _, rest = text.partition("hi\n")
    assert json.dumps({"name": "add", "description": "adds", "parameters": ADD.parameters}) in head
    assert '<tool_call>\n{"name": "the tool"' in head
    assert rest == (
        'assistant: <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
        "user: <tool_response>\none\n</tool_response>\n"
    )
    assert render(plain, tools=()) == "user: hi\n"


def test_tools_are_not_said_in_words_where_the_template_lists_their_parameters() -> None:
    parameters = "{% for k, v in tool.function.parameters.properties.items() %}{{ k }}:{{ v.description }}{% endfor %}"
    source = HEAD.replace("{{ tool.function.name }}", "{{ tool.function.name }} " + parameters) + TAIL
    listing = ChatTemplate(Tokenizer(byte_level(), chat_template=source), find_family("generic", source))
    assert render(listing) == "T:add a:user: hi\n"


def test_where_a_result_needs_a_call_a_lone_one_is_a_note() -> None:
    body = (
        "{% if m.role == 'tool' and not loop.previtem.tool_calls %}{{ raise_exception('no call') }}{% endif %}"
        f"{CALLS}{{{{ c.function.arguments | tojson }}}};{{% endfor %}}"
    )
    text = render(template(body), said("assistant", "x"), RESULT)
    assert text.endswith("assistant: x\nuser: <tool_response>\none\n</tool_response>\n")
    assert render(template(body), CALL, RESULT).endswith('assistant: {"a": 1};\ntool: one\n')


def test_where_results_belong_to_the_turn_of_their_calls_they_are_put_there() -> None:
    body = (
        f"{CALLS}{{{{ c.function.arguments | tojson }}}};{{% endfor %}}"
        "{% for r in m.tool_responses or [] %}{{ r.name }}={{ r.response }};{% endfor %}"
    )
    turn = called(("a", '{"a": 1}'), ("b", '{"a": 2}'))
    results = said("tool", "one", tool_call_id="a"), said("tool", "two", tool_call_id="b")
    text = render(template(body), turn, *results, said("user", "so?"))
    assert text.endswith('assistant: {"a": 1};{"a": 2};add=one;add=two;\nuser: so?\n')
    seen = body + "{% if m.role == 'tool' %}!{% endif %}"
    assert "tool: !one" in render(template(seen), turn, *results)


def test_where_a_call_has_thoughts_or_content_both_become_thoughts() -> None:
    body = (
        "{% if m.content and m.thinking %}{{ raise_exception('only one') }}{% endif %}"
        f"[{{{{ m.thinking }}}}]{CALLS}{{{{ c.function.arguments | tojson }}}};{{% endfor %}}"
    )
    text = render(template(body), called(("a", "{}"), text="On it.", reasoning="Hm."))
    assert "assistant: [Hm.\n\nOn it.]{};\n" in text


ARGUMENTS = f"{CALLS}{{{{ c.function.arguments | tojson }}}};{{% endfor %}}"
TURN_END = "{{ '\n' }}{% endfor %}"
NO_TEXT = f"{{% if m.tool_calls %}}{ARGUMENTS}{{% else %}}{{{{ m.content }}}}{{% endif %}}{TURN_END}"
NO_CALL = f"{{% if m.content %}}{{{{ m.content }}}}{{% else %}}{ARGUMENTS}{{% endif %}}{TURN_END}"
THOUGHTS = "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
THOUGHTS_AT_CALLS = "{% if m.tool_calls %}" + THOUGHTS + "{% endif %}"
SINGLE = "{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}"


def spoken_template(body: str) -> ChatTemplate:
    source = HEAD + body
    return ChatTemplate(Tokenizer(byte_level(), chat_template=source), find_family("generic", source))


@pytest.mark.parametrize("body", [NO_TEXT, NO_CALL])
def test_text_that_gets_lost_beside_a_call_is_a_turn_before_it(body: str) -> None:
    spoken, turn = spoken_template(body), called(("a", '{"a": 1}'), text="On it.")
    result = said("tool", "one", tool_call_id="a")
    begun = render(spoken, turn, result)
    assert begun.endswith('user: hi\nassistant: On it.\nassistant: {"a": 1};\ntool: one\n')
    done = render(
        spoken, turn, said("tool", "one", tool_call_id="a"), said("assistant", "done"), said("user", "thanks")
    )
    assert done == begun + "assistant: done\nuser: thanks\n"
    assert render(spoken, CALL, RESULT).endswith('user: hi\nassistant: {"a": 1};\ntool: one\n')


@pytest.mark.parametrize(
    ("thoughts", "expected"),
    [
        (THOUGHTS, "assistant: (Hm.)On it.\nassistant: {};\n"),
        (THOUGHTS_AT_CALLS, "assistant: On it.\nassistant: (Hm.){};\n"),
        ("", "assistant: On it.\nassistant: {};\n"),
    ],
)
def test_the_thinking_of_a_parted_turn_stays_where_it_is_shown(thoughts: str, expected: str) -> None:
    turn = called(("a", "{}"), text="On it.", reasoning="Hm.")
    assert render(spoken_template(thoughts + NO_TEXT), turn).endswith(f"user: hi\n{expected}")


def test_text_beside_several_calls_comes_once() -> None:
    turn = called(("a", '{"a": 1}'), ("b", '{"a": 2}'), text="Both.")
    results = said("tool", "one", tool_call_id="a"), said("tool", "two", tool_call_id="b")
    assert render(spoken_template(NO_TEXT), turn, *results).endswith(
        'assistant: Both.\nassistant: {"a": 1};{"a": 2};\ntool: one\ntool: two\n'
    )
    assert render(spoken_template(SINGLE + NO_TEXT), turn, *results).endswith(
        'assistant: Both.\nassistant: {"a": 1};\ntool: one\nassistant: {"a": 2};\ntool: two\n'
    )


def test_text_beside_a_call_is_no_turn_where_that_would_be_refused() -> None:
    strict = (
        "{% if m.role == 'assistant' and not m.tool_calls and messages[:loop.index0]"
        " | selectattr('role', 'equalto', 'assistant') | rejectattr('tool_calls') | list %}"
        "{{ raise_exception('one answer') }}{% endif %}"
    )
    chat = called(("a", '{"a": 1}'), text="On it."), said("tool", "one", tool_call_id="a"), said("assistant", "done")
    assert render(spoken_template(strict + NO_TEXT), *chat).endswith(
        'assistant: {"a": 1};\ntool: one\nassistant: done\n'
    )


def test_where_ids_must_not_be_brief_others_stay() -> None:
    body = (
        "{% for c in m.tool_calls or [] %}{% if c.id | length < 9 %}{{ raise_exception('brief') }}{% endif %}"
        "{{ c.id[-9:] }}={{ c.function.arguments | tojson }};{% endfor %}"
        "{% if m.role == 'tool' %}{{ m.tool_call_id[-9:] }}={% endif %}"
    )
    text = render(template(body), CALL, RESULT)
    call_id = text.partition("assistant: ")[2].partition("=")[0]
    assert len(call_id) == 9
    assert f"tool: {call_id}=one" in text
    assert "assistant: 123456789={}" in render(template(body), called(("call_123456789", "{}")))


@pytest.mark.parametrize("name", ["chatml", "thinking", "alternating", "headers"])
def test_no_conversation_with_calls_is_refused(name: str) -> None:
    tokenizer = chat_tokenizer(name)
    template = ChatTemplate(tokenizer, find_family("generic", tokenizer.chat_template))
    turn = called(("a", '{"a": 1}'), ("b", "broken"), text="Both.", reasoning="Hm.")
    results = (said("tool", "first", tool_call_id="a"), said("tool", "second", tool_call_id="b"))
    text = render(template, turn, *results, said("assistant", "done"), said("user", "thanks"))
    for part in ("first", "second", "done", "thanks", "add"):
        assert part in text
