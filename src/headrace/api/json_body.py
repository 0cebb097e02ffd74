"""Parses JSON within limits, validates bodies, and translates pydantic's errors into ours."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import from_json, to_json

from headrace.errors import InvalidRequest, UnsupportedField

MAX_CONTAINERS = 32_768
"""Objects and lists. The largest body seen from an agent has 288."""

MAX_MEMBERS = 131_072
"""Name-value pairs in all objects."""

MAX_VALUES = 1_310_720
"""Values in all objects and lists. Token ids are the cheapest: enough for 128 prompts of 8,192 ids."""

MAX_DEPTH = 200
"""Nesting of objects and lists: the JSON parser's limit."""

_SLICE_BYTES = 256 * 1024

_NOT_STRUCTURE = bytes(set(range(256)) - set(b'"[]{},:\\'))


def refuse_too_much(texts: Iterable[bytes], what: str, param: str | None = None) -> None:
    """Raise InvalidRequest if JSON texts together exceed the limits. what: names them in the message.

    Values are counted by their commas. The counts mean nothing for a text that is not JSON.
    """
    texts = list(texts)
    # with those in strings, which is enough to know that nearly every body is within the limits
    if all(number <= most for number, most, _ in _counts(texts)):
        return
    for number, most, kind in _counts([piece for text in texts for piece in _structure(text)]):
        if number > most:
            raise InvalidRequest(f"{what} must hold at most {most} {kind}", param=param)


def _counts(texts: Sequence[bytes]) -> Iterator[tuple[int, int, str]]:
    """How many containers, members and values there are, the limit of each, and its name."""
    for signs, most, kind in (
        (b"{[", MAX_CONTAINERS, "objects and lists"),
        (b":", MAX_MEMBERS, "fields of objects"),
        (b",", MAX_VALUES, "values"),
    ):
        yield sum(text.count(sign) for text in texts for sign in signs), most, kind


def _structure(text: bytes) -> Iterator[bytes]:
    is_in_string = False
    for piece in slices(text):
        # Backslashes occur in strings only. Once escaped ones are removed, every quote begins or ends a string.
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = piece.translate(None, _NOT_STRUCTURE).split(b'"')
        yield b"".join(parts[is_in_string::2])
        is_in_string ^= len(parts) % 2 == 0


def slices(text: bytes) -> Iterator[bytes]:
    """Split a JSON text without cutting an escape sequence; between slices other Python threads can run."""
    start = 0
    while start < len(text):
        end = start + _SLICE_BYTES
        piece = text[start:end]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            end += 1
        yield text[start:end]
        start = end


Body = TypeVar("Body", bound="StrictBody")

JsonBody = bytes | Mapping[str, Any]
"""A body as sent, or parsed already."""

_Location = tuple[int | str, ...]

# pydantic's messages name Python's types and our classes.
_TYPE_ERRORS: Mapping[str, str] = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "float_type": "a number",
    "int_type": "a whole number",
    "list_type": "a list",
    "model_type": "an object",
    "string_type": "a string",
}

# Escaped lone surrogates, in a JSON text without escaped backslashes.
_LONE_SURROGATE = re.compile(
    rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD])[c-fC-F][0-9a-fA-F]{2})"
)


_MAY_BE_INFINITE = (float, dict, list)


