"""POST /v1/chat/completions, /v1/completions, /v1/responses and /v1/messages: one flow for all generating routes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from headrace.api.answer_encoder import AnswerEncoder, AnswerHeading
from headrace.api.anthropic_answer import MessagesAnswer
from headrace.api.anthropic_request import read_messages
from headrace.api.foreign_answer import ForeignAnswer, ForeignCompletion, ForeignMessage
from headrace.api.json_body import JsonBody
from headrace.api.openai_answer import ChatAnswer, CompletionAnswer
from headrace.api.openai_chat import read_chat_completion
from headrace.api.openai_completion import read_completion
from headrace.api.openai_sampling import Call
from headrace.config import ServerConfig
from headrace.errors import ContextTooLong, HeadraceError, RequestCancelled, RequestError
from headrace.server.bookkeeping import LiveRequests, RequestRecord, UnknownFields, logged_failure
from headrace.server.connection import CLIENT_CLOSED_REQUEST, ClientGone, EventStream, while_connected
from headrace.server.handover import Handover, HandoverFailed, HandoverRequest
from headrace.server.model_calls import Body, read_json_body
from headrace.server.responses import ignored_headers
from headrace.server.session_header import session_header
from headrace.session.embeddings import text_session
from headrace.session.models import Models
from headrace.session.prompts import generation_ids
from headrace.session.served_models import ResolvedModel
from headrace.session.session import Session
from headrace.types.chat import ChatRequest, CompletionRequest
from headrace.types.events import Event, Forecast
from headrace.types.model import ModelTraits

log = logging.getLogger("headrace.server")

Asked = TypeVar("Asked", bound=ChatRequest | CompletionRequest)

# Session names may be any text; names with the same first characters, up to this length, are one session.
_MAX_SESSION_LENGTH = 256


@dataclass(frozen=True, slots=True)
class Dialect(Generic[Asked]):
    """One API: how its body is read, what generates the answer, how that is encoded, and how another server's answer is
    passed on."""

    read: Callable[[JsonBody, ModelTraits], Call[Asked]]
    events: Callable[[Session, Asked], AsyncGenerator[Event, None]]
    encoder: Callable[[Call[Asked], AnswerHeading], AnswerEncoder]
    foreign: Callable[[Call[Asked]], ForeignAnswer]


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

    return Dialect(read_chat_completion, Session.chat, encoder, lambda call: ForeignAnswer())


def messages_dialect() -> Dialect[ChatRequest]:
    def encoder(call: Call[ChatRequest], heading: AnswerHeading) -> MessagesAnswer:
        return MessagesAnswer(heading)

    return Dialect(read_messages, Session.chat, encoder, lambda call: ForeignMessage())


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

    return Dialect(read_completion, Session.complete, encoder, lambda call: ForeignCompletion())


@dataclass(slots=True)
class _Answer:
    """An answer in progress.

    waits: for its model to be loaded, which `events` do first. encoder: replaced after that, because an answer may show
    defaults of its model.
    handover: to hand the request over; None if it is answered here.
    loading: the task that waits for the model of a request that may be handed over.
    refusal: the error if the request is not handed over, because it can't be answered here.
    """

    heading: AnswerHeading
    encoder: AnswerEncoder
    record: RequestRecord
    headers: dict[str, str]
    is_stream: bool
    waits: bool
    handover: HandoverRequest | None = None
    is_handed_over: bool = False
    loading: asyncio.Task[Forecast] | None = None
    refusal: ContextTooLong | None = None
    events: AsyncGenerator[Event, None] = field(init=False)

    @property
    def sender(self) -> AnswerEncoder | ForeignAnswer:
        return self.handover.foreign if self.handover is not None and self.is_handed_over else self.encoder

    def ping(self) -> bytes:
        """A keep-alive, without this answer's id while another server may answer."""
        return self.encoder.ping() if self.handover is None else self.handover.foreign.ping()

    async def aclose(self) -> None:
        """End the work on it here."""
        if self.loading is not None:
            self.loading.cancel()
            await asyncio.gather(self.loading, return_exceptions=True)
        await self.events.aclose()


