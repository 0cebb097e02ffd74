"""/v1/responses: answers like a chat's, and stored responses."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headrace.api.answer_encoder import AnswerHeading
from headrace.api.foreign_answer import ForeignResponse
from headrace.api.json_body import JsonBody
from headrace.api.openai_sampling import Call
from headrace.api.responses_answer import ResponsesAnswer
from headrace.api.responses_body import ResponseCall, name_own_field, read_response
from headrace.api.responses_items import count_body, deleted_body, item_page, listed_items
from headrace.config import ServerConfig
from headrace.errors import HeadraceError, InvalidRequest, UnsupportedField
from headrace.server.answers import Dialect
from headrace.server.bookkeeping import LiveRequests, UnknownFields
from headrace.server.cancel import cancel_request
from headrace.server.handover import Handover
from headrace.server.model_calls import read_json_body, with_model
from headrace.server.response_store import ResponseStore, StoredResponse
from headrace.server.responses import ignored_headers
from headrace.session.embeddings import AnySession
from headrace.session.models import Models
from headrace.session.session import Session
from headrace.types.chat import ChatRequest
from headrace.types.events import Event
from headrace.types.model import ModelTraits


class ResponseRoutes:
    """Generates responses, from a whole conversation or continuing a stored one."""

    def __init__(
        self, models: Models, config: ServerConfig, live: LiveRequests, ignored: UnknownFields, handover: Handover
    ) -> None:
        self._models = models
        self._config = config
        self._live = live
        self._ignored = ignored
        self._handover = handover
        self._store = ResponseStore(config.stored_response_bytes)
        # The requests hold these strongly: what is here is being answered.
        self._open: WeakValueDictionary[str, ResponsesAnswer] = WeakValueDictionary()

    def dialect(self) -> Dialect[ChatRequest]:
        return Dialect(self._read, self._events, self._form, self._foreign)

    async def count_input_tokens(self, request: Request) -> Response:
        """POST /v1/responses/input_tokens: how many tokens the prompt of a response has."""
        body = await read_json_body(request, self._config.max_body_bytes)
        target = self._models.resolve(body.model)

        async def count(session: AnySession) -> tuple[int, tuple[str, ...]]:
            # A prompt may be longer than the context.
            call = await body.read(partial(self._read, model=replace(session.traits, max_model_len=None)))
            with _own_field_names():
                return len(await session.tokenize_chat(call.request)), call.ignored

        num_tokens, ignored = await with_model(request, self._models, target, count)
        self._ignored.add(ignored)
        return JSONResponse(count_body(num_tokens), headers=ignored_headers(ignored))

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
        await cancel_request(response_id, self._models, self._live, self._handover)
        return JSONResponse(answer.so_far("cancelled"))

    def _read(self, body: JsonBody, model: ModelTraits) -> ResponseCall:
        return read_response(body, self._store, model)

    def _form(self, call: Call[ChatRequest], heading: AnswerHeading) -> ResponsesAnswer:
        assert isinstance(call, ResponseCall), "what _read gives"
        before = self._open.get(heading.id)
        on_end = partial(self._remember, call) if call.store else _forget
        answer = ResponsesAnswer(heading, call, on_end, 0 if before is None else before.num_sent)
        self._open[heading.id] = answer
        return answer

    def _foreign(self, call: Call[ChatRequest]) -> ForeignResponse:
        assert isinstance(call, ResponseCall), "what _read gives"
        return ForeignResponse(partial(self._remember, call) if call.store else _forget)

    def _remember(self, call: ResponseCall, response: dict[str, Any]) -> None:
        self._store.add(StoredResponse(response, listed_items(call.items), response["previous_response_id"]))

    async def _events(self, session: Session, request: ChatRequest) -> AsyncGenerator[Event, None]:
        with _own_field_names():
            async with aclosing(session.chat(request)) as events:
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
