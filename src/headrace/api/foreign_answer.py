"""Another server's answer in the request's dialect: passed on as it is, but for the route in its usage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from pydantic_core import from_json, to_json

from headrace.api.answer_encoder import server_sent
from headrace.api.error_bodies import anthropic_error, openai_error
from headrace.api.openai_sampling import OWN_FIELDS
from headrace.api.responses_items import listed_items
from headrace.errors import HeadraceError
from headrace.types.events import Usage
from headrace.types.media import Route


def foreign_body(value: Mapping[str, Any], model: str | None) -> bytes | None:
    """A request's body for another server, without our own fields; None if it is the client's.

    model: the name to be sent, None for the client's.
    """
    if model is None and not OWN_FIELDS & value.keys():
        return None
    kept = {name: field for name, field in value.items() if name not in OWN_FIELDS}
    return to_json(kept if model is None else {**kept, "model": model})


class ForeignAnswer:
    """An answer to a chat; the subclasses are for other dialects.

    usage: counts so far. is_begun: an event with data has come. is_complete: a stream has come to its proper end.
    """

    path: ClassVar[str] = "/v1/chat/completions"
    body_field: ClassVar[str] = "choices"
    """What every whole answer has."""
    event_field: ClassVar[str] = "choices"
    """What a stream's first event has."""
    details_field: ClassVar[str] = "prompt_tokens_details"

    def __init__(self) -> None:
        self.usage = Usage(0, 0, route=Route.HANDOVER)
        self.is_complete = False
        self.is_begun = False

    def piece(self, event: bytes) -> bytes:
        """An event of the stream as it is sent on. Raises ValueError if it is none of this dialect, or if the stream
        begins with an error."""
        name, data = _parts(event)
        if not data:
            return event
        if data == b"[DONE]":
            self.is_complete = True
            return event
        value = _object(data)
        is_error = self._is_error(value)
        if not self.is_begun and (is_error or self.event_field not in value):
            raise ValueError("the stream does not begin as one of this API")
        self.is_begun = True
        self.is_complete |= is_error or self._ends(value)
        return server_sent(value, name) if self._mark(value) else event

    def whole(self, body: bytes) -> dict[str, Any]:
        """The whole answer as it is sent on. Raises ValueError if it is none of this dialect."""
        value = _object(body)
        if not isinstance(value.get(self.body_field), list):
            raise ValueError("the answer is not one of this API")
        self._mark(value)
        self.is_complete = True
        return value

    def ping(self) -> bytes:
        """A keep-alive. A comment, because an event would have another id than those of the other server."""
        return b": ping\n\n"

    def failure(self, error: HeadraceError) -> bytes:
        """The event that ends a stream that has broken off."""
        return server_sent(openai_error(error))

    def _is_error(self, value: dict[str, Any]) -> bool:
        return value.get("error") is not None

    def _ends(self, value: dict[str, Any]) -> bool:
        return False

    def _usages(self, value: dict[str, Any]) -> Iterator[Any]:
        yield value.get("usage")

    def _mark(self, value: dict[str, Any]) -> bool:
        """Write the route into each usage, and note the counts. Returns whether there was one."""
        usages = [usage for usage in self._usages(value) if isinstance(usage, dict)]
        for usage in usages:
            details = usage.get(self.details_field)
            usage[self.details_field] = {**(details if isinstance(details, dict) else {}), "route": Route.HANDOVER}
            self.usage = self._counted(usage)
        return bool(usages)

    def _counted(self, usage: dict[str, Any]) -> Usage:
        return replace(
            self.usage,
            num_prompt_tokens=_count(usage, "prompt_tokens", self.usage.num_prompt_tokens),
            num_output_tokens=_count(usage, "completion_tokens", self.usage.num_output_tokens),
            num_cached_tokens=_count(usage[self.details_field], "cached_tokens", 0),
        )


class ForeignCompletion(ForeignAnswer):
    path = "/v1/completions"


