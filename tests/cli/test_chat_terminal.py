"""The chat as a terminal shows it: the real command in a pseudo-terminal, and the display on a console."""

from __future__ import annotations

import asyncio
import io
import os
import sys
import termios
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pexpect
import pyte
import pytest
from fakes import FakeEngine, fake_session
from hypothesis import given
from hypothesis import strategies as st
from loopback import served
from rich.console import Console

from headrace.cli.chat_terminal import TerminalDisplay, is_open, split_blocks, unquoted, without_echo

PATIENCE_S = 120
COLUMNS, ROWS = 80, 24


class Screen(pyte.Screen):
    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.display).strip()


def shown(*writes: str) -> str:
    screen = Screen(COLUMNS, ROWS)
    stream = pyte.Stream(screen)
    screen.set_mode(pyte.modes.LNM)  # a terminal driver adds returns to line feeds
    for each in writes:
        stream.feed(each)
    return screen.text


def display() -> tuple[TerminalDisplay, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=COLUMNS, height=ROWS, highlight=False)
    return TerminalDisplay(console), out


def test_an_answer_is_on_the_screen_once_with_its_markdown_rendered() -> None:
    one, out = display()
    one.wait("prompt: 5 of 10 tokens")
    one.reasoning("Let me ")
    one.reasoning("think.")
    for piece in ("# He", "ading\n\nSome **bo", "ld** words.\n\n- one\n- t", "wo\n"):
        one.text(piece)
    one.end()
    one.note("[9 tokens]")
    lines = [line.strip() for line in shown(out.getvalue()).splitlines() if line.strip()]
    assert lines[0] == "Let me think."
    assert "Heading" in lines[1]
    assert lines[2:] == ["Some bold words.", "• one", "• two", "[9 tokens]"]
    assert "prompt: 5 of 10" not in shown(out.getvalue())


def test_only_the_caller_draws() -> None:
    """Another thread that drew while something is printed would leave text on the screen twice."""
    before = set(threading.enumerate())
    one, out = display()
    one.wait("")
    one.text("Some text")
    assert set(threading.enumerate()) == before
    written = out.getvalue()
    one.refresh()
    assert "Some text" in out.getvalue()[len(written) :]


def test_words_are_wrapped_whole() -> None:
    one, out = display()
    words = ["wonderful"] * 30
    for word in words:
        one.text(word + " ")
    one.end()
    screen = shown(out.getvalue())
    assert screen.split() == words
    assert max(map(len, screen.splitlines())) <= COLUMNS


def test_an_answer_longer_than_the_screen_is_printed_whole() -> None:
    one, out = display()
    for number in range(100):
        one.text(f"line {number}\n\n")
    one.end()
    screen = pyte.HistoryScreen(COLUMNS, ROWS, history=1000)
    screen.set_mode(pyte.modes.LNM)
    pyte.Stream(screen).feed(out.getvalue())
    above = ["".join(line[column].data for column in range(COLUMNS)).strip() for line in screen.history.top]
    lines = [line for line in (*above, *(line.strip() for line in screen.display)) if line]
    assert lines == [f"line {number}" for number in range(100)]


def test_an_answer_cannot_steer_the_terminal() -> None:
    one, out = display()
    one.text("a\x1b]0;title\x07b")
    one.end()
    assert "\x1b]0;" not in out.getvalue()


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("one", ""),
        ("one\n\ntwo", "one\n\n"),
        ("```\na\n\nb\n", ""),
        ("```\na\n\nb\n```\n\nc", "```\na\n\nb\n```\n\n"),
        ("~~~\n```\n\n", ""),
        ("one\n \n", "one\n \n"),
    ],
)
def test_blocks_are_cut_at_blank_lines_outside_of_code(text: str, whole: str) -> None:
    assert split_blocks(text) == (whole, text[len(whole) :])


@given(st.lists(st.sampled_from(["a", "```", "~~~", "\n", "\n\n", " ", "- b"]), max_size=30))
def test_cutting_loses_nothing_and_cuts_the_same_in_pieces(pieces: list[str]) -> None:
    text = "".join(pieces)
    printed, rest = "", ""
    for piece in pieces:
        whole, rest = split_blocks(rest + piece)
        printed += whole
    assert printed + rest == text
    assert split_blocks(text)[0].startswith(printed)


