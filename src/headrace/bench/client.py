"""A client of one server."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import httpx

from headrace.bench.answer import Answer, AnswerReader, TokenCounter, TokenSource, error_text
from headrace.bench.event_stream import EventStreamReader
from headrace.bench.plan import Target
from headrace.errors import ConfigError

Message = Mapping[str, str]

_CONNECT_TIMEOUT_S = 10.0
_SHOWN_BODY_CHARACTERS = 300


class BenchClient:
    """Sends requests to one target; call `aclose` in the end.

    timeout_s: longest silence within an answer. count_tokens: for answers without usage; counted_by: its name.
    """

    def __init__(
        self, target: Target, timeout_s: float, count_tokens: TokenCounter, counted_by: TokenSource = "estimate"
    ) -> None:
        self.target = target
        self.model = target.model or ""
        self._count_tokens = count_tokens
        self._counted_by: TokenSource = counted_by
        self._http = httpx.AsyncClient(
            base_url=target.url,
            headers={} if target.api_key is None else {"Authorization": f"Bearer {target.api_key}"},
            timeout=httpx.Timeout(timeout_s, connect=_CONNECT_TIMEOUT_S, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            # A proxy from the environment would be measured with the server.
            trust_env=False,
        )

    async def aclose(self) -> None:
        await self._http.aclose()

    async def prepare(self) -> str | None:
        """Find the model if none was named; returns the `server` header, if there is one.

        Raises ConfigError when the server can't be reached or wants another key, or when no model was named and it
        lists none.
        """
        server: str | None = None
        try:
            response = await self._http.get("/v1/models")
            server = response.headers.get("server")
            if response.status_code == httpx.codes.UNAUTHORIZED:
                given = "authorization" in self._http.headers
                raise ConfigError.of_key(self.target.url, "--api-key", is_given=given)
            self.model = self.model or str(response.json()["data"][0]["id"])
        except httpx.ConnectError as error:
            raise ConfigError(
                f"{self.target.label}: nothing answers at {self.target.url} ({_reason(error)})"
            ) from error
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            # Some servers can't list models, and need not if one was named.
            if not self.model:
                note = f"{self.target.url}/v1/models lists no model ({_reason(error)})"
                raise ConfigError(
                    f"{self.target.label}: {note}; name one with --model or --peer LABEL=URL,MODEL"
                ) from error
        return server

    async def ask(
        self, messages: Sequence[Message], max_tokens: int, began_s: float, on_text: Callable[[], None] = lambda: None
    ) -> Answer:
        """One streamed chat completion at temperature 0. Never raises for the server's faults: see Answer.error.

        began_s: `time.perf_counter()` when the round began. on_text: called once, at the first text.
        """
        body = {
            "model": self.model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        reader = AnswerReader(time.perf_counter() - began_s, self._count_tokens, self._counted_by)
        try:
            async with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                if refusal := await _refusal(response):
                    reader.fail(refusal)
                else:
                    await _read(response, reader, began_s, on_text)
        except httpx.HTTPError as error:
            reader.fail(_reason(error))
        return reader.answer(time.perf_counter() - began_s)


async def _refusal(response: httpx.Response) -> str | None:
    is_stream = response.headers.get("content-type", "").startswith("text/event-stream")
    if response.status_code == httpx.codes.OK and is_stream:
        return None
    text = (await response.aread()).decode("utf-8", "replace")
    with suppress(ValueError):
        text = error_text(json.loads(text))
    note = "" if response.status_code != httpx.codes.OK else "the answer is no event stream: "
    return f"status {response.status_code}: {note}{text[:_SHOWN_BODY_CHARACTERS]}"


async def _read(response: httpx.Response, reader: AnswerReader, began_s: float, on_text: Callable[[], None]) -> None:
    events = EventStreamReader()
    async for piece in response.aiter_bytes():
        now_s = time.perf_counter() - began_s
        for data in events.push(piece):
            _take(reader, data, now_s, on_text)
    for data in events.finish():
        _take(reader, data, time.perf_counter() - began_s, on_text)


def _take(reader: AnswerReader, data: str, now_s: float, on_text: Callable[[], None]) -> None:
    had_text = reader.has_text
    reader.take(data, now_s)
    if reader.has_text and not had_text:
        on_text()


def _reason(error: Exception) -> str:
    """httpx leaves some of its messages empty."""
    return str(error) or type(error).__name__
