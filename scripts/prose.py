"""Prints turns of phrase that have a plainer form, and words that have a standard term; always ends with 0.

    scripts/prose.py                 the most frequent phrases and their number of hits
    scripts/prose.py PATH...         every hit in these files and folders

Reads Markdown, and the comments, docstrings, error messages, log lines and help texts of Python files. The
phrases are in `prose_words.txt` beside this file: a regular expression, `=>`, and what to write in its place.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORDS = Path(__file__).with_name("prose_words.txt")
PLACES = ("src", "tests", "benchmarks", "training", "docs", "scripts", "README.md")

_NUM_SHOWN = 12
_SPEAKING = frozenset({"print", "knob", "debug", "info", "warning", "error", "exception", "critical"})


@dataclass(frozen=True, slots=True)
class Phrase:
    """pattern: of a phrase to avoid. instead: what to write."""

    pattern: re.Pattern[str]
    instead: str


@dataclass(frozen=True, slots=True)
class Hit:
    """line: number from 1. found: the words as they were written."""

    line: int
    found: str
    phrase: Phrase


def read_phrases(text: str) -> list[Phrase]:
    """The phrases of a word list. Raises ValueError for a line without `=>`."""
    phrases = []
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        pattern, arrow, instead = line.partition("=>")
        if not arrow or not pattern.strip() or not instead.strip():
            raise ValueError(f"not PATTERN => INSTEAD: {line}")
        words = pattern.strip().replace(" ", r"\s+(?:#\s+)?")
        phrases.append(Phrase(re.compile(rf"\b(?:{words})\b", re.IGNORECASE), instead.strip()))
    return phrases


def hits(text: str, phrases: Sequence[Phrase], first_line: int = 1) -> list[Hit]:
    """All phrases in a text, in order."""
    found = [
        Hit(first_line + text.count("\n", 0, match.start()), " ".join(match[0].split()), phrase)
        for phrase in phrases
        for match in phrase.pattern.finditer(text)
    ]
    return sorted(found, key=lambda hit: hit.line)


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """First line and text of each piece of prose in a file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield 1, _without_code(text)
    elif path.suffix == ".py":
        yield from _comments(text)
        yield from _strings(ast.parse(text))


def _without_code(text: str) -> str:
    """Markdown with its code left blank; line numbers stay."""
    text = re.sub(r"^```.*?^```", lambda match: "\n" * match[0].count("\n"), text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "", text)


def _comments(text: str) -> Iterator[tuple[int, str]]:
    """Comments; those on consecutive lines together."""
    start, lines = 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        if token.start[0] != start + len(lines):
            if lines:
                yield start, "\n".join(lines)
            start, lines = token.start[0], []
        lines.append(token.string)
    if lines:
        yield start, "\n".join(lines)


def _strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Docstrings, and the texts of raised errors, log lines, printed lines and help."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
        elif isinstance(node, ast.Raise) or (isinstance(node, ast.Call) and _called(node) in _SPEAKING):
            for inner in ast.walk(node):
                if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                    yield inner.lineno, inner.value


def _called(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _files(places: Sequence[Path]) -> Iterator[Path]:
    for place in places:
        if place.is_dir():
            yield from sorted(each for each in place.rglob("*") if each.suffix in (".py", ".md"))
        else:
            yield place


def main(arguments: Sequence[str]) -> None:
    phrases = read_phrases(WORDS.read_text(encoding="utf-8"))
    places = [Path(each).resolve() for each in arguments] or [ROOT / each for each in PLACES]
    counted: Counter[tuple[str, str]] = Counter()
    for file in _files(places):
        found = {hit for line, text in prose(file) for hit in hits(text, phrases, line)}
        for hit in sorted(found, key=lambda hit: (hit.line, hit.found)):
            counted[hit.found.lower(), hit.phrase.instead] += 1
            if arguments:
                shown = file.relative_to(ROOT) if file.is_relative_to(ROOT) else file
                print(f"{shown}:{hit.line}: {hit.found} → {hit.phrase.instead}")
    if counted and not arguments:
        print(f"prose: {counted.total()} phrases that have a plainer form (scripts/prose.py PATH lists them)")
        for (words, instead), number in counted.most_common(_NUM_SHOWN):
            print(f"{number:5}  {words} → {instead}")


if __name__ == "__main__":
    main(sys.argv[1:])
