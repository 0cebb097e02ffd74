"""Reads a checkpoint's JSON files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headrace.errors import ModelError


def read_json(path: Path) -> Any:
    """None if there is no such file. Raises ModelError."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror}") from error


def read_object(path: Path) -> dict[str, Any] | None:
    """As `read_json`. Raises ModelError for another value."""
    found = read_json(path)
    if isinstance(found, dict) or (found is None and not path.exists()):
        return found
    raise ModelError(f"{path} holds no JSON object")
