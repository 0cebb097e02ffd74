"""Answers of /v1/responses: a stream of named events with rising sequence numbers, or one object.

A stream is: `response.created`, `response.in_progress`; for each item `response.output_item.added`, its events, and
`response.output_item.done` with the whole item; then `response.completed`, `response.incomplete` or `response.failed`
with everything. Codex reads the done items and the last event; other clients assemble the answer from the events in
between.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from headrace.api.answer_encoder import AnswerHeading, approximations, server_sent
from headrace.api.responses_body import ResponseCall
from headrace.api.responses_output import (
    CustomCallOutput,
    FunctionCallOutput,
    MessageOutput,
    OutputItem,
    ReasoningOutput,
)
from headrace.api.responses_tools import echoed_tools
from headrace.errors import HeadraceError, RequestCancelled, RequestError
from headrace.types.events import (
    DecodedLogprob,
    Event,
    Finished,
    FinishReason,
    HiddenLogprobs,
    Reasoning,
    Started,
    Text,
    ToolArguments,
    ToolCallStart,
    Usage,
)

_ECHOED = (
    *("instructions", "max_output_tokens", "max_tool_calls", "previous_response_id", "prompt_cache_key"),
    *("safety_identifier", "temperature", "top_p", "user"),
)


class ResponsesAnswer:
    """An AnswerEncoder.

    on_end: receives the whole response, however it ended, unless the client disconnected.
    num_sent: events that another one has sent for the same response, while its model was loaded.
    """

    def __init__(
        self,
        heading: AnswerHeading,
        call: ResponseCall,
        on_end: Callable[[dict[str, Any]], None] = lambda response: None,
        num_sent: int = 0,
    ) -> None:
        self._heading = heading
        self._call = call
        self._on_end = on_end
        self.num_sent = num_sent
        self._status = "in_progress"
        self._done: list[dict[str, Any]] = []
        self._open: OutputItem | None = None
        self._usage: Usage | None = None
        self._error: dict[str, Any] | None = None
        self._incomplete: dict[str, Any] | None = None

    @property
    def is_stored(self) -> bool:
        return self._call.store

    @property
    def is_open(self) -> bool:
        return self._status == "in_progress"

    def pieces(self, event: Event) -> list[bytes]:
        return [server_sent(body, body["type"]) for body in self._event_bodies(event)]

    def ping(self) -> bytes:
        """See AnswerEncoder. An in_progress event resets all clients' timers; they expect a created one before it."""
        body = self._event("response.in_progress" if self.num_sent else "response.created", response=self.response())
        return server_sent(body, body["type"])

    def end(self) -> bytes:
        """See AnswerEncoder. The last pieces have already ended the stream."""
        return b""

    def failure(self, error: HeadraceError) -> bytes:
        begin = [] if self.num_sent else [self._event("response.created", response=self.response())]
        self._status = "cancelled" if isinstance(error, RequestCancelled) else "failed"
        is_refused = isinstance(error, RequestError)
        self._error = {"code": error.code if is_refused else "server_error", "message": error.message}
        # An unfinished item stays in the response.
        events = [*begin, *self._end_item("incomplete")]
        response = self.response()
        self._on_end(response)
        events.append(self._event("response.failed", response=response))
        return b"".join(server_sent(body, body["type"]) for body in events)

    def whole(self, events: Sequence[Event]) -> dict[str, Any]:
        """See AnswerEncoder. Raises ValueError if the answer has not finished."""
        for event in events:
            for _ in self._event_bodies(event):
                pass
        if self._usage is None:
            raise ValueError("the events of an answer end with Finished")
        return self.response()

    def so_far(self, status: str = "in_progress") -> dict[str, Any]:
        item_status = "in_progress" if status == "in_progress" else "incomplete"
        unfinished = [] if self._open is None else [self._open.body(item_status)]
        return {**self.response(), "status": status, "output": [*self._done, *unfinished]}

    def response(self) -> dict[str, Any]:
        sent = self._call.body
        text, reasoning = sent.get("text") or {}, sent.get("reasoning") or {}
        return {
            "id": self._heading.id,
            "object": "response",
            "created_at": self._heading.created,
            "completed_at": int(time.time()) if self._status == "completed" else None,
            "status": self._status,
            "background": False,
            "error": self._error,
            "incomplete_details": self._incomplete,
            **{name: sent.get(name) for name in _ECHOED},
            "metadata": sent.get("metadata") or {},
            "model": self._heading.model,
            "output": list(self._done),
            "parallel_tool_calls": sent.get("parallel_tool_calls") is not False,
            "reasoning": {"effort": None, "summary": None, **reasoning},
            "service_tier": "default",
            "store": self._call.store,
            "text": {"format": {"type": "text"}, **text},
            "tool_choice": sent.get("tool_choice") or "auto",
            "tools": echoed_tools(sent.get("tools") or []),
            "top_logprobs": sent.get("top_logprobs") or 0,
            # Inputs are never truncated.
            "truncation": "disabled",
            "usage": None if self._usage is None else _usage_body(self._usage),
        }

    def _event_bodies(self, event: Event) -> Iterator[dict[str, Any]]:
        match event:
            case Text():
                if not isinstance(self._open, MessageOutput):
                    yield from self._begin(MessageOutput(includes_logprobs=self._call.includes_logprobs))
                yield from self._add(event.text, event.logprobs)
            case Reasoning():
                if not isinstance(self._open, ReasoningOutput):
                    call = self._call
                    item = ReasoningOutput(is_encrypted=call.includes_encrypted, has_summary=call.includes_summary)
                    yield from self._begin(item)
                yield from self._add(event.text)
            case ToolArguments(_, text):
                yield from self._add(text)
            case ToolCallStart(_, call_id, name):
                yield from self._begin(self._called(call_id, name))
            case HiddenLogprobs():
                pass  # the API has log-probabilities of text only
            case Started():
                if not self.num_sent:
                    yield self._event("response.created", response=self.response())
                yield self._event("response.in_progress", response=self.response())
            case Finished(reason, usage, _, logprobs):
                yield from self._finish(reason, usage, logprobs)
            case _:
                raise TypeError(f"a response can't hold {type(event).__name__}")

    def _called(self, call_id: str, name: str) -> OutputItem:
        tool = self._call.tools.by_name[name]
        return CustomCallOutput(call_id, tool) if tool.is_custom else FunctionCallOutput(call_id, tool)

    def _begin(self, item: OutputItem) -> Iterator[dict[str, Any]]:
        yield from self._end_item("completed")
        self._open = item
        yield self._event("response.output_item.added", output_index=len(self._done), item=item.body("in_progress"))
        for kind, fields in item.begin():
            yield self._of_item(item, kind, fields)

    def _add(self, text: str, logprobs: Sequence[DecodedLogprob] = ()) -> Iterator[dict[str, Any]]:
        item = self._open
        assert item is not None, "a piece of an item comes after its begin"
        for kind, fields in item.add(text, logprobs):
            yield self._of_item(item, kind, fields)

    def _end_item(self, status: str) -> Iterator[dict[str, Any]]:
        item, self._open = self._open, None
        if item is None:
            return
        for kind, fields in item.end():
            yield self._of_item(item, kind, fields)
        index = len(self._done)
        self._done.append(item.body(status))
        yield self._event("response.output_item.done", output_index=index, item=self._done[-1])

    def _finish(
        self, reason: FinishReason, usage: Usage, logprobs: Sequence[DecodedLogprob]
    ) -> Iterator[dict[str, Any]]:
        if isinstance(self._open, MessageOutput):
            self._open.add_logprobs(logprobs)
        is_cut = reason is FinishReason.LENGTH
        status = "incomplete" if is_cut else "completed"
        yield from self._end_item(status)
        self._status, self._usage = status, usage
        self._incomplete = {"reason": "max_output_tokens"} if is_cut else None
        response = self.response()
        self._on_end(response)
        yield self._event(f"response.{status}", response=response)

    def _of_item(self, item: OutputItem, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
        return self._event(kind, item_id=item.id, output_index=len(self._done), **fields)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        event = {"type": kind, "sequence_number": self.num_sent, **fields}
        self.num_sent += 1
        return event


def _usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.num_prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.num_cached_tokens,
            # Every prompt is cached as far as there is room, so writes are not counted.
            "cache_write_tokens": 0,
            "route": usage.route.value,
            **approximations(usage),
        },
        "output_tokens": usage.num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
    }
