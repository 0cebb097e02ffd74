"""Every `headrace` command line of README and docs has a command and flags that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from pages import PAGES, blocks, without_options

from headrace.cli.commands import find_command

ABSENT = "…"


def commands() -> list[tuple[str, str]]:
    """Page and command line: lines of code blocks, and code within text, that begin with the command."""
    found = []
    for page in PAGES:
        fenced = [block.text for block in blocks() if block.page == page.name]
        lines = [line for text in fenced for line in text.replace("\\\n", " ").splitlines()]
        inline = re.findall(r"(?<!`)`([^`]+)`(?!`)", page.read_text("utf-8"))
        lines += [code.replace("\n", " ") for code in inline]
        for line in lines:
            match = re.match(r"\s*(?:\S*/)?headrace (?=[a-z])(.*)", line)
            if match is not None and ABSENT not in line:
                found.append((page.name, match[1]))
            elif (match := re.match(r"\s*scripts/serve\b(.*)", line)) is not None:
                found.append((page.name, f"serve {match[1]}"))
    return sorted(set(found))


def words(line: str) -> list[str]:
    """Without comments and redirections; of optional parts, `[X]`, and of choices, `a|b`, what they hold first."""
    return shlex.split(re.sub(r"[<>|&;].*$", "", without_options(line)), comments=True)


def test_there_are_some() -> None:
    assert {page for page, _ in commands()} >= {"README.md", "first-ten-minutes.md"}


@pytest.mark.parametrize(("page", "line"), commands())
def test_a_command_parses(page: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "small").mkdir(parents=True)
    (tmp_path / "models" / "small" / "config.json").write_text("{}")
    (tmp_path / "models.toml").write_text("[models.miniature]\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    given = words(line)
    if given[1:] and given[0] == "bench":  # parsed by its own module, when it runs
        return
    if given in (["mtp"], ["service"], ["bench"]):
        return
    command, rest = find_command(given)
    if rest:
        try:
            command.parse(rest)
        except SystemExit as end:  # after --help
            assert end.code == 0
