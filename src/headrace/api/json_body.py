"""Bytes of a body to checked values, and what pydantic says about them in our own error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from headrace.errors import InvalidRequest

Body = TypeVar("Body", bound=BaseModel)

_Location = tuple[int | str, ...]


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object in a body. Raises InvalidRequest for anything else, NaN and lone surrogates too."""
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object")
    return value


def check(model: type[Body], value: Mapping[str, Any]) -> Body:
    """The value as a pydantic model. Raises InvalidRequest with the first wrong field as its param."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False, include_context=False)
        # A union reports every branch that it tried; the one that got furthest into the body is what was meant.
        located = [(_real_location(each["loc"], value, each["type"] == "missing"), each["msg"]) for each in found]
        location, message = max(located, key=lambda each: len(each[0]))
        path = field_path(location)
        raise InvalidRequest(f"{path}: {message[:1].lower()}{message[1:]}", param=path) from error


def field_path(location: _Location) -> str:
    """`("messages", 0, "content")` as `messages[0].content`."""
    path = ""
    for step in location:
        path += f"[{step}]" if isinstance(step, int) else f".{step}"
    return path.removeprefix(".")


def _real_location(location: _Location, value: object, missing: bool) -> _Location:
    """The steps of a location that exist in the body: pydantic adds the names of union branches between them."""
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
