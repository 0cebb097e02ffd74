"""Finished turns are computed for the next one while there are no requests, and only then."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import pytest
from fakes import FakeEngine, PlainTemplate, fake_session, in_options

from headrace.errors import GenerationFailed, Overloaded
from headrace.session import idle
from headrace.session.session import Session
from headrace.text.template import PromptPrefix
from headrace.types.chat import ChatMessage, ChatRequest, CompletionRequest, TextPart
from headrace.types.events import Event, TokenOutput
from headrace.types.request import IDLE_PRIORITY, Boundary, BoundaryKind, GenerationRequest

PATIENCE_S = 20
THOUGHT = "<think>hm</think>yes"


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "PAUSE_S", 0.0)


def said(role: str, text: str, reasoning: str | None = None) -> ChatMessage:
    return ChatMessage(role, (TextPart(text),), reasoning)


def ask(name: str, *messages: ChatMessage, **fields: Any) -> ChatRequest:
    return ChatRequest(name, messages or (said("user", "hi"),), **in_options(fields))


class Engine(FakeEngine):
    """Clients are answered; idle work runs until `release` is set."""

    def __init__(self, *script: Any) -> None:
        super().__init__(*script)
        self.release = asyncio.Event()
        self.idle_began = asyncio.Event()

    @property
    def idle(self) -> list[GenerationRequest]:
        return [request for request in self.requests if request.priority == IDLE_PRIORITY]

    async def play(self, request: GenerationRequest) -> AsyncGenerator[TokenOutput, None]:
        if request.priority == IDLE_PRIORITY:
            self.idle_began.set()
            await self.release.wait()
        async for output in super().play(request):
            yield output


class NextTurn(PlainTemplate):
    """The next prompt shows an answer as its text in brackets, with its thinking if there is some."""

    def render_answered(self, request: ChatRequest, answer: ChatMessage) -> PromptPrefix:
        head = self.render(request).token_ids
        text = "".join(part.text for part in answer.content if isinstance(part, TextPart))
        tail = f"<think>{answer.reasoning}</think>{text}" if answer.reasoning else f"[{text}]"
        token_ids = (*head, *tail.encode())
        return PromptPrefix(token_ids, (Boundary(len(token_ids), BoundaryKind.MESSAGE),))


async def everything(events: AsyncGenerator[Event, None]) -> None:
    async for _ in events:
        pass


def talk(engine: Engine, conversation: Callable[[Session], Awaitable[None]], template: Any = None) -> None:
    session = fake_session(engine, template or NextTurn(), prepares_turns=True)
    asyncio.run(asyncio.wait_for(conversation(session), PATIENCE_S))


async def settled() -> None:
    """Lets whatever can begin at once begin, and threads come back."""
    for _ in range(20):
        await asyncio.to_thread(lambda: None)


def test_an_answer_that_the_next_prompt_shows_otherwise_is_computed_when_nobody_asks() -> None:
    engine = Engine(THOUGHT)

    async def conversation(session: Session) -> None:
        await everything(session.chat(ask("a", cache_salt="mine", session="agent", priority=3)))
        await engine.idle_began.wait()
        engine.release.set()
        await settled()

    talk(engine, conversation)
    (request,) = engine.idle
    assert request.prompt == tuple(b"user: hi\n[yes]")
    assert request.boundaries == (Boundary(len(request.prompt), BoundaryKind.MESSAGE),)
    assert (request.max_tokens, request.num_choices, request.session) == (0, 1, "idle")
    assert request.cache_salt == "mine"
    assert engine.aborted == []


def test_a_client_that_sends_thinking_back_needs_nothing_done() -> None:
    engine = Engine(THOUGHT)

    async def conversation(session: Session) -> None:
        await everything(session.chat(ask("a", said("user", "q"), said("assistant", "b", "x"), said("user", "c"))))
        await settled()

    talk(engine, conversation)
    assert engine.idle == []


def test_an_answer_that_is_shown_as_it_was_written_needs_nothing_done() -> None:
    class AsWritten(NextTurn):
        def render_answered(self, request: ChatRequest, answer: ChatMessage) -> PromptPrefix:
            return PromptPrefix((*self.render(request).token_ids, *b"yes<end>"), ())

    engine = Engine("yes")

    async def conversation(session: Session) -> None:
        await everything(session.chat(ask("a")))
        await settled()

    talk(engine, conversation, AsWritten())
    assert engine.idle == []


def test_any_arrival_ends_the_work_before_it_is_queued_itself() -> None:
    engine = Engine(THOUGHT)
    order: list[str] = []

    async def conversation(session: Session) -> None:
        await everything(session.chat(ask("a")))
        await engine.idle_began.wait()
        engine.on_abort = lambda: order.append("given up")
        engine.on_start = lambda: order.append("arrived")
        await everything(session.complete(CompletionRequest("b", ("x",))))
        await settled()

    talk(engine, conversation)
    assert order == ["given up", "arrived"]
    assert engine.aborted == ["a-next"]


def test_nothing_begins_while_another_answer_is_being_made() -> None:
    hold = asyncio.Event()
    engine = Engine(THOUGHT)

    async def conversation(session: Session) -> None:
        other = session.complete(CompletionRequest("b", ("x",)))
        await anext(other)
        await everything(session.chat(ask("a")))
        await settled()
        assert engine.idle == []
        hold.set()
        await everything(other)
        await engine.idle_began.wait()

    talk(engine, conversation)
    assert [request.request_id for request in engine.idle] == ["a-next"]


def test_only_the_latest_turn_of_a_conversation_waits() -> None:
    engine = Engine(THOUGHT)
    engine.release.set()

    async def conversation(session: Session) -> None:
        blocking = session.complete(CompletionRequest("b", ("x",)))
        await anext(blocking)
        first = (said("user", "hi"),)
        await everything(session.chat(ask("one", *first)))
        await everything(session.chat(ask("other", said("user", "else"))))
        await everything(session.chat(ask("two", *first, said("assistant", "yes"), said("user", "go on"))))
        await everything(blocking)
        await settled()

    talk(engine, conversation)
    assert [request.request_id for request in engine.idle] == ["two-next", "other-next"]


@pytest.mark.parametrize(
    ("script", "fields"),
    [
        ((THOUGHT,), {"num_choices": 2}),
        ((THOUGHT,), {"messages": (said("user", "a"), said("assistant", "b")), "continue_final_message": True}),
        (("<think>no end",), {}),
    ],
)
def test_what_can_not_be_told_to_go_on_is_left_alone(script: tuple[Any, ...], fields: dict[str, Any]) -> None:
    engine = Engine(*script)

    async def conversation(session: Session) -> None:
        await everything(session.chat(ChatRequest("a", **in_options({"messages": (said("user", "q"),), **fields}))))
        await settled()

    talk(engine, conversation)
    assert engine.idle == []


def test_an_answer_that_fails_or_is_left_starts_nothing() -> None:
    engine = Engine("a", GenerationFailed("broken"))

    async def conversation(session: Session) -> None:
        with pytest.raises(GenerationFailed):
            await everything(session.chat(ask("a")))
        left = session.chat(ask("b"))
        await anext(left)
        await left.aclose()
        await settled()

    talk(engine, conversation)
    assert engine.idle == []


def test_a_refusal_is_nobodys_trouble(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(THOUGHT)

    async def conversation(session: Session) -> None:
        await everything(session.chat(ask("a")))
        engine.refusal = Overloaded("the queue is full", retry_after_s=1)
        await settled()
        engine.refusal = None
        await everything(session.chat(ask("b")))

    with caplog.at_level(logging.DEBUG, "headrace.session"):
        talk(engine, conversation)
    told = [record for record in caplog.records if "the queue is full" in record.getMessage()]
    assert [record.levelno for record in told] == [logging.DEBUG]


def test_an_event_loop_that_ends_takes_the_work_with_it_and_the_next_one_starts_afresh() -> None:
    engine = Engine(THOUGHT)
    session = fake_session(engine, NextTurn(), prepares_turns=True)

    async def conversation(name: str) -> None:
        await everything(session.chat(ask(name)))
        await engine.idle_began.wait()

    asyncio.run(conversation("a"))
    assert engine.aborted == ["a-next"]
    engine.idle_began = asyncio.Event()
    asyncio.run(conversation("b"))
    assert engine.aborted == ["a-next", "b-next"]


def test_a_session_that_does_not_prepare_turns_asks_the_engine_for_nothing_else() -> None:
    engine = Engine(THOUGHT)

    async def conversation() -> None:
        await everything(fake_session(engine, NextTurn()).chat(ask("a")))
        await settled()

    asyncio.run(conversation())
    assert [request.request_id for request in engine.requests] == ["a"]