class ForeignMessage(ForeignAnswer):
    path = "/v1/messages"
    body_field = "content"
    event_field = "type"
    details_field = "input_tokens_details"

    def ping(self) -> bytes:
        return server_sent({"type": "ping"}, "ping")

    def failure(self, error: HeadraceError) -> bytes:
        return server_sent(anthropic_error(error), "error")

    def _is_error(self, value: dict[str, Any]) -> bool:
        return value.get("type") == "error"

    def _ends(self, value: dict[str, Any]) -> bool:
        return value.get("type") == "message_stop"

    def _usages(self, value: dict[str, Any]) -> Iterator[Any]:
        message = value.get("message")
        yield message.get("usage") if isinstance(message, dict) else value.get("usage")

    def _counted(self, usage: dict[str, Any]) -> Usage:
        num_cached = _count(usage, "cache_read_input_tokens", self.usage.num_cached_tokens)
        num_prompt = self.usage.num_prompt_tokens
        if "input_tokens" in usage:
            num_prompt = _count(usage, "input_tokens", 0) + _count(usage, "cache_creation_input_tokens", 0) + num_cached
        return replace(
            self.usage,
            num_prompt_tokens=num_prompt,
            num_output_tokens=_count(usage, "output_tokens", self.usage.num_output_tokens),
            num_cached_tokens=num_cached,
        )


class ForeignResponse(ForeignAnswer):
    path = "/v1/responses"
    body_field = "output"
    event_field = "type"
    details_field = "input_tokens_details"

    def __init__(self, on_end: Callable[[dict[str, Any]], None]) -> None:
        """on_end: receives a whole response that has ended, to be stored here."""
        super().__init__()
        self._on_end = on_end
        self._response: dict[str, Any] | None = None
        self._number = -1

    def piece(self, event: bytes) -> bytes:
        sent = super().piece(event)
        if self.is_complete and self._response is not None:
            self._keep(self._response)
        return sent

    def whole(self, body: bytes) -> dict[str, Any]:
        value = super().whole(body)
        self._keep(value)
        return value

    def failure(self, error: HeadraceError) -> bytes:
        number = self._number + 1
        if self._response is None:
            about = {"code": "server_error", "message": error.message, "param": None}
            return server_sent({"type": "error", "sequence_number": number, **about}, "error")
        failed = {**self._response, "status": "failed", "error": {"code": "server_error", "message": error.message}}
        return server_sent(
            {"type": "response.failed", "sequence_number": number, "response": failed}, "response.failed"
        )

    def _keep(self, response: dict[str, Any]) -> None:
        """Let later requests continue the response. An answer without the form of one is passed on only."""
        output = response.get("output")
        if response.get("status") not in ("completed", "incomplete") or not isinstance(response.get("id"), str):
            return
        if isinstance(output, list) and all(_is_item(item) for item in output):
            self._on_end({**response, "previous_response_id": None, "output": list(listed_items(output))})

    def _is_error(self, value: dict[str, Any]) -> bool:
        return value.get("type") == "error"

    def _ends(self, value: dict[str, Any]) -> bool:
        return value.get("type") in ("response.completed", "response.incomplete", "response.failed")

    def _usages(self, value: dict[str, Any]) -> Iterator[Any]:
        self._number = _count(value, "sequence_number", self._number)
        response = value.get("response")
        if isinstance(response, dict):
            self._response = response
        yield (response if isinstance(response, dict) else value).get("usage")

    def _counted(self, usage: dict[str, Any]) -> Usage:
        return replace(
            self.usage,
            num_prompt_tokens=_count(usage, "input_tokens", self.usage.num_prompt_tokens),
            num_output_tokens=_count(usage, "output_tokens", self.usage.num_output_tokens),
            num_cached_tokens=_count(usage[self.details_field], "cached_tokens", 0),
        )


def _is_item(item: object) -> bool:
    return isinstance(item, dict) and isinstance(item.get("type"), str) and not isinstance(item.get("content"), str)


def _count(fields: dict[str, Any], name: str, default: int) -> int:
    count = fields.get(name)
    return count if isinstance(count, int) and not isinstance(count, bool) and count >= 0 else default


def _object(text: bytes) -> dict[str, Any]:
    value = from_json(text, allow_inf_nan=False)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def _parts(event: bytes) -> tuple[str | None, bytes]:
    """An event's name, and its data; empty for a comment."""
    name, data = None, []
    for line in event.splitlines():
        field, _, value = line.partition(b":")
        if field == b"data":
            data.append(value.removeprefix(b" "))
        elif field == b"event":
            name = value.strip().decode("utf-8", "replace")
    return name, b"\n".join(data)
