"""`headrace chat`: turns, interruptions and what is shown."""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import signal
from collections.abc import AsyncGenerator, Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import END, FakeEngine, PlainTemplate, fake_session

from headrace.cli import chat
from headrace.cli.chat import Conversation, LocalChat, converse
from headrace.cli.chat_terminal import PlainDisplay, piped_input
from headrace.config import Config
from headrace.errors import InvalidRequest
from headrace.types.chat import ChatMessage, ChatRequest, MediaPart, TextPart
from headrace.types.events import Event, Finished, FinishReason, Text, Usage


class Interrupted(FakeEngine):
    """Its first answer is interrupted by Ctrl-C when the script is through."""

    async def play(self, request):
        async for output in super().play(request):
            if len(self.requests) == 1 and not output.token_ids:
                signal.raise_signal(signal.SIGINT)
                await asyncio.Event().wait()
            yield output


def person(*lines: str | BaseException) -> Callable[[str], str]:
    """A user who types these lines, or presses these keys, and then ends the input."""
    typed = iter(lines)

    def ask(prompt: str) -> str:
        line = next(typed, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    return ask


def talk(engine: FakeEngine, *lines: str | BaseException, template: PlainTemplate | None = None) -> str:
    out = io.StringIO()
    clock = itertools.count(0.0, 0.5).__next__
    # a shell that starts this in the background has Ctrl-C ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with asyncio.Runner() as runner:
        source = LocalChat(fake_session(engine, template))
        converse(Conversation(source, PlainDisplay(out), clock), runner, person(*lines))
    return out.getvalue()


def prompts(engine: FakeEngine) -> list[str]:
    return [bytes(request.prompt).decode() for request in engine.requests]


def test_an_answer_is_followed_by_its_speed() -> None:
    shown = talk(FakeEngine("abc", "de", (END,)), "hello")
    # The clock ticks half a second a look: start, first text, end. Five letters and the end token are six tokens, as in
    # `usage`; five of them came in the half second after the first.
    assert shown == "abcde\n[6 tokens, first after 0.50 s, 10.0 tokens/s]\n"


def test_each_turn_sees_the_turns_before_it_until_a_reset() -> None:
    engine = FakeEngine("A")
    talk(engine, "one", "two", "/reset", "three")
    assert prompts(engine) == ["user: one\n", "user: one\nassistant: A\nuser: two\n", "user: three\n"]


@pytest.mark.parametrize("end", ["/bye", "/exit"])
def test_bye_ends_and_empty_lines_ask_nothing(end: str) -> None:
    engine = FakeEngine("A")
    talk(engine, "", "  ", end, "never said")
    assert engine.requests == []


def test_thinking_is_a_line_of_its_own() -> None:
    assert talk(FakeEngine("<think>hm</think>", "yes"), "q").startswith("hm\nyes\n[")


def test_an_answer_cannot_steer_the_terminal() -> None:
    shown = talk(FakeEngine("a\x1b]0;title\x07b\n\tc"), "q")
    assert shown.startswith("a\ufffd]0;title\ufffdb\n\tc\n")


def test_thinking_goes_into_the_history_beside_the_answer() -> None:
    template = PlainTemplate()
    talk(FakeEngine("<think>hm</think>yes"), "q", "r", template=template)
    assert template.requests[1].messages[1] == ChatMessage("assistant", (TextPart("yes"),), reasoning="hm")


def test_ctrl_c_stops_the_answer_keeps_what_was_said_and_the_program_goes_on() -> None:
    engine = Interrupted("so far")
    shown = talk(engine, "one", "two")
    assert shown.startswith("so far\n[stopped]\nso far\n[")
    assert prompts(engine) == ["user: one\n", "user: one\nassistant: so far\nuser: two\n"]


def test_a_turn_that_was_stopped_before_it_said_anything_is_forgotten() -> None:
    engine = Interrupted()
    talk(engine, "one", "two")
    assert prompts(engine) == ["user: one\n", "user: two\n"]


def test_ctrl_c_at_an_empty_prompt_says_that_another_one_ends_the_chat() -> None:
    engine = FakeEngine("A")
    shown = talk(engine, KeyboardInterrupt(), "one", KeyboardInterrupt(), KeyboardInterrupt(), "never said")
    assert shown.count("[Ctrl-C again ends the chat]") == 2
    assert prompts(engine) == ["user: one\n"]


def test_a_question_is_asked_again_without_its_first_answer() -> None:
    engine = FakeEngine("A")
    shown = talk(engine, "/retry", "one", "two", "/retry", "three")
    assert shown.startswith("there is no question to ask again\n")
    one, again = "user: one\n", "user: one\nassistant: A\nuser: two\n"
    assert prompts(engine) == [one, again, again, f"{again}assistant: A\nuser: three\n"]


def test_a_stopped_question_is_asked_again() -> None:
    engine = Interrupted()
    talk(engine, "one", "/retry")
    assert prompts(engine) == ["user: one\n"] * 2


def test_a_dragged_picture_goes_with_its_question_and_again_with_a_retry(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"pixels")
    expected = MediaPart("image", f"data:image/png;base64,{base64.b64encode(b'pixels').decode()}")
    source, out = Answers(), io.StringIO()
    with asyncio.Runner() as runner:
        lines = f"{tmp_path}/a.png", "what is it?", "/retry", "sure?"
        converse(Conversation(source, PlainDisplay(out)), runner, person(*lines))
    first, again, last = ([each.content for each in messages if each.role == "user"] for messages in source.asked)
    assert first == again == [(expected, TextPart("what is it?"))]
    assert last == [*first, (TextPart("sure?"),)]
    assert f"{tmp_path}/a.png goes with the next question" in out.getvalue()


def test_a_picture_that_was_refused_does_not_go_with_later_questions(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"pixels")
    out = io.StringIO()
    conversation = Conversation(LocalChat(fake_session(FakeEngine())), PlainDisplay(out))  # a model without vision
    with asyncio.Runner() as runner:
        converse(conversation, runner, person(f"/image {tmp_path}/a.png", "what is it?"))
        assert conversation.state.pending == []
        assert "[pictures and videos are dropped; /retry asks again with them]" in out.getvalue()
        assert conversation.question("/retry") == "what is it?"
    assert len(conversation.state.pending) == 1


class Answers:
    """A source that answers anything. asked: the messages of each request."""

    def __init__(self) -> None:
        self.asked: list[tuple[ChatMessage, ...]] = []

    async def chat(self, request: ChatRequest, settings: Mapping[str, Any]) -> AsyncGenerator[Event, None]:
        self.asked.append(request.messages)
        yield Text("A")
        yield Finished(FinishReason.STOP, Usage(1, 1))

    async def requests(self) -> tuple[()]:
        return ()


@pytest.mark.parametrize(
    ("typed", "text"),
    [
        (("plain", "next"), "plain"),
        (("one\\", "two\\", "three", "next"), "one\ntwo\nthree"),
        (('"""one', "", 'two"""', "next"), '"""one\n\ntwo"""'),
    ],
)
def test_several_lines_of_a_pipe_are_one_question(
    typed: tuple[str, ...], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", person(*typed))
    assert piped_input(">>> ") == text
    assert piped_input(">>> ") == "next"


def test_a_turn_that_fails_says_why_and_leaves_no_trace() -> None:
    engine = FakeEngine("A")
    failing = PlainTemplate(error=InvalidRequest("no such role"))
    out = io.StringIO()
    conversation = Conversation(LocalChat(fake_session(engine, failing)), PlainDisplay(out))
    with asyncio.Runner() as runner:
        converse(conversation, runner, person("one", "two"))
    assert out.getvalue() == "\nheadrace: no such role\n" * 2
    assert [len(request.messages) for request in failing.requests] == [1, 1]


def test_an_answer_that_was_cut_says_so() -> None:
    engine = FakeEngine("x" * 2000)
    assert "cut: length]" in talk(engine, "go")


def test_the_command_loads_the_model_talks_and_stops_the_engine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine("hello there")
    monkeypatch.setattr(chat.Engine, "launch", lambda *_: engine)
    monkeypatch.setattr(chat, "configured_text_pipeline", lambda config: SimpleNamespace(constraints=None))
    monkeypatch.setattr(chat.Session, "for_engine", lambda engine, words, **_: fake_session(engine))
    monkeypatch.setattr("builtins.input", person("hi"))
    chat.run(Config())
    assert "hello there" in capsys.readouterr().out
    assert engine.stopped
