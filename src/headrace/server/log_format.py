"""Log formats: text, or JSON lines. Neither includes exception messages."""

from __future__ import annotations

import errno
import json
import logging
import traceback
from collections.abc import Iterator
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

FIELDS = "fields"
"""The attribute of a log record that holds its values by name."""

STACK = "stack_text"
"""The attribute of a record from another process that holds the stack of its exception."""

TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

_ExceptionInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


def use_log_format(log_format: str) -> None:
    for handler in logging.getLogger().handlers:
        handler.setFormatter(JsonLines() if log_format == "json" else TextLines(TEXT_FORMAT))


class TextLines(logging.Formatter):
    """One line per record, and the stack of an exception without its message."""

    def format(self, record: logging.LogRecord) -> str:
        record.exc_text = None  # another handler's formatter leaves its text here
        stack = getattr(record, STACK, None)
        return super().format(record) + ("" if stack is None else f"\n{stack}")

    def formatException(self, ei: _ExceptionInfo) -> str:
        return "" if ei[1] is None else stack_without_messages(ei[1])


class JsonLines(TextLines):
    """One JSON object per line; a record with fields becomes those fields."""

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, Any] = {
            "time": moment.isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
        }
        line.update(getattr(record, FIELDS, None) or {"message": record.getMessage()})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        elif (stack := getattr(record, STACK, None)) is not None:
            line["traceback"] = stack
        return json.dumps(line, ensure_ascii=False)


def stack_without_messages(error: BaseException) -> str:
    """The stack and type of an exception and of its causes, the first cause first.

    A message may quote a request: libraries include their input.
    """
    return "\n\nThen:\n\n".join(reversed(list(_stacks(error))))


def _stacks(error: BaseException) -> Iterator[str]:
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        stack = "".join(traceback.format_tb(cause.__traceback__))
        yield f"Traceback (most recent call last):\n{stack}{_name_of(cause)}"
        if isinstance(cause, BaseExceptionGroup):
            for inner in cause.exceptions:
                yield from _stacks(inner)
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


def _name_of(error: BaseException) -> str:
    name = type(error).__qualname__
    number = error.errno if isinstance(error, OSError) else None
    return name if number is None else f"{name} ({errno.errorcode.get(number, number)})"
