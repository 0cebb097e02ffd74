"""A progress bar on a terminal; nothing anywhere else."""

from __future__ import annotations

from typing import TextIO

_WIDTH = 30
_CLEAR_LINE = "\r\x1b[2K"


class ProgressBar:
    """Shows how many of `total` requests are done."""

    def __init__(self, total: int, out: TextIO) -> None:
        self._total = total
        self._out = out
        self._done = 0
        self._visible = out.isatty()

    def advance(self, title: str, count: int) -> None:
        self._done = min(self._done + count, self._total)
        filled = _WIDTH * self._done // self._total
        self._write(f"{_CLEAR_LINE}[{'#' * filled:<{_WIDTH}}] {self._done}/{self._total} {title}")

    def close(self) -> None:
        self._write(_CLEAR_LINE)

    def _write(self, text: str) -> None:
        if self._visible:
            self._out.write(text)
            self._out.flush()
