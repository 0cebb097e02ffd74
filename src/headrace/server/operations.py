"""Routes for whoever runs the server: health, status, metrics, the prefix cache, and cancelling a request."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headrace import __version__
from headrace.api.status_body import cache_body, status_body
from headrace.errors import EngineDead, NotFound
from headrace.metrics.prometheus import CONTENT_TYPE, render
from headrace.server.ignored import IgnoredFields
from headrace.server.live import LiveRequests
from headrace.server.process import ProcessMeter
from headrace.session.session import Session


class OperationRoutes:
    """How the server is, and what it is doing."""

    def __init__(self, session: Session, names: tuple[str, ...], live: LiveRequests, ignored: IgnoredFields) -> None:
        self._session = session
        self._names = names
        self._live = live
        self._ignored = ignored
        self._process = ProcessMeter()

    async def health(self, request: Request) -> Response:
        """Green while the engine lives."""
        if (reason := self._session.health()) is not None:
            raise EngineDead(f"the engine is not running: {reason}")
        return JSONResponse({"status": "ok"})

    async def status(self, request: Request) -> Response:
        """Everything at once, for people and dashboards."""
        body = status_body(
            await self._session.status(),
            self._session.model,
            self._names,
            self._process.measure(),
            version=__version__,
            ignored=self._ignored.counts,
        )
        return JSONResponse(body)

    async def metrics(self, request: Request) -> Response:
        """Counters for Prometheus."""
        text = render(await self._session.status(), self._names[0], self._process.measure())
        return Response(text, headers={"content-type": CONTENT_TYPE})

    async def cache(self, request: Request) -> Response:
        """What the prefix cache holds and how often it helped."""
        return JSONResponse(cache_body((await self._session.status()).cache))

    async def clear_cache(self, request: Request) -> Response:
        """Empties the prefix cache, but for what requests are using."""
        return JSONResponse({"object": "cache.cleared", "freed_bytes": await self._session.clear_cache()})

    async def cancel(self, request: Request) -> Response:
        """Ends a request by its id (of the request or of its answer); its own client gets an error.

        Raises NotFound unless something was ended.
        """
        id = request.path_params["id"]
        work = self._live.work_of(id)
        ended = await asyncio.gather(*(self._session.abort(each) for each in work))
        cancelled = [each for each, was_running in zip(work, ended, strict=True) if was_running]
        if not cancelled:
            raise NotFound(f"no request with the id {id!r} is being worked on", param="id")
        return JSONResponse({"id": id, "object": "request.cancelled", "cancelled": cancelled})
