"""Shared by commands without configuration knobs."""

from __future__ import annotations

from pathlib import Path

from headrace.errors import ConfigError


def whole_numbers(text: str) -> tuple[int, ...]:
    """`1,2,4`, each once."""
    return tuple(dict.fromkeys(int(number) for number in text.split(",")))


def make_folder(file: Path) -> None:
    """Called before measuring, so that an hour of results is not lost because they can't be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--json {file} can't be written ({error})") from error
