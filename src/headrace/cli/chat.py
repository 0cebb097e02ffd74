"""`headrace chat [MODEL]`: a conversation in the terminal."""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from collections.abc import Callable
from contextlib import aclosing, suppress
from typing import TextIO

from headrace.cli.defaults import server_defaults
from headrace.cli.text_pipeline import configured_text_pipeline, without_missing_vision
from headrace.config import Config, warn_of_unknown_variables
from headrace.engine.engine import Engine
from headrace.errors import HeadraceError
from headrace.session.session import Session
from headrace.types.chat import ChatMessage, ChatRequest, TextPart
from headrace.types.events import Finished, Reasoning, Text

with suppress(ImportError):
    # Only its import is wanted: it gives input() line editing and a history. Not every Python is built with it.
    import readline  # noqa: F401

_DIM = "\x1b[2m"
_PLAIN = "\x1b[0m"
_PROMPT = "> "

# A model may output control characters that move a terminal's cursor or change its title.
_CONTROL_CHARACTERS = {code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def run(config: Config) -> None:
    """Loads the model and talks until /exit or the end of input. Raises ConfigError and ModelError."""
    warn_of_unknown_variables()
    config = without_missing_vision(config)
    text = configured_text_pipeline(config)
    engine = Engine.launch(config, text.constraints)
    try:
        # Without preparing turns: while this waits for input, its event loop stands still.
        session = Session.over(engine, text, defaults=server_defaults(config.defaults))
        for line in (*engine.model.report, *session.notes):
            print(line)
        print("/reset starts over, /exit ends, Ctrl-C stops an answer")
        # One loop for all turns: the engine's answers come back to the loop that asked.
        with asyncio.Runner() as runner:
            converse(Conversation(session, sys.stdout), runner, input)
    finally:
        engine.stop()


class Conversation:
    """The turns so far, and how to print the next one."""

    def __init__(self, session: Session, out: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._session = session
        self._out = out
        self._clock = clock
        self._messages: list[ChatMessage] = []
        self._colored = out.isatty()
        self._ends_thinking = False

    def reset(self) -> None:
        self._messages.clear()

    async def say(self, text: str) -> None:
        """Run one turn: stream the answer, then print its speed.

        An interrupted answer stays in the history as far as it came. A turn that fails or is interrupted before any
        text leaves no trace: an empty answer would confuse the model, and a refused turn would be refused again.
        """
        messages = (*self._messages, ChatMessage("user", (TextPart(text),)))
        turn = _Turn(self._clock)
        self._ends_thinking = False
        try:
            events = self._session.chat(ChatRequest(f"chat-{secrets.token_hex(8)}", messages))
            async with aclosing(events):
                async for event in events:
                    turn.take(event)
                    self._show(event)
        except asyncio.CancelledError:
            self._write("\n[stopped]\n")
            if turn.message().content:
                self._messages = [*messages, turn.message()]
            raise
        except HeadraceError as error:
            self._write(f"\nheadrace: {error.message}\n")
            return
        self._messages = [*messages, turn.message()]
        self._write(f"\n{self._dimmed(turn.speed())}\n")

    def _show(self, event: object) -> None:
        match event:
            case Reasoning(text):
                self._write(self._dimmed(text.translate(_CONTROL_CHARACTERS)))
                self._ends_thinking = True
            case Text(text):
                self._write(("\n" if self._ends_thinking else "") + text.translate(_CONTROL_CHARACTERS))
                self._ends_thinking = False

    def _dimmed(self, text: str) -> str:
        return f"{_DIM}{text}{_PLAIN}" if self._colored else text

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


class _Turn:
    """The text and times of one answer."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._started = clock()
        self._first: float | None = None
        self._finished: Finished | None = None
        self._content: list[str] = []
        self._reasoning: list[str] = []

    def take(self, event: object) -> None:
        if isinstance(event, Finished):
            self._finished = event
        if isinstance(event, Text | Reasoning):
            self._first = self._clock() if self._first is None else self._first
        if isinstance(event, Text):
            self._content.append(event.text)
        if isinstance(event, Reasoning):
            self._reasoning.append(event.text)

    def message(self) -> ChatMessage:
        """The answer for the history."""
        content = (TextPart("".join(self._content)),) if self._content else ()
        return ChatMessage("assistant", content, reasoning="".join(self._reasoning) or None)

    def speed(self) -> str:
        """Number of tokens, time to the first, tokens per second after it, and the reason if the answer was cut."""
        if self._finished is None or self._first is None:
            return "[no text]"
        num_tokens = self._finished.usage.num_output_tokens
        seconds = self._clock() - self._first
        line = f"{num_tokens} tokens, first after {self._first - self._started:.2f} s"
        if num_tokens > 1 and seconds > 0:
            line += f", {(num_tokens - 1) / seconds:.1f} tokens/s"
        return f"[{line}]" if self._finished.reason == "stop" else f"[{line}, cut: {self._finished.reason}]"


def converse(conversation: Conversation, runner: asyncio.Runner, ask: Callable[[str], str]) -> None:
    """Run turns until /exit or the end of input. Ctrl-C stops an answer, or clears the line at the prompt."""
    while True:
        try:
            entered = ask(_PROMPT).strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            print()
            continue
        if entered == "/exit":
            return
        if entered == "/reset":
            conversation.reset()
        elif entered:
            try:
                # The runner turns Ctrl-C into a cancellation of the turn, and that into KeyboardInterrupt here.
                runner.run(conversation.say(entered))
            except KeyboardInterrupt:
                continue
