"""GET /v1/models, /props and /version, and the routes that load and unload a model."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from headrace import __version__
from headrace.api.llama_cpp import props_body, sleeping_props
from headrace.api.openai_models import ListedModel, model_list, one_model
from headrace.config import ServerConfig
from headrace.server.connection import while_connected
from headrace.session.models import Models


def model_routes(served: Models, config: ServerConfig) -> list[Route]:
    created = int(time.time())

    async def models(request: Request) -> Response:
        return JSONResponse(model_list(_listed(served), created, config.owned_by))

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        return JSONResponse(one_model(name, _listed(served), created, config.owned_by))

    async def props(request: Request) -> Response:
        name = request.query_params.get("model")
        entry = served.main if name is None else served.resolve(name).entry
        session = entry.session
        if session is None:
            return JSONResponse(sleeping_props(entry.outline, alias=entry.name, version=__version__))
        body = props_body(
            session.model,
            session.traits.defaults,
            session.special_tokens,
            session.chat_template,
            alias=entry.name,
            max_num_seqs=(await served.status(entry)).max_num_seqs,
            version=__version__,
        )
        return JSONResponse(body)

    async def version(request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def load(request: Request) -> Response:
        entry = served.named(request.path_params["name"])
        await while_connected(request.receive, served.load(entry))
        return JSONResponse(one_model(entry.name, _listed(served), created, config.owned_by))

    async def unload(request: Request) -> Response:
        entry = served.named(request.path_params["name"])
        await while_connected(request.receive, served.unload(entry))
        return JSONResponse(one_model(entry.name, _listed(served), created, config.owned_by))

    return [
        Route("/v1/models", models),
        Route("/v1/models/{name:path}/load", load, methods=["POST"]),
        Route("/v1/models/{name:path}/unload", unload, methods=["POST"]),
        # Names may be hub ids, which contain a slash.
        Route("/v1/models/{name:path}", model),
        Route("/props", props),
        Route("/version", version),
    ]


def _listed(models: Models) -> dict[str, ListedModel]:
    return {
        name: ListedModel(entry.name, parent, entry.state, entry.reason, entry.outline)
        for entry in models.entries
        for names, parent in ((entry.names, None), (entry.adapters, entry.name))
        for name in names
    }
