"""`headrace chat [MODEL]`: a conversation in the terminal, with a model of this process or of a server."""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from headrace.cli.chat_files import dragged_files, read_media
from headrace.cli.chat_remote import RemoteChat
from headrace.cli.chat_state import ChatCommands, ChatState
from headrace.cli.chat_terminal import (
    Display,
    PlainDisplay,
    TerminalDisplay,
    piped_input,
    terminal_input,
    unquoted,
    without_echo,
)
from headrace.cli.configured import configured_text_pipeline, no_chat_model, server_defaults, without_missing_vision
from headrace.cli.progress import PromptProgress, loading_text, preparing_text
from headrace.cli.progress_line import Waiting
from headrace.config import DEFAULT_MODEL, Config
from headrace.config_loading import warn_of_unknown_variables
from headrace.engine.engine import Engine, this_process
from headrace.errors import ConfigError, HeadraceError
from headrace.models.purpose import purpose_by_name
from headrace.session.session import Session
from headrace.types.chat import ChatMessage, ChatRequest, TextPart
from headrace.types.events import Event, Finished, Reasoning, Text
from headrace.types.status import RequestStatus

_PROMPT = ">>> "
_HISTORY = "chat-history"
_POLL_S = 0.25


class ChatSource(Protocol):
    """What answers: a session, or a server."""

    def chat(self, request: ChatRequest, settings: Mapping[str, Any]) -> AsyncGenerator[Event, None]:
        """Events of the answer. settings: those of ChatState. Raises HeadraceError."""

    async def requests(self) -> Sequence[RequestStatus]:
        """The requests in progress; empty if unknown."""


