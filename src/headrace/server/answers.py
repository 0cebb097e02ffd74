"""POST /v1/chat/completions, /v1/completions and /v1/messages: one flow for all generating routes."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from headrace.api.answer_encoder import AnswerEncoder, AnswerHeading
from headrace.api.anthropic_answer import MessagesAnswer
from headrace.api.anthropic_request import read_messages
from headrace.api.json_body import JsonBody
from headrace.api.openai_answer import ChatAnswer, CompletionAnswer
from headrace.api.openai_chat import read_chat_completion
from headrace.api.openai_completion import read_completion
from headrace.api.openai_sampling import Call
from headrace.config import ServerConfig
from headrace.errors import HeadraceError, RequestCancelled, RequestError
from headrace.server.bookkeeping import LiveRequests, RequestRecord, UnknownFields, logged_failure
from headrace.server.connection import CLIENT_CLOSED_REQUEST, ClientGone, EventStream, while_connected
from headrace.server.model_calls import Body, read_json_body
from headrace.server.responses import closing_error, ignored_headers
from headrace.server.session_header import session_header
from headrace.session.embeddings import text_session
from headrace.session.models import Models, Target
from headrace.session.prompts import generation_ids
from headrace.session.session import Session
from headrace.types.chat import ChatRequest, CompletionRequest
from headrace.types.events import Event
from headrace.types.model import ModelTraits

log = logging.getLogger("headrace.server")

Asked = TypeVar("Asked", bound=ChatRequest | CompletionRequest)

# Session names may be any text; names with the same first characters, up to this length, are one session.
_MAX_SESSION_LENGTH = 256


@dataclass(frozen=True, slots=True)
class Dialect(Generic[Asked]):
    """One API: how its body is read, what generates the answer, and how that is encoded."""

    read: Callable[[JsonBody, ModelTraits], Call[Asked]]
    events: Callable[[Session, Asked], AsyncGenerator[Event, None]]
    encoder: Callable[[Call[Asked], AnswerHeading], AnswerEncoder]


def chat_dialect(config: ServerConfig) -> Dialect[ChatRequest]:
    def encoder(call: Call[ChatRequest], heading: AnswerHeading) -> ChatAnswer:
        options = call.request.options
        return ChatAnswer(
            heading,
            options.num_choices,
            includes_logprobs=options.num_logprobs is not None,
            include_usage=call.include_usage,
            usage_in_chunks=call.usage_in_chunks,
            timings_in_chunks=call.timings_in_chunks,
            reasoning_field=config.reasoning_field,
        )

    return Dialect(read_chat_completion, Session.chat, encoder)


def messages_dialect() -> Dialect[ChatRequest]:
    return Dialect(read_messages, Session.chat, lambda call, heading: MessagesAnswer(heading))


def completion_dialect() -> Dialect[CompletionRequest]:
    def encoder(call: Call[CompletionRequest], heading: AnswerHeading) -> CompletionAnswer:
        options = call.request.options
        return CompletionAnswer(
            heading,
            len(call.request.prompts) * options.num_choices,
            includes_logprobs=options.num_logprobs is not None,
            include_usage=call.include_usage,
            usage_in_chunks=call.usage_in_chunks,
            timings_in_chunks=call.timings_in_chunks,
            choices_per_prompt=options.num_choices,
        )

    return Dialect(read_completion, Session.complete, encoder)


@dataclass(slots=True)
class _Answer:
    """An answer in progress.

    waits: for its model to be loaded, which `events` do first. encoder: made anew after that, because an answer may
    show defaults of its model.
    """

    encoder: AnswerEncoder
    record: RequestRecord
    headers: dict[str, str]
    is_stream: bool
    waits: bool
    events: AsyncGenerator[Event, None] = field(init=False)


class AnswerRoute(Generic[Asked]):
    """Answers the calls of one dialect, streamed or not."""

    def __init__(
        self,
        dialect: Dialect[Asked],
        models: Models,
        config: ServerConfig,
        live: LiveRequests,
        ignored: UnknownFields,
    ) -> None:
        self._dialect = dialect
        self._models = models
        self._config = config
        self._live = live
        self._ignored = ignored

    async def answer(self, request: Request) -> Response:
        """Answer a call. The guard has put a RequestRecord into the request's state."""
        record: RequestRecord = request.state.record
        try:
            answer = await self._begin(request)
            return await (self._stream if answer.is_stream else self._whole)(request, answer)
        except (ClientGone, ClientDisconnect):
            record.end_answer("abort")
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except HeadraceError as error:
            record.end_answer(end_of(error))
            raise

    async def _begin(self, request: Request) -> _Answer:
        body = await read_json_body(request, self._config.max_body_bytes)
        target, record = self._models.resolve(body.model), request.state.record
        # What is wrong with a body for any model is not worth loading one.
        traits = target.entry.traits
        call = await self._read(request, body, ModelTraits() if traits is None else traits)
        self._ignored.add(call.ignored)
        asked = call.request
        record.begin_answer(asked.request_id, target.name)
        num_prompts = len(asked.prompts) if isinstance(asked, CompletionRequest) else 1
        self._live.attach(record.request_id, asked.request_id, generation_ids(asked.request_id, num_prompts))
        encoder = self._dialect.encoder(call, AnswerHeading(asked.request_id, target.name))
        answer = _Answer(encoder, record, ignored_headers(call.ignored), is_stream=call.stream, waits=traits is None)
        answer.events = self._events(answer, target, call, partial(self._read, request, body) if answer.waits else None)
        return answer

    async def _read(self, request: Request, body: Body, traits: ModelTraits) -> Call[Asked]:
        call = await body.read(lambda value: self._dialect.read(value, traits))
        options = call.request.options
        options = replace(options, session=session_name(request, options.session))
        return replace(call, request=replace(call.request, options=options))

    async def _events(
        self,
        answer: _Answer,
        target: Target,
        call: Call[Asked],
        read: Callable[[ModelTraits], Awaitable[Call[Asked]]] | None,
    ) -> AsyncGenerator[Event, None]:
        """read: reads the body as the loaded model needs it; None if `call` is that."""
        async with self._models.use(target.entry, answer.record.request_id) as session:
            if read is not None:
                request_id = call.request.request_id
                call = await read(session.traits)
                call = replace(call, request=replace(call.request, request_id=request_id))
                answer.encoder = self._dialect.encoder(call, AnswerHeading(request_id, target.name))
            asked = replace(call.request, options=replace(call.request.options, adapter=target.adapter))
            async with aclosing(self._dialect.events(text_session(session), asked)) as events:
                async for event in events:
                    yield event

    async def _whole(self, request: Request, answer: _Answer) -> Response:
        collected = await while_connected(request.receive, _collect(answer))
        return JSONResponse(answer.encoder.whole(collected), headers=answer.headers)

    async def _stream(self, request: Request, answer: _Answer) -> Response:
        # Until the first event a request can still be refused with an error status. Pings have to come before it while
        # a model is loaded.
        started = None if answer.waits else await while_connected(request.receive, _first(answer))
        return EventStream(
            _pieces(answer, started),
            answer.events,
            headers=answer.headers,
            ping=lambda: answer.encoder.ping(),
            ping_interval_s=self._config.ping_interval_s,
            on_disconnect=lambda: answer.record.end_answer("abort"),
            final_chunk=lambda: _final_chunk(answer),
        )


