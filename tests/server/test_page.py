"""The page's routes: who may read them, their headers, and the switch."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import httpx
import pytest
from fakes import END, FakeEngine, app_over, fake_session

import headrace
from headrace.config import ServerConfig

KEY = "a-key"
FILES = sorted(path.name for path in (Path(headrace.__file__).parent / "page").iterdir() if path.suffix != ".py")
FILES = [name for name in FILES if "." in name]


def send(
    path: str, *, method: str = "GET", config: ServerConfig | None = None, url: str = "http://localhost:8080", **fields
) -> httpx.Response:
    app = app_over(fake_session(FakeEngine("hi", (END,))), config or ServerConfig())

    async def exchange() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=url) as client:
            return await client.request(method, path, **fields)

    return asyncio.run(exchange())


@pytest.mark.parametrize("path", ["/", *(f"/page/{name}" for name in FILES)])
def test_files_need_no_key_and_allow_nothing_inline(path: str) -> None:
    response = send(path, config=ServerConfig(api_key=KEY))
    assert response.status_code == 200
    policy = dict(part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'self'"
    assert "unsafe" not in response.headers["content-security-policy"]
    assert "script-src" not in policy
    assert response.headers["x-content-type-options"] == "nosniff"


def test_everything_else_needs_the_key() -> None:
    assert send("/v1/models", config=ServerConfig(api_key=KEY)).status_code == 401
    assert send("/page/../v1/models", config=ServerConfig(api_key=KEY)).status_code == 401
    assert send("/page/%2e%2e/v1/models", config=ServerConfig(api_key=KEY)).status_code == 404


def test_no_other_file_is_served() -> None:
    for name in ("__init__.py", "files.py", "..%2fconfig.py", "%2e%2e%2fconfig.py", "nothing.js"):
        assert send(f"/page/{name}").status_code == 404


def test_an_unchanged_file_is_not_sent_again() -> None:
    first = send("/page/style.css")
    again = send("/page/style.css", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert send("/page/style.css", headers={"if-none-match": '"another"'}).content == first.content


def test_files_name_no_other_origin() -> None:
    for name in FILES:
        text = send(f"/page/{name}").text.replace("http://www.w3.org/2000/svg", "")
        assert re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}", text) == []


def test_the_page_can_be_switched_off() -> None:
    for path in ("/", "/page/app.js"):
        response = send(path, config=ServerConfig(page="off"))
        assert response.status_code == 404
        assert "--page off" in response.json()["error"]["message"]


def test_the_page_may_call_its_own_server_and_no_other_port() -> None:
    def status(origin: str, **fields) -> int:
        return send("/v1/models", headers={"origin": origin}, **fields).status_code

    assert status("http://localhost:8080") == 200
    assert status("http://localhost:9090") == 403
    assert status("http://evil.example") == 403
    assert status("null") == 403
    # The name of another page that was made to lead here: the host is refused.
    assert status("http://evil.example:8080", url="http://evil.example:8080") == 403


def test_markdown_becomes_a_fragment_under_the_same_policy() -> None:
    response = send("/v1/markdown", method="POST", json={"text": "**a** <b>", "zeal": 1})
    assert (response.status_code, response.text) == (200, "<p><strong>a</strong> &lt;b&gt;</p>\n")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.headers["content-security-policy"] == send("/").headers["content-security-policy"]
    assert response.headers["x-headrace-ignored"] == "zeal"


@pytest.mark.parametrize(
    ("body", "param"), [({}, "text"), ({"text": 1}, "text"), ({"text": "x" * 600_000}, "text"), ([], None)]
)
def test_markdown_of_a_wrong_body_is_refused_by_its_field(body: object, param: str | None) -> None:
    response = send("/v1/markdown", method="POST", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_markdown_needs_the_key_and_the_page() -> None:
    assert send("/v1/markdown", method="POST", json={"text": "a"}, config=ServerConfig(api_key=KEY)).status_code == 401
    assert send("/v1/markdown", method="POST", json={"text": "a"}, config=ServerConfig(page="off")).status_code == 404
