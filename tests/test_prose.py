"""The look at prose: it finds phrases where people read them, names the line, and never fails a check."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "prose.py"
SPEC = importlib.util.spec_from_file_location("prose", SCRIPT)
assert SPEC is not None and SPEC.loader is not None
prose = importlib.util.module_from_spec(SPEC)
sys.modules["prose"] = prose
SPEC.loader.exec_module(prose)

PHRASES = prose.read_phrases(
    "# a comment\n\nnobody => no client\nof its own => its own\nsigns? of life => keep-alive\n"
)


def found_in(path: Path) -> list[tuple[int, str]]:
    return sorted((hit.line, hit.found) for line, text in prose.prose(path) for hit in prose.hits(text, PHRASES, line))


def test_comments_docstrings_and_messages_are_read_and_other_code_is_not(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        '"""Nobody reads this."""\n'
        'nobody = "nobody"\n'
        "# a thing of\n"
        "# its own\n"
        "def f():\n"
        '    raise ValueError(f"nobody {nobody}")\n'
        'log.info("a sign of life")\n'
        'knob(1, "for nobody")\n'
    )
    assert found_in(file) == [(1, "Nobody"), (3, "of # its own"), (6, "nobody"), (7, "sign of life"), (8, "nobody")]


def test_code_in_markdown_is_not_read_and_lines_stay_right(tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    file.write_text("`nobody`\n\n```\nnobody\n```\n\nof its\nown, for nobody\n")
    assert found_in(file) == [(7, "of its own"), (8, "nobody")]


def test_only_whole_words_count() -> None:
    assert prose.hits("nobodyness", PHRASES) == []


@pytest.mark.parametrize("line", ["nobody", "nobody =>", "=> no client"])
def test_a_line_without_both_sides_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="not PATTERN => INSTEAD"):
        prose.read_phrases(line)


def test_the_list_of_words_is_valid_and_hits_end_with_status_0(tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    file.write_text("Nobody gives way.\n")
    done = subprocess.run([sys.executable, SCRIPT, file], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"{file}:1: ") == 2
