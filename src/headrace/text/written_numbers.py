"""Keeps numbers of a call's arguments as written through a template: 1.10 is not 1.1, nor 1e400 infinity.

Templates write a number as Python or `json.dumps` do, from its value. So a number that they would write differently is
passed as an integer whose digits spell it, and in the rendered text these digits are replaced by the spelling. A random
prefix distinguishes such integers from all typed ones.
"""

from __future__ import annotations

import json
import re
import secrets
from typing import Any

_CHARACTERS = "0123456789+-.eE"
_FIRST_CODE = 10
_CODES = {character: str(_FIRST_CODE + index) for index, character in enumerate(_CHARACTERS)}
_END = "99"
_PREFIX = f"7{secrets.randbelow(10**24):024}"
_SPELLED = re.compile(f"{_PREFIX}((?:[12][0-9])+){_END}")

_MAX_LENGTH = 1000
"""Characters of a number that is spelled out; Python writes integers of up to 4,300 digits."""


def parse_written(text: str) -> Any:
    """The value of a JSON text, with unusual numbers as integers that `as_written` replaces. Raises as json.loads."""
    return json.loads(text, parse_float=_float, parse_int=_int)


def as_written(rendered: str) -> str:
    if _PREFIX not in rendered:
        return rendered
    return _SPELLED.sub(lambda match: _number(match[1]), rendered)


def _float(text: str) -> float | int:
    value = float(text)
    return value if repr(value) == text or len(text) > _MAX_LENGTH else _spelled(text)


def _int(text: str) -> int:
    return _spelled(text) if text == "-0" else int(text)


def _spelled(number: str) -> int:
    return int(_PREFIX + "".join(_CODES[character] for character in number) + _END)


def _number(codes: str) -> str:
    pairs = (codes[index : index + 2] for index in range(0, len(codes), 2))
    return "".join(_CHARACTERS[int(pair) - _FIRST_CODE] for pair in pairs)