class AnswerRoute(Generic[Asked]):
    """Answers the calls of one dialect, streamed or not."""

    def __init__(
        self,
        dialect: Dialect[Asked],
        models: Models,
        config: ServerConfig,
        live: LiveRequests,
        ignored: UnknownFields,
        handover: Handover,
    ) -> None:
        self._dialect = dialect
        self._models = models
        self._config = config
        self._live = live
        self._ignored = ignored
        self._handover = handover

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
        # A body that is invalid for every model is refused before one is loaded.
        traits = target.entry.traits
        call = await self._read(request, body, target, ModelTraits() if traits is None else traits)
        self._ignored.add(call.ignored)
        asked = call.request
        record.begin_answer(asked.request_id, target.name)
        num_prompts = len(asked.prompts) if isinstance(asked, CompletionRequest) else 1
        engine_ids = generation_ids(asked.request_id, num_prompts)
        self._live.attach(record.request_id, asked.request_id, engine_ids)
        heading = AnswerHeading(asked.request_id, target.name)
        encoder = self._dialect.encoder(call, heading)
        answer = _Answer(
            heading, encoder, record, ignored_headers(call.ignored), is_stream=call.stream, waits=traits is None
        )
        if asked.options.forecast_beyond is not None:
            foreign = self._dialect.foreign(call)
            answer.handover = HandoverRequest(self._handover, request, call, body, foreign, record, engine_ids)
        read = partial(self._read, request, body, target) if answer.waits else None
        answer.events = self._events(answer, target, call, read)
        return answer

    async def _read(self, request: Request, body: Body, target: ResolvedModel, traits: ModelTraits) -> Call[Asked]:
        call = await body.read(lambda value: self._dialect.read(value, traits))
        options = call.request.options
        options = replace(options, session=session_name(request, options.session), adapter=target.adapter)
        call = replace(call, request=replace(call.request, options=options))
        options = replace(options, forecast_beyond=self._handover.forecast_beyond(request, call))
        return replace(call, request=replace(call.request, options=options))

    async def _events(
        self,
        answer: _Answer,
        target: ResolvedModel,
        call: Call[Asked],
        read: Callable[[ModelTraits], Awaitable[Call[Asked]]] | None,
    ) -> AsyncGenerator[Event, None]:
        """read: parses the body for the loaded model; None if `call` was."""
        async with self._models.use(target.entry, answer.record.request_id) as session:
            if read is not None:
                call = await read(session.traits)
                call = replace(call, request=replace(call.request, request_id=answer.heading.id))
                answer.encoder = self._dialect.encoder(call, answer.heading)
            async with aclosing(self._dialect.events(text_session(session), call.request)) as events:
                async for event in events:
                    yield event

    async def _whole(self, request: Request, answer: _Answer) -> Response:
        body = await while_connected(request.receive, _collect(answer))
        return JSONResponse(body, headers=answer.headers)

    async def _stream(self, request: Request, answer: _Answer) -> Response:
        # Until the first event a request can still be refused with an error status. Pings have to come before it while
        # a model is loaded, or the other server silent.
        started = None
        if not answer.waits and not await while_connected(request.receive, _hands_over(answer)):
            started = await while_connected(request.receive, _first(answer))
        return EventStream(
            _pieces(answer, started),
            answer,
            headers=answer.headers,
            ping=answer.ping,
            ping_interval_s=self._config.ping_interval_s,
            on_disconnect=lambda: answer.record.end_answer("abort"),
            failure=lambda error: _failure(answer, error),
            sends_head_first=not answer.is_handed_over,
        )


async def _hands_over(answer: _Answer) -> bool:
    """Whether the request is handed over; if not, or if that fails, it is answered here."""
    if answer.handover is None:
        return False
    if answer.waits and answer.handover.load_limit_s is not None:
        forecast = await _forecast_soon(answer, answer.handover.load_limit_s)
    else:
        forecast = await _forecast(answer)
    if forecast is None or answer.handover.wants(forecast):
        answer.is_handed_over = True
        answer.headers = {}  # the fields that are unknown here may be known there
        return True
    answer.handover = None
    if answer.refusal is not None:
        raise answer.refusal
    return False


async def _forecast(answer: _Answer) -> Forecast:
    try:
        forecast = await anext(answer.events)
    except ContextTooLong as error:
        if error.num_tokens is None:
            raise
        answer.refusal, forecast = error, Forecast(error.num_tokens, error.num_tokens, None)
    assert isinstance(forecast, Forecast), "what was asked for"
    return forecast


async def _forecast_soon(answer: _Answer, limit_s: float) -> Forecast | None:
    """None if its model is still being loaded after so many seconds; the load goes on."""
    answer.loading = asyncio.create_task(_forecast(answer))
    await asyncio.wait({answer.loading}, timeout=limit_s)
    return answer.loading.result() if answer.loading.done() else None


async def _pieces(answer: _Answer, started: Event | None) -> AsyncGenerator[bytes, None]:
    """The stream's bytes. The caller closes the events, which aborts an unfinished request.

    started: the first event, if the stream begins with it.
    """
    record = answer.record
    with _ending(record):
        if answer.waits:
            await _hands_over(answer)
        if answer.handover is not None:
            try:
                async with aclosing(answer.handover.pieces()) as pieces:
                    is_first = True
                    async for piece in pieces:
                        if is_first:
                            await answer.aclose()  # nothing will be generated here
                            is_first = False
                        yield piece
                return
            except HandoverFailed:
                pass  # it is answered here
        started = started if started is not None else await _first(answer)
        answer.handover, encoder = None, answer.encoder
        for piece in encoder.pieces(started):
            yield piece
        async for event in answer.events:
            record.take(event)
            for piece in encoder.pieces(event):
                yield piece
        yield encoder.end()


@contextmanager
def _ending(record: RequestRecord) -> Iterator[None]:
    """Record the error that ends a stream, and log an unexpected one."""
    try:
        with logged_failure(record, f"the server failed; its log has the reason: {record.request_id}"):
            yield
    except HeadraceError as error:
        record.end_answer(end_of(error))
        raise


def _failure(answer: _Answer, error: HeadraceError) -> bytes:
    """The event for an error that ends a stream: its status has been sent."""
    answer.record.end_answer(end_of(error))
    answer.record.error = error
    return answer.sender.failure(error)


async def _collect(answer: _Answer) -> dict[str, Any]:
    """The whole answer."""
    async with aclosing(answer):
        if answer.handover is not None and await _hands_over(answer):
            with suppress(HandoverFailed):
                return await answer.handover.whole()
        collected = [await _first(answer)]
        async for event in answer.events:
            answer.record.take(event)
            collected.append(event)
    return answer.encoder.whole(collected)


async def _first(answer: _Answer) -> Event:
    if answer.loading is not None:
        await answer.loading
    if answer.refusal is not None:
        raise answer.refusal
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
