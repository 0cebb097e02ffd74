"""Routes for operators: health, status, metrics, the prefix cache, cancelling a request."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headrace import __version__
from headrace.api.loads_body import loads_body, read_sections
from headrace.api.status_body import cache_body, health_body, status_body
from headrace.config import ServerConfig
from headrace.errors import EngineDead, NotFound
from headrace.metrics.prometheus import CONTENT_TYPE, render
from headrace.metrics.stats import process_use
from headrace.server.bookkeeping import LiveRequests, RecentErrors, UnknownFields
from headrace.server.cancel import cancel_request
from headrace.server.connection import EventStream, while_connected
from headrace.server.drain import Drain
from headrace.server.handover import Handover
from headrace.server.status_stream import PING, StatusFeed, failure, joined
from headrace.session.model_entry import ModelEntry
from headrace.session.models import Models
from headrace.types.status import ProcessStatus


class OperationRoutes:
    """feed: the status for clients that watch it; to be closed at shutdown."""

    def __init__(
        self,
        models: Models,
        config: ServerConfig,
        live: LiveRequests,
        ignored: UnknownFields,
        errors: RecentErrors,
        drain: Drain,
        handover: Handover,
    ) -> None:
        self.feed = StatusFeed(self._status_body)
        self._models = models
        self._ping_interval_s = config.ping_interval_s
        self._errors = errors
        self._drain = drain
        self._live = live
        self._ignored = ignored
        self._handover = handover
        self._started = time.monotonic()

    async def health(self, request: Request) -> Response:
        """For readiness probes: 200 once steps are warm, 503 before, as SGLang has it, during the drain, and when the
        engine is dead or hangs."""
        if (reason := self._models.health()) is not None:
            raise EngineDead(f"the engine is not running: {reason}")
        self._models.refuse_if_hung()
        warm_up = self._models.warm_up_status()
        body = health_body(warm_up, is_draining=self._drain.has_begun)
        return JSONResponse(body, 200 if body["status"] == "ok" else 503)

    async def status(self, request: Request) -> Response:
        return JSONResponse(await self._status_body(since=0))

    async def status_stream(self, request: Request) -> Response:
        events = self.feed.watch()
        first = await while_connected(request.receive, anext(events))
        return EventStream(
            joined(first, events),
            events,
            headers={},
            ping=lambda: PING,
            ping_interval_s=self._ping_interval_s,
            on_disconnect=lambda: None,
            failure=failure,
        )

    async def _status_body(self, since: int) -> dict[str, Any]:
        """since: the first second of the history."""
        main = self._models.main
        others = [entry for entry in self._models.entries if entry is not main]
        found = [(entry, await self._models.status(entry)) for entry in (main, *others)]
        status = self._handover.add_to(found[0][1])
        return status_body(
            replace(status, history=status.history.since(since)),
            None if main.session is None else main.session.model,
            [(entry.status(), each) for entry, each in found],
            self._process(),
            version=__version__,
            ignored=self._ignored.counts,
            errors=self._errors.latest,
            is_draining=self._drain.has_begun,
        )

    def _process(self) -> ProcessStatus:
        cpu_s, peak_memory_bytes = process_use()
        return ProcessStatus(time.monotonic() - self._started, cpu_s, peak_memory_bytes)

    async def metrics(self, request: Request) -> Response:
        loaded = [entry for entry, _ in self._models.loaded()] or [self._models.main]
        statuses = {entry.name: await self._models.status(entry) for entry in loaded}
        first = loaded[0].name
        statuses[first] = self._handover.add_to(statuses[first])
        text = render(statuses, self._process())
        return Response(text, headers={"content-type": CONTENT_TYPE})

    async def loads(self, request: Request) -> Response:
        sections = read_sections(request.query_params)
        status = await self._models.status(self._entry(request))
        return JSONResponse(loads_body(status, sections, version=__version__, now=time.time()))

    async def cache(self, request: Request) -> Response:
        return JSONResponse(cache_body((await self._models.status(self._entry(request))).cache))

    def _entry(self, request: Request) -> ModelEntry:
        """The model in the query, else the main one. Raises ModelNotFound."""
        name = request.query_params.get("model")
        return self._models.main if name is None else self._models.resolve(name).entry

    async def clear_cache(self, request: Request) -> Response:
        return JSONResponse({"object": "cache.cleared", "freed_bytes": await self._models.clear_cache()})

    async def cancel(self, request: Request) -> Response:
        """End a request by its id or its answer's id; its own client gets an error.

        Raises NotFound unless something was ended.
        """
        id = request.path_params["id"]
        cancelled = await cancel_request(id, self._models, self._live, self._handover)
        if not cancelled:
            raise NotFound(f"no request with the id {id!r} is being worked on", param="id")
        return JSONResponse({"id": id, "object": "request.cancelled", "cancelled": cancelled})
