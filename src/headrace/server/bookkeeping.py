"""Ids of requests and the engine's work for them, log records, and counts of unknown fields.

Log records have times, counts and reasons, never content.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from headrace.api.ids import new_id
from headrace.errors import GenerationFailed, HeadraceError
from headrace.isolation import errors_as
from headrace.server.foreign_ids import SAFE_ID, correlation_id, trace_id
from headrace.types.events import (
    Event,
    Finished,
    OutputTimes,
    Reasoning,
    Started,
    Text,
    ToolArguments,
    ToolCallStart,
    Usage,
)
from headrace.types.recent import ErrorStatus

log = logging.getLogger("headrace.server")


class LiveRequests:
    """Assigns request ids and finds the engine's work for an id."""

    def __init__(self) -> None:
        self._live: dict[str, _Work] = {}
        self._owner_of_answer: dict[str, str] = {}

    def admit(self, sent: str | None) -> str:
        """The request's id: the client's, if it is safe and not in use, else a random one."""
        request_id = sent if sent is not None and SAFE_ID.fullmatch(sent) else None
        if request_id is None or request_id in self._live:
            request_id = new_id("req_")
        self._live[request_id] = _Work()
        return request_id

    def attach(self, request_id: str, answer_id: str, engine_ids: tuple[str, ...]) -> None:
        self._live[request_id] = _Work(answer_id, engine_ids)
        self._owner_of_answer[answer_id] = request_id

    def release(self, request_id: str) -> None:
        self._owner_of_answer.pop(self._live.pop(request_id).answer_id, None)

    def engine_ids_of(self, id: str) -> tuple[str, ...]:
        """The engine's ids for a request's or an answer's id; an unknown id may be one of the engine's own."""
        found = self._live.get(self._owner_of_answer.get(id, id))
        return found.engine_ids if found is not None else (id,)

    def request_of(self, id: str) -> str:
        """The request's id for its own or its answer's."""
        return self._owner_of_answer.get(id, id)


@dataclass(frozen=True, slots=True)
class _Work:
    """A request's work; empty before its body is read."""

    answer_id: str = ""
    engine_ids: tuple[str, ...] = ()


MAX_ERRORS = 50

_MAX_METHOD_LENGTH = 16
_MAX_PATH_LENGTH = 128
"""Clients choose paths, and each request has a log line."""