class StrictBody(BaseModel):
    """A body or an object in one, with strict types: `true` is no number and `"1"` is not 1.

    Undeclared fields are accepted. `unknown_fields` reports them, except for those known to have no effect.
    """

    model_config = ConfigDict(strict=True, extra="allow")

    neutral_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Unsupported fields of a body. One is refused by name unless it is null or has one of these values, with which it
    would not change the answer."""

    without_effect: ClassVar[frozenset[str]] = frozenset()
    """Fields that are accepted with any value."""

    @property
    def is_foreign(self) -> bool:
        """Whether another party defines its fields, so that none of them is unknown."""
        return False


def read_object(body: JsonBody) -> Mapping[str, Any]:
    """Parse a body that is a JSON object; a lone surrogate becomes a replacement character.

    A route has parsed it already if it had to know which model is meant. Raises InvalidRequest for anything but an
    object, including NaN, invalid UTF-8, and JSON over the limits.
    """
    if not isinstance(body, bytes):
        return body
    value = read_json(body, "the body")
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object")
    return value


def read_json(text: bytes, what: str, param: str | None = None) -> Any:
    """Parse a JSON text as read_object does. what: names the text in errors. Raises InvalidRequest."""
    refuse_too_much((text,), what, param)
    try:
        value = _parsed(text)
    except ValueError as error:
        whole = without_lone_surrogates(text)
        if whole == text:
            raise InvalidRequest(_why_invalid(what, error), param=param) from error
        return read_json(whole, what, param)
    if (place := infinite_number(value)) is not None:
        path = field_path(place)
        raise InvalidRequest(f"{what} holds a number that is too large: {path}", param=param or path)
    return value


def _parsed(text: bytes) -> Any:
    # Many different strings make the parser's string cache slow, and it saves little otherwise.
    return from_json(text, allow_inf_nan=False, cache_strings="none")


def infinite_number(value: Any) -> _Location | None:
    """The location of a number beyond the largest float (like 1e400) in parsed JSON; None if there is none."""
    return _place_of_infinite(value) if _has_infinite(value) else None


def _has_infinite(value: Any) -> bool:
    left = [[value]]
    while left:
        values = left.pop()
        for each in values:
            kind = type(each)
            if kind is dict:
                left.append(each.values())
            elif kind is list:
                left.append(each)
            elif kind is float and math.isinf(each):
                return True
    return False


def _place_of_infinite(value: Any) -> _Location | None:
    left: list[tuple[_Location, Any]] = [((), value)] if isinstance(value, _MAY_BE_INFINITE) else []
    while left:
        place, each = left.pop()
        if isinstance(each, dict):
            left += [((*place, name), inner) for name, inner in each.items() if isinstance(inner, _MAY_BE_INFINITE)]
        elif isinstance(each, list):
            left += [
                ((*place, index), inner) for index, inner in enumerate(each) if isinstance(inner, _MAY_BE_INFINITE)
            ]
        elif math.isinf(each):
            return place
    return None


def _why_invalid(what: str, error: ValueError) -> str:
    if str(error).startswith("recursion limit exceeded"):
        return f"{what} is nested more than {MAX_DEPTH} levels deep"
    return f"{what} is not valid JSON: {error}"


def without_lone_surrogates(body: bytes) -> bytes:
    """Replace escaped lone surrogates by escaped replacement characters.

    Clients that cut strings by UTF-16 units, as JavaScript does, send such halves.
    """
    no_utf_8 = b"\xff"
    if (b"\\ud" not in body and b"\\uD" not in body) or no_utf_8 in body:
        return body
    whole = bytearray(body)
    unescaped = b"".join(piece.replace(b"\\\\", 2 * no_utf_8) for piece in slices(body))
    for half in _LONE_SURROGATE.finditer(unescaped):
        whole[half.start() : half.end()] = b"\\ufffd"
    return bytes(whole)


def check(model: type[Body], value: Mapping[str, Any]) -> Body:
    """Validate a value as a pydantic model. Raises InvalidRequest with the first wrong field as its param."""
    _refuse_unsupported(model, value)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False, include_context=False)
        located = [(_real_location(each["loc"], value, each["type"] == "missing"), each) for each in found]
        # A union reports every branch that it tried; the deepest location belongs to the intended one.
        location = max((location for location, _ in located), key=len)
        path = field_path(location)
        message = _message([(each["type"], each["msg"]) for where, each in located if where == location])
        raise InvalidRequest(f"{path}: {message}", param=path) from error


def _refuse_unsupported(model: type[StrictBody], value: Mapping[str, Any]) -> None:
    for name, neutrals in model.neutral_values.items():
        sent = value.get(name)
        if sent is not None and not any(_is_same(sent, neutral) for neutral in neutrals):
            accepted = " or ".join(to_json(neutral).decode() for neutral in neutrals)
            rest = f": only {accepted} is accepted" if neutrals else ""
            raise UnsupportedField(f"{name} is not supported{rest}", param=name)


def _is_same(value: object, neutral: object) -> bool:
    # In Python True == 1 and False == 0; in JSON they differ.
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral


def unknown_fields(body: StrictBody, path: str = "") -> set[str]:
    """Paths of the unknown fields of a body and of all objects in it, without indices: `messages[].name`."""
    unknown: set[str] = set()
    _add_unknown(body, path, unknown)
    return unknown


def _add_unknown(body: StrictBody, path: str, unknown: set[str]) -> None:
    if body.is_foreign:
        return
    if sent := body.model_extra:
        unknown |= {path + name for name in sent.keys() - body.neutral_values.keys() - body.without_effect}
    for name, value in vars(body).items():
        if value is None or type(value) is str:  # most fields; asking whether it is a body takes longer
            continue
        if type(value) is list:
            if value and isinstance(value[0], StrictBody):
                inner = f"{path}{_sent_name(body, name)}[]."
                for each in value:
                    _add_unknown(each, inner, unknown)
        elif isinstance(value, StrictBody):
            _add_unknown(value, f"{path}{_sent_name(body, name)}.", unknown)


def _sent_name(body: StrictBody, name: str) -> str:
    return type(body).model_fields[name].alias or name


def ignored_names(unknown: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(unknown, key=lambda path: (path.count("."), path)))


def check_at(model: type[Body], value: object, path: str) -> Body:
    """Validate a value at `path` in a body. Raises InvalidRequest with paths under that one."""
    if not isinstance(value, dict):
        raise InvalidRequest(f"{path}: input should be an object", param=path)
    try:
        return check(model, value)
    except InvalidRequest as error:
        raise InvalidRequest(f"{path}.{error.message}", param=f"{path}.{error.param}") from error


def required(value: str | None, path: str) -> str:
    """Return a value that must be present. Raises InvalidRequest."""
    if value is None:
        raise InvalidRequest(f"{path} is missing", param=path)
    return value


def _message(found: Sequence[tuple[str, str]]) -> str:
    """The error for one location: for the value, if its type is an allowed one, else for the type."""
    expected = []
    for kind, message in found:
        if kind not in _TYPE_ERRORS and kind != "literal_error":
            return f"{message[:1].lower()}{message[1:]}"
        expected.append(_TYPE_ERRORS.get(kind) or message.removeprefix("Input should be "))
    return f"input should be {' or '.join(dict.fromkeys(expected))}"


def field_path(location: _Location) -> str:
    """`("messages", 0, "content")` as `messages[0].content`."""
    path = ""
    for step in location:
        path += f"[{step}]" if isinstance(step, int) else f".{step}"
    return path.removeprefix(".")


def _real_location(location: _Location, value: object, missing: bool) -> _Location:
    """The location without the names of union branches that pydantic inserts."""
    real: list[int | str] = []
    for index, step in enumerate(location):
        last = index == len(location) - 1
        if isinstance(value, dict) and isinstance(step, str) and (step in value or (missing and last)):
            value = value.get(step)
        elif isinstance(value, list) and isinstance(step, int) and step < len(value):
            value = value[step]
        else:
            continue
        real.append(step)
    return tuple(real)
