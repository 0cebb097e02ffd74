"""The routes and middleware as one ASGI application."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.config import ServerConfig
from headrace.config_loading import with_suggestion
from headrace.errors import HeadraceError, InvalidRequest, MethodNotAllowed, NotFound
from headrace.server.adapter_routes import AdapterRoutes
from headrace.server.answers import AnswerRoute, chat_dialect, completion_dialect, messages_dialect
from headrace.server.bookkeeping import LiveRequests, RecentErrors, RequestRecord, UnknownFields
from headrace.server.client_routes import client_routes
from headrace.server.connection import CLIENT_CLOSED_REQUEST, ClientGone
from headrace.server.drain import Drain
from headrace.server.guard import Guard, OwnNames
from headrace.server.handover import Handover
from headrace.server.model_routes import model_routes
from headrace.server.operations import OperationRoutes
from headrace.server.page import PageRoutes
from headrace.server.pooling_routes import PoolingRoutes
from headrace.server.response_routes import ResponseRoutes
from headrace.server.responses import error_response
from headrace.server.tokens import TokenRoutes
from headrace.server.tracing import request_spans
from headrace.session.models import Models


def build_app(models: Models, config: ServerConfig) -> Starlette:
    """`state.feed` is a StatusFeed, to be closed at shutdown; `state.drain` begins it.

    Raises ConfigError for an invalid allowed origin.
    """
    live = LiveRequests()
    ignored = UnknownFields()
    errors = RecentErrors()
    handover = Handover(config)
    chat = AnswerRoute(chat_dialect(config), models, config, live, ignored, handover)
    completion = AnswerRoute(completion_dialect(), models, config, live, ignored, handover)
    responses = ResponseRoutes(models, config, live, ignored, handover)
    response = AnswerRoute(responses.dialect(), models, config, live, ignored, handover)
    message = AnswerRoute(messages_dialect(), models, config, live, ignored, handover)
    own_names = OwnNames(config.host, config.allowed_origin)
    drain, spans = Drain(), request_spans(config)
    operations = OperationRoutes(models, config, live, ignored, errors, drain, handover)
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", chat.answer, methods=["POST"]),
            Route("/v1/chat/completions/{id}", _no_stored_chat, methods=["GET", "POST", "DELETE"]),
            Route("/v1/chat/completions/{id}/messages", _no_stored_chat),
            Route("/v1/completions", completion.answer, methods=["POST"]),
            Route("/v1/responses", response.answer, methods=["POST"]),
            Route("/v1/responses/input_tokens", responses.count_input_tokens, methods=["POST"]),
            Route("/v1/responses/{id}", responses.retrieve, methods=["GET"]),
            Route("/v1/responses/{id}", responses.delete, methods=["DELETE"]),
            Route("/v1/responses/{id}/cancel", responses.cancel, methods=["POST"]),
            Route("/v1/responses/{id}/input_items", responses.input_items),
            Route("/v1/messages", message.answer, methods=["POST"]),
            *_pooling_routes(PoolingRoutes(models, config, live, ignored)),
            *model_routes(models, config),
            *AdapterRoutes(models, config, ignored).routes,
            *client_routes(models, config),
            *_tokenizer_routes(TokenRoutes(models, config, ignored)),
            Route("/v1/requests/{id}/cancel", operations.cancel, methods=["POST"]),
            Route("/v1/status", operations.status),
            Route("/v1/status/stream", operations.status_stream),
            Route("/v1/cache", operations.cache, methods=["GET"]),
            Route("/v1/cache", operations.clear_cache, methods=["DELETE"]),
            Route("/v1/loads", operations.loads),
            Route("/metrics", operations.metrics),
            Route("/health", operations.health),
            *PageRoutes(config, ignored).routes,
        ],
        middleware=[Middleware(Guard, config, live, errors, own_names, drain, spans)],
        exception_handlers={
            HeadraceError: _on_error,
            HTTPException: _on_http_error,
            ClientGone: _on_disconnect,
            ClientDisconnect: _on_disconnect,
        },
    )
    # With some clients a redirect to the path without its last slash would lose the body of a POST.
    app.router.redirect_slashes = False
    app.state.feed, app.state.drain, app.state.spans = operations.feed, drain, spans
    return app


def _tokenizer_routes(tokens: TokenRoutes) -> list[Route]:
    return [
        Route("/v1/messages/count_tokens", tokens.count_message_tokens, methods=["POST"]),
        Route("/tokenize", tokens.tokenize, methods=["POST"]),
        Route("/tokenizer_info", tokens.tokenizer_info),
        Route("/detokenize", tokens.detokenize, methods=["POST"]),
    ]


def _pooling_routes(pooling: PoolingRoutes) -> list[Route]:
    """Clients of Cohere's second version have its number in the path; others have none."""
    return [
        Route("/v1/embeddings", pooling.embeddings, methods=["POST"]),
        *(Route(path, pooling.rerank, methods=["POST"]) for path in ("/v1/rerank", "/v2/rerank", "/rerank")),
        *(Route(path, pooling.score, methods=["POST"]) for path in ("/v1/score", "/score")),
    ]


async def _no_stored_chat(request: Request) -> Response:
    raise NotFound("chat completions are not stored; responses of /v1/responses are", param="completion_id")


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HeadraceError)
    record: RequestRecord = request.state.record
    record.error = error
    return error_response(error, request.url.path, request.headers)


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = await _on_error(request, _translated(request, error))
    response.headers.update(error.headers or {})
    return response


def _meant_path(request: Request) -> str | None:
    """An existing path that differs only by its prefix `/v1` (missing, repeated or superfluous) or by a last slash."""
    rest = request.url.path.rstrip("/")
    while rest.startswith("/v1/"):
        rest = rest.removeprefix("/v1")
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    candidates = (f"/v1{rest}", rest)
    return next((path for path in candidates if any(route.path_regex.match(path) for route in routes)), None)


def _translated(request: Request, error: HTTPException) -> HeadraceError:
    if error.status_code == 404:
        unknown = f"there is no route {request.url.path}"
        if (meant := _meant_path(request)) is not None:
            return NotFound(f"{unknown}; {meant} is probably meant: check the client's base URL")
        routes = [route.path for route in request.app.routes if isinstance(route, Route)]
        whole = [path for path in routes if "{" not in path and path != "/"]
        return NotFound(with_suggestion(unknown, request.url.path, whole))
    if error.status_code == 405:
        return MethodNotAllowed(f"{request.url.path} does not take {request.method}")
    return InvalidRequest(error.detail)
