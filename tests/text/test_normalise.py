"""Conversations in the form that a template takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headrace.errors import InvalidRequest, UnsupportedField
from headrace.text.normalise import (
    media_parts,
    normalise,
    template_message,
    template_tool,
)
from headrace.text.template_probe import TemplateTraits
from headrace.text.tool_turns import content_text
from headrace.types.chat import ChatMessage, MediaPart, Role, TextPart, ToolCall, ToolDefinition

ANYWHERE = TemplateTraits()
TOP_ONLY = TemplateTraits(single_system=True)
NOWHERE = TemplateTraits(takes_system=False, single_system=True, alternates_roles=True)
TURNS = TemplateTraits(single_system=True, alternates_roles=True)


def said(role: Role, *texts: str, **fields: Any) -> ChatMessage:
    return ChatMessage(role=role, content=tuple(map(TextPart, texts)), **fields)


def pairs(messages: tuple[ChatMessage, ...]) -> list[tuple[str, str]]:
    return [(message.role, content_text(message)) for message in messages]


CHAT = (
    said("system", "one"),
    said("system", "two"),
    said("user", "hi"),
    said("assistant", "hello"),
    said("system", "late"),
    said("user", "go on"),
)


def test_a_template_that_takes_system_messages_anywhere_gets_them_as_they_are() -> None:
    assert normalise(CHAT, ANYWHERE, "stable") == CHAT


def test_leading_system_messages_are_merged_and_a_later_one_stays_as_a_note() -> None:
    assert pairs(normalise(CHAT, TOP_ONLY, "stable")) == [
        ("system", "one\n\ntwo"),
        ("user", "hi"),
        ("assistant", "hello"),
        ("user", "<system-note>\nlate\n</system-note>"),
        ("user", "go on"),
    ]


def test_hoisting_moves_a_later_one_to_the_top() -> None:
    assert pairs(normalise(CHAT, TOP_ONLY, "hoist")) == [
        ("system", "one\n\ntwo\n\nlate"),
        ("user", "hi"),
        ("assistant", "hello"),
        ("user", "go on"),
    ]


def test_turns_are_merged_where_they_must_alternate() -> None:
    assert pairs(normalise(CHAT, TURNS, "stable")) == [
        ("system", "one\n\ntwo"),
        ("user", "hi"),
        ("assistant", "hello"),
        ("user", "<system-note>\nlate\n</system-note>\n\ngo on"),
    ]


def test_a_template_without_system_messages_gets_a_note_in_the_first_turn() -> None:
    assert pairs(normalise(CHAT[:3], NOWHERE, "stable")) == [
        ("user", "<system-note>\none\n\ntwo\n</system-note>\n\nhi"),
    ]


def test_a_merged_answer_keeps_its_thoughts_and_calls() -> None:
    call, other = ToolCall("1", "f", "{}"), ToolCall("2", "g", "{}")
    merged = normalise(
        (
            said("user", "hi"),
            said("assistant", "a", reasoning="why", tool_calls=(call,)),
            said("assistant", tool_calls=(other,)),
        ),
        TURNS,
        "stable",
    )
    assert merged[1] == said("assistant", "a", reasoning="why", tool_calls=(call, other))


def test_tool_results_are_never_merged() -> None:
    results = (said("tool", "1", tool_call_id="a"), said("tool", "2", tool_call_id="b"))
    assert normalise((said("user", "hi"), *results), TURNS, "stable")[1:] == results


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (("x-anthropic-billing-header: cc=1; a\nYou are helpful.",), "You are helpful."),
        (("x-anthropic-billing-header: cc=1; a", "You are helpful.\nVery."), "You are helpful.\nVery."),
        (("You are helpful.\nx-anthropic-billing-header: no",), "You are helpful.\nx-anthropic-billing-header: no"),
        ((" x-anthropic-billing-header: indented",), " x-anthropic-billing-header: indented"),
        (("x-anthropic-billing-header: a\nx-anthropic-billing-header: b",), "x-anthropic-billing-header: b"),
    ],
)
def test_the_billing_line_is_dropped_at_the_head_and_nothing_else(texts: tuple[str, ...], expected: str) -> None:
    normal = normalise((said("system", *texts), said("user", "hi")), ANYWHERE, "stable")
    assert pairs(normal)[0] == ("system", expected)


def test_a_system_message_of_only_the_billing_line_is_gone() -> None:
    normal = normalise((said("system", "x-anthropic-billing-header: a"), said("user", "hi")), ANYWHERE, "stable")
    assert pairs(normal) == [("user", "hi")]


def test_the_billing_line_of_a_user_is_text() -> None:
    text = "x-anthropic-billing-header: a"
    assert pairs(normalise((said("user", text),), ANYWHERE, "stable")) == [("user", text)]


def test_an_empty_conversation_is_refused() -> None:
    for messages in ((), (said("system", "x-anthropic-billing-header: a"),)):
        with pytest.raises(InvalidRequest) as refused:
            normalise(messages, ANYWHERE, "stable")
        assert refused.value.param == "messages"


PICTURE = MediaPart("image", "data:,", param="messages[0].content[1]")


def test_media_keep_their_places_among_the_text() -> None:
    parts = (TextPart("look"), PICTURE, TextPart(""), MediaPart("video", "x"), TextPart("there"))
    (normal,) = normalise((ChatMessage("user", parts),), ANYWHERE, "stable")
    assert template_message(normal, ANYWHERE)["content"] == [
        {"type": "text", "text": "look"},
        {"type": "image"},
        {"type": "video"},
        {"type": "text", "text": "there"},
    ]
    assert media_parts((normal, said("user", "x"))) == (replace(PICTURE, source=""), MediaPart("video", ""))


def test_media_stay_when_turns_are_merged() -> None:
    chat = (said("user", "a"), ChatMessage("user", (PICTURE,)), said("user", "b"))
    (merged,) = normalise(chat, TemplateTraits(alternates_roles=True), "stable")
    assert merged.content == (
        TextPart("a"),
        TextPart("\n\n"),
        replace(PICTURE, source=""),
        TextPart("\n\n"),
        TextPart("b"),
    )


@pytest.mark.parametrize("role", ["system", "assistant"])
def test_media_that_are_not_a_user_s_are_refused_by_name(role: Any) -> None:
    with pytest.raises(UnsupportedField, match="only messages of a user or a tool") as refused:
        normalise((ChatMessage(role, (TextPart("look"), PICTURE)),), ANYWHERE, "stable")
    assert refused.value.param == PICTURE.param


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": 1, "b": {"c": "x"}}', {"a": 1, "b": {"c": "x"}}),
        ("{}", {}),
        ("", {}),
        ('{"a": ', '{"a": '),
        ("[1]", "[1]"),
        ('"text"', '"text"'),
    ],
)
def test_arguments_become_a_mapping_where_they_are_one(arguments: str, expected: Any) -> None:
    message = said("assistant", tool_calls=(ToolCall("id1", "f", arguments),))
    assert template_message(message, ANYWHERE) == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "id1", "type": "function", "function": {"name": "f", "arguments": expected}}],
    }


def test_a_message_has_the_shape_of_the_chat_api() -> None:
    assert template_message(said("tool", "42", tool_call_id="id1", name="f"), ANYWHERE) == {
        "role": "tool",
        "content": "42",
        "tool_call_id": "id1",
        "name": "f",
    }
    assert template_message(said("assistant", "a", "b", reasoning="why"), ANYWHERE) == {
        "role": "assistant",
        "content": "a\nb",
        "reasoning_content": "why",
        "thinking": "why",
    }


def test_a_tool_has_the_shape_of_the_chat_api() -> None:
    parameters = {"type": "object"}
    assert template_tool(ToolDefinition("f", "does", parameters)) == {
        "type": "function",
        "function": {"name": "f", "description": "does", "parameters": parameters},
    }
    assert "description" not in template_tool(ToolDefinition("f", None, parameters))["function"]
