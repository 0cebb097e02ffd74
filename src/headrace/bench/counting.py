"""Counts an answer's tokens if its server doesn't report them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from headrace.errors import ConfigError

TokenCounter = Callable[[str], int]

_WORD_OR_MARK = re.compile(r"\w+|[^\w\s]")


def estimate_tokens(text: str) -> int:
    """Words and punctuation marks: for plain English within 10 to 20 % of large vocabularies."""
    return len(_WORD_OR_MARK.findall(text))


def tokenizer_counter(path: Path) -> TokenCounter:
    """Count with a tokenizer.json, or the one in a folder. Raises ConfigError if it can't be read."""
    # Imported here: only this flag needs it.
    from tokenizers import Tokenizer

    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        tokenizer = Tokenizer.from_str(file.read_text("utf-8"))
    except Exception as error:  # the library raises plain Exception for a file that it can't parse
        raise ConfigError(f"--tokenizer {file} can't be read ({error})") from error
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)
