"""Every `headrace` command line of README and docs has a command and flags that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from headrace.cli.commands import find_command

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ABSENT = "…"


def commands() -> list[tuple[str, str]]:
    """Page and command line: lines of code blocks, and code within text, that begin with the command."""
    found = []
    for page in PAGES:
        text = page.read_text("utf-8")
        blocks = re.findall(r"^```[a-z]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
        lines += [code.replace("\n", " ") for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", text)]
        for line in lines:
            match = re.match(r"\s*(?:\S*/)?headrace (?=[a-z])(.*)", line)
            if match is not None and ABSENT not in line:
                found.append((page.name, match[1]))
            elif (match := re.match(r"\s*scripts/serve\b(.*)", line)) is not None:
                found.append((page.name, f"serve {match[1]}"))
    return sorted(set(found))


def words(line: str) -> list[str]:
    """Without comments and redirections; of optional parts, `[X]`, and of choices, `a|b`, what they hold first."""
    line = re.sub(r"[<>|&;].*$|\[([^\]|]*)[^\]]*\]", lambda match: match[1] or "", line)
    return shlex.split(line, comments=True)


def test_there_are_some() -> None:
    assert {page for page, _ in commands()} >= {"README.md", "first-ten-minutes.md"}


@pytest.mark.parametrize(("page", "line"), commands())
def test_a_command_parses(page: str, line: str) -> None:
    given = words(line)
    if given[1:] and given[0] == "bench":  # parsed by its own module, when it runs
        return
    if given in (["mtp"], ["bench"]):
        return
    command, rest = find_command(given)
    if rest:
        try:
            command.parse(rest)
        except SystemExit as end:  # after --help
            assert end.code == 0