class LocalChat:
    """A model of this process."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def chat(self, request: ChatRequest, settings: Mapping[str, Any]) -> AsyncGenerator[Event, None]:
        defaults, given = self._session.traits.defaults, dict(settings)
        max_tokens = given.pop("max_tokens", defaults.max_tokens)
        options = replace(defaults, max_tokens=max_tokens, sampling=defaults.sampling.merged(given))
        return self._session.chat(replace(request, options=options))

    async def requests(self) -> Sequence[RequestStatus]:
        return (await self._session.status()).requests


def run(config: Config) -> None:
    """Talks until /bye or the end of input. Raises ConfigError and ModelError."""
    warn_of_unknown_variables()
    if config.chat.url is not None:
        name = None if config.model == DEFAULT_MODEL else config.model
        # One loop for all turns: connections belong to the loop that made them.
        with asyncio.Runner() as runner:
            remote = RemoteChat(config.chat.url, name, config.chat.url_key)
            print(f"{runner.run(remote.prepare())} at {config.chat.url}; /help lists the commands")
            try:
                _talk(config, remote, runner, remote.models)
            finally:
                runner.run(remote.aclose())
        return
    with Waiting(preparing_text(config)):
        config = without_missing_vision(config)
        text = configured_text_pipeline(config)
        if text is None:
            raise no_chat_model(config)
        expected_bytes = this_process().weights_bytes(config)
    with Waiting(loading_text(config, this_process(), expected_bytes)):
        engine = Engine.launch(config, text.constraints)
    try:
        # Without preparing turns: while this waits for a line to be typed, its event loop stands still.
        session = Session.for_engine(engine, text, defaults=server_defaults(config.defaults))
        if not session.takes_chats:
            raise ConfigError(f"{engine.model.name} has no chat template: it is a base model, for completions only")
        if (purpose := purpose_by_name(engine.model.name)) is not None:
            print(f"by its name this is {purpose}: its answers may be useless")
        print(f"{engine.model.name}; /help lists the commands")
        with asyncio.Runner() as runner:
            _talk(config, LocalChat(session), runner)
    finally:
        engine.stop()


def _talk(config: Config, source: ChatSource, runner: asyncio.Runner, models: Sequence[str] = ()) -> None:
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if is_terminal:
        ask = terminal_input(Path(config.models.model_folder).expanduser() / _HISTORY)
        converse(Conversation(source, TerminalDisplay(), models=models), runner, ask)
    else:
        converse(Conversation(source, PlainDisplay(sys.stdout), models=models), runner, piped_input)


class Conversation:
    """The turns so far, and how the next one is asked and shown."""

    def __init__(
        self,
        source: ChatSource,
        display: Display,
        clock: Callable[[], float] = time.monotonic,
        models: Sequence[str] = (),
    ) -> None:
        self.state = ChatState(models=models)
        self._source = source
        self._display = display
        self._clock = clock

    def note(self, text: str) -> None:
        self._display.note(text)

    def command(self, line: str) -> bool:
        """Runs a line that begins with a slash; whether the conversation goes on."""
        return ChatCommands(self.state, self._display.note).run(line)

    def question(self, line: str) -> str:
        """The text to ask: the line without the files that were dragged into it, which go with it, or the last question
        for `/retry`; empty for none yet."""
        try:
            if line == "/retry":
                return self.state.take_back()
            files, text = dragged_files(line)
            for kind, path in files:
                self.state.pending.append(read_media(path, kind))
                self._display.note(f"{path} goes with {'this' if text else 'the next'} question")
        except ConfigError as error:
            self._display.note(str(error))
            return ""
        return unquoted(text)

    async def say(self, text: str) -> None:
        """One turn: streams the answer, then says how fast it came.

        An answer that is cut off by cancellation stays in the history as far as it came. A turn that fails or that is
        cut off before it says anything leaves no trace: an empty answer would confuse the model, and what one turn
        was refused for, such as a picture, would be refused again.
        """
        request = self.state.request(f"chat-{secrets.token_hex(8)}", text)
        turn = _Turn(self._clock)
        watch = asyncio.create_task(self._watch(turn)) if self._display.shows_progress else None
        try:
            async with aclosing(self._source.chat(request, self.state.settings)) as events:
                async for event in events:
                    turn.take(event)
                    self._show(event)
        except asyncio.CancelledError:
            self._display.end()
            self._display.note("[stopped]")
            if turn.message().content:
                self.state.keep(request, turn.message())
            raise
        except HeadraceError as error:
            self._display.end()
            self._display.note(f"headrace: {error.message}")
            if self.state.pending:
                self.state.pending.clear()
                self._display.note("[pictures and videos are dropped; /retry asks again with them]")
            return
        finally:
            if watch is not None:
                watch.cancel()
        self.state.keep(request, turn.message())
        self._display.end()
        self._display.note(turn.speed())

    async def _watch(self, turn: _Turn) -> None:
        progress = PromptProgress()
        with suppress(HeadraceError):
            while True:
                text = progress.text(await self._source.requests(), time.monotonic())
                if turn.has_begun:
                    self._display.refresh()
                else:
                    self._display.wait(text)
                await asyncio.sleep(_POLL_S)

    def _show(self, event: Event) -> None:
        match event:
            case Reasoning(text):
                self._display.reasoning(text)
            case Text(text):
                self._display.text(text)


class _Turn:
    """What one answer said, and when."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._started = clock()
        self._first: float | None = None
        self._finished: Finished | None = None
        self._content: list[str] = []
        self._reasoning: list[str] = []

    def take(self, event: Event) -> None:
        if isinstance(event, Finished):
            self._finished = event
        if isinstance(event, Text | Reasoning):
            self._first = self._clock() if self._first is None else self._first
        if isinstance(event, Text):
            self._content.append(event.text)
        if isinstance(event, Reasoning):
            self._reasoning.append(event.text)

    @property
    def has_begun(self) -> bool:
        return self._first is not None

    def message(self) -> ChatMessage:
        """The answer as the history keeps it."""
        content = (TextPart("".join(self._content)),) if self._content else ()
        return ChatMessage("assistant", content, reasoning="".join(self._reasoning) or None)

    def speed(self) -> str:
        """Tokens, time to the first, tokens per second after it, reused prompt tokens, and the reason of a cut."""
        if self._finished is None or self._first is None:
            return "[no text]"
        usage = self._finished.usage
        seconds = self._clock() - self._first
        line = f"{usage.num_output_tokens} tokens, first after {self._first - self._started:.2f} s"
        if usage.num_output_tokens > 1 and seconds > 0:
            line += f", {(usage.num_output_tokens - 1) / seconds:.1f} tokens/s"
        if usage.num_cached_tokens:
            line += f", {usage.num_cached_tokens} of {usage.num_prompt_tokens} prompt tokens reused"
        return f"[{line}]" if self._finished.reason == "stop" else f"[{line}, cut: {self._finished.reason}]"


def converse(conversation: Conversation, runner: asyncio.Runner, ask: Callable[[str], str]) -> None:
    """Turns until /bye, the end of input, or Ctrl-C twice at the prompt. Otherwise Ctrl-C stops what is in progress."""
    num_interrupts = 0
    while True:
        try:
            line = ask(_PROMPT).strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            num_interrupts += 1
            if num_interrupts == 2:
                return
            conversation.note("[Ctrl-C again ends the chat]")
            continue
        num_interrupts = 0
        try:
            if not _take(conversation, runner, line):
                return
        except KeyboardInterrupt:
            continue


def _take(conversation: Conversation, runner: asyncio.Runner, line: str) -> bool:
    """Runs a command or asks a question; whether the conversation goes on. Raises KeyboardInterrupt."""
    # The path of a dragged file begins with a slash as well.
    is_command = line.startswith("/") and dragged_files(line)[1].startswith("/")
    if is_command and line != "/retry":
        return conversation.command(line)
    if text := conversation.question(line):
        # The runner turns Ctrl-C into a cancellation of the turn, and that into KeyboardInterrupt here.
        with without_echo(sys.stdin):
            runner.run(conversation.say(text))
    return True
