"""Finds the model of a request, and parses its body for that model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from starlette.requests import Request

from headrace.api.json_body import read_object
from headrace.errors import InvalidRequest
from headrace.server.bookkeeping import RequestRecord
from headrace.server.connection import while_connected
from headrace.server.responses import parse_body, read_body
from headrace.session.embeddings import AnySession
from headrace.session.models import Models
from headrace.session.served_models import ResolvedModel

Result = TypeVar("Result")
Parsed = TypeVar("Parsed")


class Body:
    """A request's body. value: the JSON object in it. sent: as the client sent it."""

    def __init__(self, value: Mapping[str, Any], sent: bytes) -> None:
        self.value = value
        self.sent = sent

    async def read(self, read: Callable[[Mapping[str, Any]], Parsed]) -> Parsed:
        """The parsed body. A long one is parsed in a thread."""
        return await parse_body(len(self.sent), read, self.value)

    @property
    def model(self) -> str | None:
        """Raises InvalidRequest for a name that is no text."""
        name = self.value.get("model")
        if name is not None and not isinstance(name, str):
            raise InvalidRequest("model: input should be a string", param="model")
        return name


async def read_json_body(request: Request, max_bytes: int) -> Body:
    """Raises what `read_body` raises, and InvalidRequest for anything but a JSON object."""
    data = await read_body(request, max_bytes)
    return Body(await parse_body(len(data), read_object, data), data)


async def with_model(
    request: Request, models: Models, target: ResolvedModel, work: Callable[[AnySession], Awaitable[Result]]
) -> Result:
    """Load the model if needed, and return the work's result. Raises ClientGone."""
    record: RequestRecord = request.state.record

    async def run() -> Result:
        async with models.use(target.entry, record.request_id) as session:
            return await work(session)

    return await while_connected(request.receive, run())
