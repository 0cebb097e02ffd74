"""The measure of a next turn's host time, as a whole run at a small size."""

from __future__ import annotations

import sys

import pytest

from training import warm_turns


def test_a_small_run_measures_every_part(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", "warm_turns --characters 4000 --message 500 --turns 3 --beside 2".split())
    interval = sys.getswitchinterval()
    try:
        warm_turns.main()
    finally:
        sys.setswitchinterval(interval)
    lines = capsys.readouterr().out.splitlines()
    for number, kind in enumerate(warm_turns.CONVERSATIONS):
        heading, _, *parts = lines[6 * number : 6 * number + 6]
        assert heading.startswith(f"{kind}: ")
        assert [line.split()[0] for line in parts] == ["parse", "request", "prompt", "match"]
        assert all(float(number) >= 0 for line in parts for number in line.split()[1:])
    assert lines[-1].startswith("steps of a thread beside 2 turns: ")


def test_an_agents_conversation_is_the_same_in_both_dialects() -> None:
    chat, messages = (
        each(8000, 500).request for each in (warm_turns.AgentConversation, warm_turns.MessagesConversation)
    )
    assert len(chat.messages) > 10
    assert messages.tools == chat.tools
    for ours, theirs in zip(messages.messages, chat.messages, strict=False):
        assert (ours.role, ours.content, ours.tool_call_id) == (theirs.role, theirs.content, theirs.tool_call_id)


def test_a_conversation_ends_with_a_question_and_grows_by_two_messages() -> None:
    conversation = warm_turns.Conversation(3000, 500)
    first = conversation.request.messages
    conversation.go_on()
    assert [message.role for message in conversation.request.messages[-3:]] == ["user", "assistant", "user"]
    assert conversation.request.messages[:-2] == first