def test_three_quotes_hold_several_lines() -> None:
    assert is_open('"""one\ntwo')
    assert not is_open('"""one\ntwo"""')
    assert not is_open('say """ in the middle')
    assert unquoted('"""one\ntwo"""') == "one\ntwo"
    assert unquoted("plain") == "plain"


def test_what_is_typed_during_an_answer_is_not_echoed_into_it() -> None:
    master, slave = os.openpty()
    with os.fdopen(slave, "r") as typed_into:

        def echoes() -> bool:
            return bool(termios.tcgetattr(typed_into)[3] & termios.ECHO)

        assert echoes()
        with pytest.raises(KeyboardInterrupt), without_echo(typed_into):
            assert not echoes()
            os.write(master, b"next\n")
            raise KeyboardInterrupt
        assert echoes()
        assert typed_into.readline() == "next\n"
    os.close(master)


def test_without_a_terminal_there_is_no_echo_to_stop() -> None:
    with without_echo(io.StringIO()):
        pass


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[pexpect.spawn[str]]:
    """The command on the miniature, at its first prompt."""
    environ = {**os.environ, "TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1"}
    words = ["-m", "headrace", "chat", "--no-self-check", "--model-folder", str(tmp_path / "models")]
    child = pexpect.spawn(
        sys.executable, words, encoding="utf-8", dimensions=(ROWS, COLUMNS), timeout=PATIENCE_S, env=environ
    )
    child.expect(">>>")
    yield child
    child.close(force=True)


@pytest.mark.slow
def test_a_conversation_in_a_terminal(terminal: pexpect.spawn[str], tmp_path: Path) -> None:
    terminal.sendline("/hlep")
    terminal.expect("did you mean /help")
    # A pasted text of two lines is one question, sent by the Return after it.
    terminal.send("\x1b[200~Say\nhello\x1b[201~")
    terminal.sendline("")
    terminal.expect(r"tokens/s")
    terminal.expect(">>>")
    terminal.sendline('"""')
    terminal.sendline("And")
    terminal.sendline('again"""')
    terminal.expect(r"prompt tokens reused")
    terminal.expect(">>>")
    terminal.sendline(f"/save {tmp_path / 'saved.json'}")
    terminal.expect("4 messages saved")
    terminal.sendline("/bye")
    terminal.expect(pexpect.EOF)
    terminal.wait()
    assert terminal.exitstatus == 0
    saved = (tmp_path / "saved.json").read_text()
    assert '"Say\\nhello"' in saved
    assert '"And\\nagain"' in saved
    history = tmp_path / "models" / "chat-history"
    assert history.stat().st_mode & 0o077 == 0


def test_with_a_server_in_a_terminal(tmp_path: Path) -> None:
    """Lines that go on, Ctrl-C in an answer, which frees the server's request, and Ctrl-C twice at the prompt."""
    engine = FakeEngine("so far", asyncio.Event())
    environ = {**os.environ, "TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1"}
    with served(fake_session(engine)) as url:
        words = ["-m", "headrace", "chat", "--url", url]
        child = pexpect.spawn(
            sys.executable, words, encoding="utf-8", dimensions=(ROWS, COLUMNS), timeout=PATIENCE_S, env=environ
        )
        written = io.StringIO()
        child.logfile_read = written
        child.expect(">>>")
        child.sendline("one\\")
        child.sendline("two")
        child.expect("so far")
        child.sendintr()
        child.expect("stopped")
        child.expect(">>>")
        while httpx.get(f"{url}/v1/status").json()["requests"]:
            pass
        # Ctrl-C drops what was typed: this is not asked.
        child.send("never said")
        child.expect("never said")
        child.sendintr()
        child.sendline("/help")
        for expected in ("it ends the chat", "Ctrl-C again ends the chat"):
            child.expect(expected)
            child.expect(">>>")
            child.sendintr()
        child.expect(pexpect.EOF)
        child.wait()
    assert child.exitstatus == 0
    assert "Traceback" not in written.getvalue()
    assert [bytes(request.prompt) for request in engine.requests] == [b"user: one\ntwo\n"]
    assert engine.aborted == [engine.requests[0].request_id]
