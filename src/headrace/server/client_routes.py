"""GET /v1/clients: the settings with which each client uses this server."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from headrace.clients.record import Endpoint, output_limit
from headrace.clients.registry import CLIENTS
from headrace.clients.text import client_json
from headrace.config import ServerConfig
from headrace.session.models import Models

_UNKNOWN_CONTEXT = 4096
"""Of a model that has not been loaded yet and whose files are not here."""

_KEY_TO_FILL_IN = "YOUR_KEY"


def client_routes(models: Models, config: ServerConfig) -> list[Route]:
    key = None if config.api_key is None else _KEY_TO_FILL_IN

    async def clients(request: Request) -> Response:
        url = str(request.base_url).rstrip("/")
        name = request.query_params.get("model")
        entry = models.main if name is None else models.resolve(name).entry
        context = entry.outline.max_model_len or _UNKNOWN_CONTEXT
        takes_images = "image" in entry.outline.inputs
        endpoint = Endpoint(url, entry.name, context, output_limit(context), key, takes_images)
        data = [client_json(client, endpoint) for client in CLIENTS.values()]
        return JSONResponse({"object": "list", "data": data})

    return [Route("/v1/clients", clients)]