class RequestRecord:
    """One HTTP request, and the answer that was generated for it if any.

    error: what the client got instead of an answer, or as the end of its stream. clock: monotonic seconds.
    arrived: by that clock.
    """

    def __init__(
        self,
        request_id: str,
        method: str,
        path: str,
        headers: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.request_id = request_id
        self.correlation_id = correlation_id(headers or {})
        self.trace_id = trace_id(headers or {})
        self.status: int | None = None
        self.error: HeadraceError | None = None
        self.method = method[:_MAX_METHOD_LENGTH]
        self.path = path[:_MAX_PATH_LENGTH]
        self._clock = clock
        self.arrived = clock()
        self._answer: _AnswerRecord | None = None

    def begin_answer(self, answer_id: str, model: str) -> None:
        self._answer = _AnswerRecord(answer_id, model)

    def take(self, event: Event) -> None:
        if self._answer is not None:
            self._answer.take(event, self._clock())

    def pass_on(self, usage: Usage) -> None:
        """Record a piece of another server's answer. usage: its counts so far."""
        if self._answer is not None:
            self._answer.pass_on(usage, self._clock())

    def end_answer(self, reason: str) -> None:
        """Record why the answer ended without its choices' finish reasons; the first reason counts."""
        if self._answer is not None:
            self._answer.end(reason)

    @property
    def times(self) -> OutputTimes | None:
        """When the engine worked on the answer; None if it gave no output."""
        return None if self._answer is None else self._answer.times

    def fields(self) -> dict[str, Any]:
        """Names and values for JSON logs. Seconds are rounded to microseconds."""
        fields: dict[str, Any] = {
            "request_id": self.request_id,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "duration_s": round(self._clock() - self.arrived, 6),
        }
        fields |= self._foreign_ids()
        return {**fields, **self._answer.fields(self.arrived)} if self._answer is not None else fields

    def _foreign_ids(self) -> dict[str, str]:
        """Ids by which a gateway's or a tracer's records of this request are found."""
        ids = {"correlation_id": self.correlation_id, "trace_id": self.trace_id}
        return {name: each for name, each in ids.items() if each is not None}

    def line(self) -> str:
        values = self.fields()
        words = [f"{self.method} {self.path} {self.status or '-'} {values['duration_s']:.3f}s {self.request_id}"]
        if self._answer is not None:
            words += _answer_words(values)
        words += [f"{name}={each}" for name, each in self._foreign_ids().items()]
        return " ".join(words)


def logged_failure(record: RequestRecord, message: str) -> AbstractContextManager[None]:
    """Log an unexpected error and raise it as a GenerationFailed with this message; HeadraceErrors pass."""

    def failure(error: BaseException) -> GenerationFailed:
        log.error("request %s failed", record.request_id, exc_info=error)
        return GenerationFailed(message)

    return errors_as(failure)


def _answer_words(values: dict[str, Any]) -> Iterator[str]:
    yield f"{values['answer_id']} {values['model']}"
    yield f"{values['num_prompt_tokens']}+{values['num_output_tokens']} tokens, {values['num_cached_tokens']} cached"
    if values["time_to_first_token_s"] is not None:
        yield f"first after {values['time_to_first_token_s']:.3f}s"
    if values["tokens_per_s"] is not None:
        yield f"{values['tokens_per_s']:.1f} tokens/s"
    yield ",".join(values["finish_reasons"]) or "-"


class _AnswerRecord:
    """The generated part of a request."""

    def __init__(self, answer_id: str, model: str) -> None:
        self.reasons: list[str] = []
        self._answer_id = answer_id
        self._model = model
        self._usage = Usage(0, 0)
        self._usage_so_far: Callable[[], Usage] | None = None
        self._has_ended = False
        self._first: float | None = None
        self._last = 0.0

    def take(self, event: Event, now: float) -> None:
        match event:
            case Text() | Reasoning() | ToolCallStart() | ToolArguments():
                self._first = now if self._first is None else self._first
                self._last = now
            case Started(num_prompt_tokens, route, usage_so_far):
                self._usage = Usage(num_prompt_tokens, 0, route=route)
                self._usage_so_far = usage_so_far
            case Finished(reason, usage):
                self._usage = usage
                self._last = now
                self.reasons.append(reason.value)

    def pass_on(self, usage: Usage, now: float) -> None:
        self._usage = usage
        self._first = now if self._first is None else self._first
        self._last = now

    @property
    def times(self) -> OutputTimes | None:
        return self._usage.times

    def end(self, reason: str) -> None:
        """The tokens until now were computed, although no Finished counts them."""
        if self._has_ended:
            return
        self._has_ended = True
        self.reasons.append(reason)
        if self._usage_so_far is not None:
            self._usage = self._usage_so_far()

    def fields(self, arrived: float) -> dict[str, Any]:
        """Tokens per second are those after the first, until the last choice finished."""
        num_later = self._usage.num_output_tokens - 1
        seconds = self._last - self._first if self._first is not None else 0.0
        return {
            "answer_id": self._answer_id,
            "model": self._model,
            "num_prompt_tokens": self._usage.num_prompt_tokens,
            "route": self._usage.route.value,
            "num_cached_tokens": self._usage.num_cached_tokens,
            "num_output_tokens": self._usage.num_output_tokens,
            "time_to_first_token_s": None if self._first is None else round(self._first - arrived, 6),
            "tokens_per_s": round(num_later / seconds, 3) if num_later > 0 and seconds > 0 else None,
            "finish_reasons": self.reasons,
        }


class RecentErrors:
    """The latest requests that ended with an error: no content, and no text that a client chose but its id."""

    def __init__(self) -> None:
        self._errors: deque[ErrorStatus] = deque(maxlen=MAX_ERRORS)

    def add(self, record: RequestRecord) -> None:
        """Remember a request that is over, if it had an error."""
        if (error := record.error) is not None:
            self._errors.append(ErrorStatus(time.time(), record.request_id, error.status, error.code))

    @property
    def latest(self) -> Sequence[ErrorStatus]:
        """The oldest first."""
        return tuple(self._errors)


# Bounds memory, because clients choose the names.
_MAX_NAMES = 256
_MAX_NAME_LENGTH = 64

OTHERS = "(others)"
"""Further names are counted under this one."""


class UnknownFields:
    """Counts of field names since the start."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, names: Sequence[str]) -> None:
        for name in names:
            shown = name[:_MAX_NAME_LENGTH]
            known = shown in self._counts or len(self._counts) < _MAX_NAMES
            self._counts[shown if known else OTHERS] += 1

    @property
    def counts(self) -> Mapping[str, int]:
        return dict(self._counts.most_common())
