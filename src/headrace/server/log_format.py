"""How log lines are written: for people, or as JSON for machines."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any

FIELDS = "fields"
"""Attribute of a log record that holds its values by name."""


def use_log_format(log_format: str) -> None:
    """Makes every handler of the root logger write in this format (`text` leaves them as they are)."""
    if log_format == "json":
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonLines())


class JsonLines(logging.Formatter):
    """A JSON object on a line for each record; one that has fields is those fields."""

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
        return json.dumps(line, ensure_ascii=False)
