"""The terminal side of a chat: lines typed in, and answers shown as plain text or as Markdown that grows."""

from __future__ import annotations

import re
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.spinner import Spinner
from rich.text import Text

from headrace.cli.chat_state import NAMES

# Text of models and clients may contain what moves a terminal's cursor or changes its title.
CONTROL_CHARACTERS = {code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}

_LOCAL_MODES = 3
"""Their place among a terminal's attributes."""

_REDRAW_S = 0.1
"""Redrawing at each token would take more time than fast models need for one."""

_FENCE = re.compile(r" {0,3}(```|~~~)")


class Display(Protocol):
    """shows_progress: `wait` and `refresh` show something."""

    shows_progress: bool

    def wait(self, text: str) -> None:
        """Nothing has come yet; what is known about when it will."""

    def refresh(self) -> None:
        """Show what has come; called a few times a second."""

    def reasoning(self, text: str) -> None: ...

    def text(self, text: str) -> None: ...

    def end(self) -> None: ...

    def note(self, text: str) -> None:
        """A line of ours."""


class PlainDisplay:
    """Text as it comes, for pipes and files."""

    shows_progress = False

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._ends_thinking = False

    def wait(self, text: str) -> None:
        pass

    def refresh(self) -> None:
        pass

    def reasoning(self, text: str) -> None:
        self._write(text.translate(CONTROL_CHARACTERS))
        self._ends_thinking = True

    def text(self, text: str) -> None:
        self._write(("\n" if self._ends_thinking else "") + text.translate(CONTROL_CHARACTERS))
        self._ends_thinking = False

    def end(self) -> None:
        self._write("\n")
        self._ends_thinking = False

    def note(self, text: str) -> None:
        self._write(f"{text}\n")

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


class TerminalDisplay:
    """Thinking dimmed, text as Markdown, wrapped at words. What can still change is redrawn, the rest stays.

    All drawing is done by the caller's thread: rich's own thread, which redraws at intervals, may draw while something
    is printed above, and then text stays on the screen twice.
    """

    shows_progress = True

    def __init__(self, console: Console | None = None) -> None:
        self._console = Console(highlight=False) if console is None else console
        self._live: Live | None = None
        self._drawn_at = 0.0
        self._open = ""
        self._is_thinking = False
        self._has_printed = False

    def wait(self, text: str) -> None:
        self._redraw(Spinner("dots", Text(f" {text or 'waiting for the first token'}", "dim")))

    def refresh(self) -> None:
        if self._live is not None:
            self._live.refresh()
            self._drawn_at = time.monotonic()

    def reasoning(self, text: str) -> None:
        self._add(text, is_thinking=True)

    def text(self, text: str) -> None:
        self._add(text, is_thinking=False)

    def end(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        self._print(self._open)
        self._open, self._has_printed = "", False

    def note(self, text: str) -> None:
        self._console.print(Text(text, "dim"))

    def _add(self, text: str, *, is_thinking: bool) -> None:
        if is_thinking != self._is_thinking:
            self._print(self._open)
            self._open, self._is_thinking = "", is_thinking
        whole, self._open = split_blocks(self._open + text.translate(CONTROL_CHARACTERS))
        self._print(whole)
        self._redraw(_Tail(self._form(self._open)))

    def _print(self, text: str) -> None:
        if text.strip():
            if self._has_printed:
                self._console.print()
            self._console.print(self._form(text))
            self._has_printed = True

    def _form(self, text: str) -> RenderableType:
        text = text.strip("\n")
        return Text(text, "dim") if self._is_thinking else Markdown(text)

    def _redraw(self, shown: RenderableType) -> None:
        if self._live is None:
            self._live = Live(console=self._console, transient=True, auto_refresh=False)
            self._live.start()
        self._live.update(shown)
        if time.monotonic() - self._drawn_at >= _REDRAW_S:
            self.refresh()


class _Tail:
    """The last lines of something, as many as fit on the screen."""

    def __init__(self, shown: RenderableType) -> None:
        self._shown = shown

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._shown, options, pad=False)
        for line in lines[-max(1, console.height - 2) :]:
            yield from line
            yield Segment.line()


def split_blocks(text: str) -> tuple[str, str]:
    """Markdown blocks that are complete, and the rest: it is cut at the last blank line outside a code fence."""
    end = position = 0
    fence: str | None = None
    for line in text.splitlines(keepends=True):
        position += len(line)
        match = _FENCE.match(line)
        if match is not None:
            fence = match[1] if fence is None else (None if fence == match[1] else fence)
        elif not line.strip() and line.endswith("\n") and fence is None:
            end = position
    return text[:end], text[end:]


_QUOTES = '"""'
_BACKSLASH = "\\"
_CONTINUATION = "... "


def terminal_input(history: Path) -> Callable[[str], str]:
    """Asks for a line with editing, a history that lasts, and commands completed by Tab.

    A pasted text stays one input, and so do lines that end with a backslash, and what begins with three quotes until it
    ends with them. Ctrl-C drops what was typed. Raises EOFError, and KeyboardInterrupt for Ctrl-C at an empty prompt.
    """
    session: PromptSession[str] = PromptSession(
        history=_history(history),
        key_bindings=_bindings(),
        multiline=True,
        prompt_continuation=_CONTINUATION,
        completer=WordCompleter(list(NAMES), sentence=True),
        complete_while_typing=False,
    )
    return session.prompt


@contextmanager
def without_echo(terminal: TextIO) -> Iterator[None]:
    """What is typed meanwhile waits for the next prompt and does not show within the answer. Ctrl-C still works."""
    if not terminal.isatty():
        yield
        return
    before = termios.tcgetattr(terminal)
    silent = [*before]
    silent[_LOCAL_MODES] &= ~termios.ECHO
    termios.tcsetattr(terminal, termios.TCSANOW, silent)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, before)


def piped_input(prompt: str) -> str:
    """The same of a pipe, as far as it applies: several lines as one input. Raises EOFError and KeyboardInterrupt."""
    text = input(prompt)
    while text.endswith(_BACKSLASH) or is_open(text):
        text = f"{text.removesuffix(_BACKSLASH)}\n{input(_CONTINUATION)}"
    return text


def is_open(text: str) -> bool:
    return text.lstrip().startswith(_QUOTES) and text.count(_QUOTES) == 1


def unquoted(text: str) -> str:
    text = text.strip()
    if text.startswith(_QUOTES):
        return text.removeprefix(_QUOTES).removesuffix(_QUOTES).strip()
    return text


def _bindings() -> KeyBindings:
    bindings = KeyBindings()

    @bindings.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.is_cursor_at_the_end and buffer.text.endswith(_BACKSLASH):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        elif is_open(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("c-c")
    def _(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt())

    return bindings


def _history(file: Path) -> History:
    """Kept in a file that only its owner may read; in memory where none can be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file.touch(mode=0o600)
    except OSError:
        return InMemoryHistory()
    return FileHistory(file)
