"""The command at terminals and pipes of all kinds, as a separate process."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PATIENCE_S = 60

# Chats with a model that speaks many words, or many languages.
PROGRAM = textwrap.dedent("""
    import sys
    from types import SimpleNamespace
    from fakes import FakeEngine, fake_session
    from headrace.cli import chat, main

    engine = FakeEngine(sys.argv[1] * int(sys.argv[2]))
    chat.configured_text_pipeline = lambda config: SimpleNamespace(constraints=None)
    chat.Engine.launch = lambda *_: engine
    chat.Session.for_engine = lambda engine, *_, **__: fake_session(engine)
    sys.argv = ["headrace", "chat"]
    sys.exit(main.command())
""")


def start(said: str, times: int, **variables: str) -> subprocess.Popen[bytes]:
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root / "src"), str(root / "tests")])
    environ = {**os.environ, "PYTHONPATH": path, **variables}
    pipe = subprocess.PIPE
    words = [sys.executable, "-c", PROGRAM, said, str(times)]
    return subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, env=environ)


def test_a_reader_that_has_seen_enough_ends_the_command_quietly() -> None:
    with start("word ", 100) as process:
        # A turn is said, and another one after the reader has gone: that one can't be written.
        process.stdin.write(b"hello\n")
        process.stdin.flush()
        while not (line := process.stdout.readline()).startswith(b">>> word"):
            assert line, process.stderr.read()
        process.stdout.close()
        process.stdin.write(b"hello\n" * 20)
        process.stdin.close()
        err = process.stderr.read()
        assert process.wait(PATIENCE_S) == 141
    assert err == b"" or b"Traceback" not in err


@pytest.mark.parametrize(
    "encoding", ["ascii", *(pytest.param(each, marks=pytest.mark.slow) for each in ("latin-1", "utf-8"))]
)
def test_a_terminal_without_a_character_shows_another_in_its_place(encoding: str) -> None:
    with start("né 你 🎉", 1, PYTHONIOENCODING=encoding) as process:
        out, err = process.communicate("schön\n".encode(), timeout=PATIENCE_S)
        assert process.returncode == 0
    assert "né 你 🎉".encode(encoding, "replace") in out
    assert b"Traceback" not in err
