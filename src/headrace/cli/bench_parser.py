"""What command lines that set no knobs have in common."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

from headrace.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """Raises ConfigError where argparse would print usage and exit."""

    def error(self, message: str) -> NoReturn:
        """One line, as for any other mistake."""
        raise ConfigError(message)


def whole_numbers(text: str) -> tuple[int, ...]:
    """`1,2,4`, each once."""
    return tuple(dict.fromkeys(int(number) for number in text.split(",")))


def make_folder(file: Path) -> None:
    """Before anything is measured: an hour of numbers should not end with nowhere to write them."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--json {file} can't be written ({error})") from error
