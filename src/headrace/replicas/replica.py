"""One replica: the engine and the application of `headrace serve` in a process of Ray."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Awaitable, Callable, Mapping

from ray import serve
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.api.ids import name_replica
from headrace.config import Config
from headrace.config_loading import set_up_libraries
from headrace.errors import EngineDead
from headrace.long_work import shorten_switch_interval
from headrace.replicas.loaded import LoadedReplica
from headrace.replicas.pacing import OpenAnswers, PacedAnswer
from headrace.replicas.peers import Combine, PeerAnswer, answer_of, combine_answers, combined
from headrace.replicas.route import REPLICA_HEADER
from headrace.server.app import build_app
from headrace.server.log_format import TEXT_FORMAT, use_log_format

log = logging.getLogger("headrace.server")

_SPANS_S = 1.0
"""For the last spans to reach their collector."""

_PEERS_S = 10.0
"""For all replicas to answer what concerns them all."""


class Replica:
    """Ray makes one in each process, asks for its health, and passes requests to its application.

    load: loads the model; importable, since Ray's processes get its name. num_on_host: replicas that share a proxy.
    """

    def __init__(self, config: Config, load: Callable[[Config], LoadedReplica], num_on_host: int) -> None:
        set_up_libraries()
        logging.basicConfig(level=logging.WARNING, format=TEXT_FORMAT)
        use_log_format(config.server.log_format)
        logging.getLogger("headrace").setLevel(config.server.log_level.upper())
        shorten_switch_interval()
        self.name: str = serve.get_replica_context().replica_id.unique_id
        name_replica(self.name)
        self._config = config
        self._num_on_host = num_on_host
        self._loaded = load(config)
        # Everything loaded so far stays; see `headrace.server.run.serve`.
        gc.collect()
        gc.freeze()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Called by Ray after the constructor."""
        self._app = build_app(self._loaded.models, self._config.server)
        return ReplicaApp(self._app, self.name, self._stop, OpenAnswers(self._num_on_host))

    def check_health(self) -> None:
        """Called by Ray, which replaces the replica after an error. Raises EngineDead; a hang may end."""
        if (reason := self._loaded.models.health()) is not None:
            raise EngineDead(f"the engine is not running: {reason}")

    async def answer_peer(self, method: str, path: str, headers: Mapping[str, str]) -> PeerAnswer:
        """This replica's own answer, for another replica."""
        return await answer_of(self._app, self.name, method, path, headers)

    async def _stop(self) -> None:
        self._app.state.feed.close()
        if self._app.state.spans is not None:
            await asyncio.to_thread(self._app.state.spans.close, _SPANS_S)
        await asyncio.to_thread(self._loaded.stop)


class ReplicaApp:
    """The server's application, between Ray and its routes.

    Ray cancels requests whose client has disconnected. The application takes a cancellation for a shutdown, so it gets
    what a separate connection would give it: the message that the client has disconnected.
    """

    def __init__(self, app: Starlette, name: str, stop: Callable[[], Awaitable[None]], answers: OpenAnswers) -> None:
        self._app = app
        self._name = name
        self._stop = stop
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REPLICA_HEADER] = self._name
            await send(message)

        connection = _Connection(receive)
        asked = combined(scope["method"], scope["path"])
        app = self._app if asked is None else await _of_all(*asked, Request(scope))
        async with PacedAnswer(named, self._answers) as answer:
            working = asyncio.create_task(app(scope, connection.receive, answer.send))
            try:
                await asyncio.shield(working)
            except asyncio.CancelledError:
                connection.disconnect()
                await working
                raise

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._stop()
        await send({"type": "lifespan.shutdown.complete"})


class _Connection:
    """A request's messages, and its disconnect as soon as that is known."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._is_gone = asyncio.Event()

    def disconnect(self) -> None:
        self._is_gone.set()

    async def receive(self) -> Message:
        if self._is_gone.is_set():
            return {"type": "http.disconnect"}
        receiving = asyncio.ensure_future(self._receive())
        gone = asyncio.ensure_future(self._is_gone.wait())
        try:
            await asyncio.wait({receiving, gone}, return_when=asyncio.FIRST_COMPLETED)
            return receiving.result() if receiving.done() else {"type": "http.disconnect"}
        finally:
            receiving.cancel()
            gone.cancel()


async def _of_all(path: str, combine: Combine, request: Request) -> Response:
    """One answer of all replicas. One that ends meanwhile is left out."""
    context = serve.get_replica_context()
    handle = serve.get_deployment_handle(context.deployment, context.app_name)
    asked = handle.broadcast("answer_peer", request.method, path, dict(request.headers))
    answers = await asked.results_async(timeout_s=_PEERS_S, return_exceptions=True)
    return combine_answers([each for each in answers if isinstance(each, PeerAnswer)], combine)
