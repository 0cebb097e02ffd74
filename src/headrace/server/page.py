"""The page at / and its static files, and POST /v1/markdown for it. It is a client of the public routes otherwise."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.api.json_body import StrictBody, check, ignored_names, read_object, unknown_fields
from headrace.cancellation import run_in_thread
from headrace.config import ServerConfig
from headrace.errors import NotFound
from headrace.page.files import page_files
from headrace.page.markdown import MAX_CHARS, render_apart, warm
from headrace.server.bookkeeping import UnknownFields
from headrace.server.connection import while_connected
from headrace.server.responses import ignored_headers, read_call

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

# JSON may write a character as an escaped pair of 12 bytes.
_MAX_MARKDOWN_BYTES = 12 * MAX_CHARS + 1024


class MarkdownBody(StrictBody):
    text: str


class PageRoutes:
    def __init__(self, config: ServerConfig, ignored: UnknownFields) -> None:
        self._files = page_files()
        self._ignored = ignored
        self._is_warm = False
        self.routes = [Route("/", _off), Route("/page/{name}", _off)]
        if config.page == "on":
            self.routes = [
                Route("/", self.index),
                Route("/page/{name}", self.file),
                Route("/v1/markdown", self.markdown, methods=["POST"]),
            ]

    async def index(self, request: Request) -> Response:
        if not self._is_warm:
            self._is_warm = True
            warm()
        return self._answer(request, "index.html")

    async def file(self, request: Request) -> Response:
        return self._answer(request, request.path_params["name"])

    def _answer(self, request: Request, name: str) -> Response:
        file = self._files.get(name)
        if file is None:
            raise NotFound("the page has no file of this name")
        headers = {**_HEADERS, "etag": file.etag}
        if file.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(file.data, headers=headers, media_type=file.media_type)

    async def markdown(self, request: Request) -> Response:
        """An answer's Markdown as HTML for the page, with all HTML in it escaped."""
        body = await read_call(request, _read_markdown, _MAX_MARKDOWN_BYTES)
        ignored = ignored_names(unknown_fields(body))
        self._ignored.add(ignored)
        html = await while_connected(request.receive, run_in_thread(render_apart, body.text))
        return Response(html, media_type="text/html", headers={**_HEADERS, **ignored_headers(ignored)})


def _read_markdown(body: bytes) -> MarkdownBody:
    """Raises InvalidRequest."""
    return check(MarkdownBody, read_object(body))


async def _off(request: Request) -> Response:
    raise NotFound("this server has no page: it runs with --page off")
