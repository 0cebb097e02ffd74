"""System prompts are rendered wherever a template would lose them."""

from __future__ import annotations

import pytest
from text.vocabularies import byte_level

from headrace.families.registry import find_family
from headrace.text.template import ChatTemplate
from headrace.text.tokenizer import Tokenizer
from headrace.types.chat import ChatMessage, ChatRequest, MediaPart, Role, TextPart, ToolCall, ToolDefinition

LAST_WINS = (
    "{% set top = namespace(text='') %}"
    "{% for m in messages if m.role == 'system' %}{% set top.text = m.content %}{% endfor %}{{ top.text }}\n"
    "{% for m in messages if m.role != 'system' %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
)
FIRST_OF_EACH_RUN = (
    "{% for m in messages %}{% if loop.first or m.role != 'system' or loop.previtem.role != 'system' %}"
    "{{ '' if m.role == 'system' else m.role + ': ' }}{{ m.content }}{{ '\n' }}{% endif %}{% endfor %}"
)
LATER_REPLACES = (
    "{% set later = messages[1:] | selectattr('role', 'equalto', 'system') | list | length > 0 %}"
    "{% for m in messages[1 if later else 0:] %}"
    "{{ '' if m.role == 'system' else m.role + ': ' }}{{ m.content }}\n{% endfor %}"
)


def template(source: str) -> ChatTemplate:
    return ChatTemplate(Tokenizer(byte_level(), chat_template=source), find_family("generic", source))


def said(role: Role, text: str = "") -> ChatMessage:
    return ChatMessage(role, (TextPart(text),) if text else ())


def shown(source: str, *messages: ChatMessage, tools: tuple[ToolDefinition, ...] = ()) -> str:
    return template(source).render(ChatRequest("r", messages, tools=tools)).text


@pytest.mark.parametrize("source", [LAST_WINS, FIRST_OF_EACH_RUN, LATER_REPLACES])
def test_no_system_message_pushes_another_out(source: str) -> None:
    first, second = said("system", "one"), said("system", "two")
    assert shown(source, first, second, said("user", "hi")) == "one\n\ntwo\nuser: hi\n"
    chat = (first, said("user", "hi"), said("assistant", "yes"), second, said("user", "so?"))
    assert shown(source, *chat) == (
        "one\nuser: hi\nassistant: yes\nuser: <system-note>\ntwo\n</system-note>\nuser: so?\n"
    )


def test_tools_told_in_words_push_no_system_prompt_out() -> None:
    tool = ToolDefinition("add", "adds", {"type": "object"})
    text = shown(LAST_WINS, said("system", "Be brief."), said("user", "hi"), tools=(tool,))
    assert '{"name": "add", "description": "adds"' in text
    assert text.endswith("\n\nBe brief.\nuser: hi\n")


WITH_THE_LAST = (
    "{% for m in messages if m.role != 'system' %}"
    "{{ m.role }}: {% if loop.last and m.role == 'user' and messages[0].role == 'system' %}"
    "{{ messages[0].content }}\n\n{% endif %}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}"
    "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text or '[' + part.type + ']' }}{% endfor %}{% endif %}{{ '' }}\n{% endfor %}"
)
SYSTEM = said("system", "Be brief.")
CALL = ChatMessage("assistant", (), tool_calls=(ToolCall("call_0", "add", '{"a": 1}'),))
RESULT = ChatMessage("tool", (TextPart("one"),), tool_call_id="call_0")


def test_a_system_prompt_shown_before_the_last_question_stays_there_while_its_calls_are_made() -> None:
    chat = (SYSTEM, said("user", "hi"), said("assistant", "yes"), said("user", "add"))
    asked = shown(WITH_THE_LAST, *chat)
    assert asked == "user: hi\nassistant: yes\nuser: Be brief.\n\nadd\n"
    called = shown(WITH_THE_LAST, *chat, CALL, RESULT)
    assert called == asked + 'assistant: {"a": 1}\ntool: one\n'
    assert shown(WITH_THE_LAST, *chat, CALL, RESULT, CALL, RESULT) == called + 'assistant: {"a": 1}\ntool: one\n'
    answered = (*chat, CALL, RESULT, said("assistant", "one"), said("user", "so?"))
    assert shown(WITH_THE_LAST, *answered).endswith("tool: one\nassistant: one\nuser: Be brief.\n\nso?\n")


def test_a_system_prompt_before_a_question_with_a_picture_keeps_the_picture() -> None:
    question = ChatMessage("user", (MediaPart("image", "data:,"), TextPart("what?")))
    text = shown(WITH_THE_LAST, SYSTEM, question, CALL, RESULT)
    assert text == 'user: Be brief.\n\n[image]what?\nassistant: {"a": 1}\ntool: one\n'


def test_a_system_prompt_alone_is_shown_with_an_empty_question() -> None:
    assert shown(WITH_THE_LAST, SYSTEM) == "user: Be brief.\n\n\n"
    assert shown(LAST_WINS, SYSTEM) == "Be brief.\n"


def test_a_system_prompt_lost_only_where_results_come_last_is_shown_there_too() -> None:
    source = WITH_THE_LAST.replace("loop.last and m.role == 'user'", "loop.index0 == 0 and messages[-1].role != 'tool'")
    asked = shown(source, SYSTEM, said("user", "add"))
    assert asked == "user: Be brief.\n\nadd\n"
    assert shown(source, SYSTEM, said("user", "add"), CALL, RESULT) == asked + 'assistant: {"a": 1}\ntool: one\n'