async def _pieces(answer: _Answer, started: Event | None) -> AsyncGenerator[bytes, None]:
    """The stream's bytes. The caller closes the events, which aborts an unfinished request.

    started: the first event, if the stream begins with it.
    """
    record = answer.record
    try:
        with logged_failure(record, f"the server failed; its log has the reason: {record.request_id}"):
            started = started if started is not None else await _first(answer)
            encoder = answer.encoder
            for piece in encoder.pieces(started):
                yield piece
            async for event in answer.events:
                record.take(event)
                for piece in encoder.pieces(event):
                    yield piece
            yield encoder.end()
    except HeadraceError as error:
        record.end_answer(end_of(error))
        yield _failure(answer, error)  # the status has been sent, so only an event can report the error


def _final_chunk(answer: _Answer) -> bytes:
    answer.record.end_answer("error")
    return _failure(answer, closing_error())


def _failure(answer: _Answer, error: HeadraceError) -> bytes:
    answer.record.error = error
    return answer.encoder.failure(error)


async def _collect(answer: _Answer) -> list[Event]:
    collected = []
    async with aclosing(answer.events) as events:
        async for event in events:
            answer.record.take(event)
            collected.append(event)
    return collected


async def _first(answer: _Answer) -> Event:
    event = await anext(answer.events)
    answer.record.take(event)
    return event


def end_of(error: HeadraceError) -> str:
    if isinstance(error, RequestCancelled):
        return "abort"
    return "refused" if isinstance(error, RequestError) else "error"


def session_name(request: Request, sent: str = "") -> str:
    """Names the client's session: by a header, by the field that it sent, or by its address."""
    return (session_header(request.headers) or sent or _address(request))[:_MAX_SESSION_LENGTH]


def _address(request: Request) -> str:
    return request.client.host if request.client is not None else ""
