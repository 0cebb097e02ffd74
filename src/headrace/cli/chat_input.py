"""Lines typed into a terminal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from headrace.cli.chat_commands import NAMES

_QUOTES = '"""'


def terminal_input(history: Path) -> Callable[[str], str]:
    """Asks for a line with editing, a history that lasts, and commands completed by Tab.

    A pasted text stays one input, and so does what begins with three quotes until it ends with them. Raises EOFError
    and KeyboardInterrupt.
    """
    session: PromptSession[str] = PromptSession(
        history=_history(history),
        key_bindings=_bindings(),
        multiline=True,
        prompt_continuation="... ",
        completer=WordCompleter(list(NAMES), sentence=True),
        complete_while_typing=False,
    )
    return session.prompt


def is_open(text: str) -> bool:
    """Whether a text begins with three quotes that are not closed yet."""
    return text.lstrip().startswith(_QUOTES) and text.count(_QUOTES) == 1


def unquoted(text: str) -> str:
    """Without the three quotes around it, if there are any."""
    text = text.strip()
    if text.startswith(_QUOTES):
        return text.removeprefix(_QUOTES).removesuffix(_QUOTES).strip()
    return text


def _bindings() -> KeyBindings:
    bindings = KeyBindings()

    @bindings.add("enter")
    def _(event: KeyPressEvent) -> None:
        if is_open(event.current_buffer.text):
            event.current_buffer.insert_text("\n")
        else:
            event.current_buffer.validate_and_handle()

    return bindings


def _history(file: Path) -> History:
    """Kept in a file that only its owner may read; in memory where none can be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file.touch(mode=0o600)
    except OSError:
        return InMemoryHistory()
    return FileHistory(file)
