"""Ctrl-C while a command is still being imported ends it quietly, with the exit code of shells: 128 plus SIGINT's 2."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Stands in for a Ctrl-C during the import of a module; one in an extension's import comes out as an ImportError.
PROGRAM = """
import signal, sys

module = sys.argv.pop(1)

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt as error:
                raise ImportError("initializing an extension") from error

sys.meta_path.insert(0, Interrupting())
from headrace.__main__ import command
command()
"""


@pytest.mark.parametrize("module", ["headrace.cli", "headrace.cli.main", "headrace.config", "headrace.cli.installed"])
@pytest.mark.parametrize("words", [["serve", "--port", "0"], ["list"], ["chat"], ["--help"]])
def test_while_the_command_line_is_imported(module: str, words: list[str]) -> None:
    assert ended(module, words) == (130, "", "")


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("headrace.cli.serve", ["serve", "--port", "0"]),
        ("uvicorn", ["serve", "--port", "0"]),
        ("headrace.cli.chat", ["chat"]),
        ("mlx.core", ["pull", "miniature"]),
        ("mlx.core", ["doctor", "miniature"]),
        ("numpy", ["doctor", "miniature"]),
        ("headrace.cli.status", ["status"]),
    ],
)
def test_while_the_command_is_imported(module: str, words: list[str]) -> None:
    assert ended(module, words) == (130, "", "")


def ended(module: str, words: list[str]) -> tuple[int, str, str]:
    """Exit code and output of a command with a Ctrl-C during the import of a module."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, module, *words], capture_output=True, text=True, check=False, timeout=60
    )
    return done.returncode, done.stdout, done.stderr
