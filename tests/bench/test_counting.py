"""Counting tokens here when a server doesn't."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from headrace.bench.counting import estimate_tokens, tokenizer_counter
from headrace.errors import ConfigError


def test_words_and_marks_are_counted() -> None:
    assert estimate_tokens("Well, it's 3 o'clock.") == 10  # Well , it ' s 3 o ' clock .
    assert estimate_tokens(" \n") == 0


@pytest.mark.parametrize("name", ["tokenizer.json", "."])
def test_a_tokenizer_counts_from_its_file_or_its_folder(name: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert tokenizer_counter(tmp_path / name)("a b a, a") == 4


@pytest.mark.parametrize("content", [None, "{}", "no json"])
def test_a_tokenizer_that_cannot_be_read_is_named(content: str | None, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match="--tokenizer .*tokenizer.json can't be read"):
        tokenizer_counter(file)
