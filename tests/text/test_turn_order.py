"""Conversations in any order of turns reach templates in which user and assistant must take turns."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text.vocabularies import byte_level, chat_tokenizer

from headrace.errors import InvalidRequest
from headrace.families.registry import find_family
from headrace.text.template import ChatTemplate
from headrace.text.tokenizer import Tokenizer
from headrace.types.chat import ChatMessage, ChatRequest, MediaPart, Role, TextPart, ToolCall

UNCOUNTED = (
    "{% set n = namespace(turns=0) %}{% for m in messages %}"
    "{% if m.role in ('user', 'assistant') and not m.tool_calls %}"
    "{% if (m.role == 'user') != (n.turns % 2 == 0) %}{{ raise_exception('take turns') }}{% endif %}"
    "{% set n.turns = n.turns + 1 %}{% endif %}"
)
COUNTED = (
    "{% for m in messages %}"
    "{% if (m.role in ('user', 'tool')) != (loop.index0 % 2 == 0) %}{{ raise_exception('take turns') }}{% endif %}"
)
NO_EMPTY_ANSWER = (
    "{% if m.role == 'assistant' and not m.content and not m.tool_calls %}{{ raise_exception('empty') }}{% endif %}"
)
NO_BLANK_ANSWER = (
    "{% if m.role == 'assistant' and not m.content | trim and not m.tool_calls %}"
    "{{ raise_exception('empty') }}{% endif %}"
)
SHOWN = (
    "{{ m.role }}:{% for part in m.content if part is mapping %}{{ part.text or '[' + part.type + ']' }}{% endfor %}"
    "{% if m.content is string %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}{{ '' }}\n{% endfor %}"
)


def template(source: str) -> ChatTemplate:
    return ChatTemplate(Tokenizer(byte_level(), chat_template=source), find_family("generic", source))


def said(role: Role, text: str = "", reasoning: str | None = None) -> ChatMessage:
    return ChatMessage(role, (TextPart(text),) if text else (), reasoning=reasoning)


def called(number: int) -> ChatMessage:
    return ChatMessage("assistant", tool_calls=(ToolCall(f"call_{number}", "add", f'{{"a": {number}}}'),))


def result(number: int) -> ChatMessage:
    return ChatMessage("tool", (TextPart(f"result {number}"),), tool_call_id=f"call_{number}")


HI, SO, YES = said("user", "hi"), said("user", "so?"), said("assistant", "yes")
CHATS = {
    "a question after a result": (
        (HI, called(1), result(1), SO),
        'user:hi\nassistant:{"a": 1}\ntool:result 1\nassistant:\nuser:so?\n',
    ),
    "and the chat goes on": (
        (HI, called(1), result(1), SO, called(2), result(2), YES, SO),
        'user:hi\nassistant:{"a": 1}\ntool:result 1\nassistant:\nuser:so?\n'
        'assistant:{"a": 2}\ntool:result 2\nassistant:yes\nuser:so?\n',
    ),
    "a picture after a result": (
        (HI, called(1), result(1), ChatMessage("user", (TextPart("see"), MediaPart("image", "data:,")))),
        'user:hi\nassistant:{"a": 1}\ntool:result 1\nassistant:\nuser:see[image]\n',
    ),
    "an answer first": ((YES, SO), "user:\nassistant:yes\nuser:so?\n"),
    "nothing but an answer": ((YES,), "user:\nassistant:yes\n"),
    "two questions": ((HI, SO, YES, YES, SO), "user:hi\n\nso?\nassistant:yes\n\nyes\nuser:so?\n"),
}


@pytest.mark.parametrize("head", [UNCOUNTED, COUNTED])
@pytest.mark.parametrize("chat", CHATS)
def test_an_empty_turn_stands_where_one_is_missing(chat: str, head: str) -> None:
    messages, expected = CHATS[chat]
    assert template(head + SHOWN).render(ChatRequest("r", messages)).text == expected


def test_a_question_after_a_call_without_a_result_needs_a_turn_only_where_calls_are_none() -> None:
    request = ChatRequest("r", (HI, called(1), SO))
    uncounted, counted = (template(head + SHOWN).render(request).text for head in (UNCOUNTED, COUNTED))
    assert uncounted == 'user:hi\nassistant:{"a": 1}\nassistant:\nuser:so?\n'
    assert counted == 'user:hi\nassistant:{"a": 1}\nuser:so?\n'


def test_a_system_note_after_a_result_is_a_question_too() -> None:
    only_first = "{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}"
    chat = (said("system", "one"), HI, called(1), result(1), said("system", "two"))
    assert template(UNCOUNTED + only_first + SHOWN).render(ChatRequest("r", chat)).text == (
        'system:one\nuser:hi\nassistant:{"a": 1}\ntool:result 1\nassistant:\nuser:<system-note>\ntwo\n</system-note>\n'
    )


@pytest.mark.parametrize(("check", "blank"), [(NO_EMPTY_ANSWER, " "), (NO_BLANK_ANSWER, "...")])
def test_an_answer_of_nothing_is_a_blank_where_it_must_not_be_empty(check: str, blank: str) -> None:
    for head in (UNCOUNTED, "{% for m in messages %}"):
        asked = template(head + check + SHOWN)
        for nothing in (said("assistant"), said("assistant", reasoning="Hm")):
            text = asked.render(ChatRequest("r", (HI, nothing, SO))).text
            assert text == f"user:hi\nassistant:{blank}\nuser:so?\n"
    after_result = template(UNCOUNTED + check + SHOWN).render(ChatRequest("r", (HI, called(1), result(1), SO))).text
    assert after_result.endswith(f"tool:result 1\nassistant:{blank}\nuser:so?\n")


def test_thinking_that_is_not_shown_is_not_continued_as_an_answer() -> None:
    asked = template("{% for m in messages %}" + NO_EMPTY_ANSWER + SHOWN)
    request = ChatRequest("r", (HI, said("assistant", reasoning="Hm")), continue_final_message=True)
    with pytest.raises(InvalidRequest, match="empty"):
        asked.render(request)


def messages_of(kinds: list[str]) -> Iterator[ChatMessage]:
    for number, kind in enumerate(kinds):
        if kind == "called":
            yield from (called(number), result(number))
        elif kind == "cut off":
            yield called(number)
        else:
            yield said("user" if kind == "asked" else "assistant", f"{kind} {number}")


STRICT = [template(head + SHOWN) for head in (UNCOUNTED, UNCOUNTED + NO_EMPTY_ANSWER)]


@given(st.lists(st.sampled_from(["asked", "answered", "called", "cut off"]), min_size=1, max_size=8))
@settings(max_examples=200)
def test_no_order_of_turns_is_refused_and_a_longer_chat_begins_like_the_shorter_one(kinds: list[str]) -> None:
    for strict in STRICT:
        before = ""
        for end in range(1, len(kinds) + 1):
            messages = tuple(messages_of(kinds[:end]))
            text = strict.render(ChatRequest("r", messages)).text
            assert text.startswith(before)
            for number, kind in enumerate(kinds[:end]):
                assert text.count(f"{kind} {number}" if kind in ("asked", "answered") else f'"a": {number}') == 1
            following = next(messages_of(kinds[end : end + 1]), None)
            # Two turns of one role become one.
            before = "" if following is None or following.role == messages[-1].role else text


def test_what_comes_before_a_call_s_result_is_known_once_the_call_is_made() -> None:
    asked = template(UNCOUNTED + SHOWN.replace("{{ '' }}", "<|im_end|>"))
    chat = ChatRequest("r", (HI, YES, SO))
    answered = asked.render_answered(chat, called(1))
    following = asked.render(ChatRequest("r", (*chat.messages, called(1), result(1))))
    assert answered.token_ids == following.token_ids[: len(answered.token_ids)]
    assert chat_tokenizer("chatml").decode(answered.token_ids, keep_special=frozenset({"<|im_end|>"})) == (
        'user:hi<|im_end|>\nassistant:yes<|im_end|>\nuser:so?<|im_end|>\nassistant:{"a": 1}<|im_end|>'
    )
