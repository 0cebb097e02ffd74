"""One line of a terminal that rewrites itself while something takes long; nothing where output is no terminal."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

_CLEAR = "\r\x1b[K"
_PERIOD_S = 0.25
_WIDTH = 79


class ProgressLine:
    """The line. Log records that come meanwhile go above it."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = sys.stderr if out is None else out
        self._is_shown = False
        self.is_possible = self._out.isatty()

    def show(self, text: str) -> None:
        if self.is_possible and (text or self._is_shown):
            self._out.write(_CLEAR + text[:_WIDTH])
            self._out.flush()
            self._is_shown = bool(text)

    def clear(self) -> None:
        self.show("")

    def filter(self, record: logging.LogRecord) -> bool:
        """As a logging filter: every record is written to an empty line."""
        self.clear()
        return True


class Waiting:
    """Shows a text that changes, from its own thread, until the block ends."""

    def __init__(self, text: Callable[[float], str], line: ProgressLine | None = None) -> None:
        """text: of the seconds since the block began."""
        self._text = text
        self._line = ProgressLine() if line is None else line
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headrace-progress", daemon=True)

    def __enter__(self) -> None:
        for handler in logging.getLogger().handlers:
            handler.addFilter(self._line)
        if self._line.is_possible:
            self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join()
        for handler in logging.getLogger().handlers:
            handler.removeFilter(self._line)
        self._line.clear()

    def _run(self) -> None:
        began = time.monotonic()
        while not self._is_over.wait(_PERIOD_S):
            self._line.show(self._text(time.monotonic() - began))
