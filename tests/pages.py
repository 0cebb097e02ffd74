"""The pages for users, and the fenced blocks in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@dataclass(frozen=True)
class Block:
    page: str
    language: str
    text: str


def blocks() -> list[Block]:
    return [
        Block(page.name, match[1], match[2])
        for page in PAGES
        for match in re.finditer(r"^```([a-z]*)\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    ]


def without_options(line: str) -> str:
    """Optional parts, `[X]`, and choices, `a|b`, become what they hold first."""
    return re.sub(r"\[([^\]|=]*)[^\]]*\]", lambda match: match[1], line)
