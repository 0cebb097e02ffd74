"""GET / and its static files: the page, a client of the public routes like any other."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.config import ServerConfig
from headrace.errors import NotFound
from headrace.page.files import page_files

_POLICY = (
    "default-src 'self'; img-src 'self' blob: data:; media-src 'self' blob: data:; object-src 'none'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types markdown"
)
"""Nothing inline and nothing of other origins. blob: and data: are the pictures and videos of a chat. Only Markdown's
policy, in api.js, may turn text into HTML."""

_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    # An update of the server is seen at once; unchanged files cost a 304.
    "cache-control": "no-cache",
}


def page_routes(config: ServerConfig) -> list[Route]:
    if config.page == "off":
        return [Route("/", _off), Route("/page/{name}", _off)]
    return [Route("/", _file), Route("/page/{name}", _file)]


_FILES = page_files()


async def _file(request: Request) -> Response:
    name = request.path_params.get("name", "index.html")
    file = _FILES.get(name)
    if file is None:
        raise NotFound(f"the page has no file {name!r}")
    headers = {**_HEADERS, "etag": file.etag}
    if file.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(file.data, headers=headers, media_type=file.media_type)


async def _off(request: Request) -> Response:
    raise NotFound("this server has no page: it runs with --page off")
