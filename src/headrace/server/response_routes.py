"""/v1/responses: answers like a chat's, and stored responses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headrace.api.answer_encoder import AnswerHeading
from headrace.api.openai_models import answer_name
from headrace.api.openai_sampling import Call
from headrace.api.responses_answer import ResponsesAnswer
from headrace.api.responses_body import ResponseCall, name_own_field, read_response
from headrace.api.responses_items import count_body, deleted_body, item_page, listed_items
from headrace.config import ServerConfig
from headrace.errors import HeadraceError, InvalidRequest, UnsupportedField
from headrace.server.answers import Dialect
from headrace.server.bookkeeping import LiveRequests, UnknownFields
from headrace.server.connection import while_connected
from headrace.server.response_store import ResponseStore, StoredResponse
from headrace.server.responses import ignored_headers, read_call
from headrace.session.session import Session
from headrace.types.chat import ChatRequest
from headrace.types.events import Event


class ResponseRoutes:
    """Generates responses, from a whole conversation or continuing a stored one."""

    def __init__(
        self, session: Session, config: ServerConfig, names: tuple[str, ...], live: LiveRequests, ignored: UnknownFields
    ) -> None:
        self._session = session
        self._config = config
        self._names = names
        self._live = live
        self._ignored = ignored
        self._store = ResponseStore(config.stored_response_bytes)
        # The requests hold these strongly: what is here is being answered.
        self._open: WeakValueDictionary[str, ResponsesAnswer] = WeakValueDictionary()

    def dialect(self) -> Dialect[ChatRequest]:
        return Dialect(self._read, self._events, self._form)

    async def count_input_tokens(self, request: Request) -> Response:
        """POST /v1/responses/input_tokens: how many tokens the prompt of a response has."""
        # A prompt may be longer than the context.
        read = partial(read_response, earlier=self._store, model=replace(self._session.traits, max_model_len=None))
        call = await read_call(request, read, self._config.max_body_bytes)
        answer_name(call.model, self._names, strict=self._config.strict_model_name)
        self._ignored.add(call.ignored)
        with _own_field_names():
            token_ids = await while_connected(request.receive, self._session.tokenize_chat(call.request))
        return JSONResponse(count_body(len(token_ids)), headers=ignored_headers(call.ignored))

    async def retrieve(self, request: Request) -> Response:
        if request.query_params.get("stream", "false") != "false":
            message = "stream is not supported: events are sent once, to the client that created the response"
            raise UnsupportedField(message, param="stream")
        response_id = request.path_params["id"]
        answer = self._open.get(response_id)
        if answer is not None and answer.is_stored and answer.is_open:
            return JSONResponse(answer.so_far())
        return JSONResponse(self._store.get(response_id).response)

    async def delete(self, request: Request) -> Response:
        response_id = request.path_params["id"]
        self._store.remove(response_id)
        return JSONResponse(deleted_body(response_id))

    async def input_items(self, request: Request) -> Response:
        stored = self._store.get(request.path_params["id"])
        return JSONResponse(item_page(stored.input_items, request.query_params))

    async def cancel(self, request: Request) -> Response:
        """POST /v1/responses/{id}/cancel: ends an unfinished response. Raises InvalidRequest if it is finished."""
        response_id = request.path_params["id"]
        answer = self._open.get(response_id)
        if answer is None or not answer.is_open:
            stored = self._store.get(response_id).response
            if stored["status"] != "cancelled":
                raise InvalidRequest(f"Cannot cancel a {stored['status']} response.", param="response_id")
            return JSONResponse(stored)
        await asyncio.gather(*(self._session.abort(each) for each in self._live.work_of(response_id)))
        return JSONResponse(answer.so_far("cancelled"))

    def _read(self, body: bytes) -> ResponseCall:
        return read_response(body, self._store, self._session.traits)

    def _form(self, call: Call[ChatRequest], heading: AnswerHeading) -> ResponsesAnswer:
        assert isinstance(call, ResponseCall), "what _read gives"
        answer = ResponsesAnswer(heading, call, partial(self._remember, call) if call.store else _forget)
        self._open[heading.id] = answer
        return answer

    def _remember(self, call: ResponseCall, response: dict[str, Any]) -> None:
        self._store.add(StoredResponse(response, listed_items(call.items), response["previous_response_id"]))

    async def _events(self, request: ChatRequest) -> AsyncGenerator[Event, None]:
        with _own_field_names():
            async with aclosing(self._session.chat(request)) as events:
                async for event in events:
                    yield event


@contextmanager
def _own_field_names() -> Iterator[None]:
    try:
        yield
    except HeadraceError as error:
        name_own_field(error)
        raise


def _forget(response: dict[str, Any]) -> None:
    """Does not store a response."""
