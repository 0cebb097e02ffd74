"""A chat with a server that speaks OpenAI's API."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any

import httpx

from headrace.bench.event_stream import EventStreamReader
from headrace.cli.chat_state import json_messages
from headrace.errors import ConfigError, GenerationFailed
from headrace.types.chat import ChatRequest
from headrace.types.events import Event, Finished, FinishReason, Reasoning, Text, Usage
from headrace.types.status import RequestStatus

_CONNECT_S = 10.0


class RemoteChat:
    """url: with or without `/v1`. model: None for the first that the server lists."""

    def __init__(self, url: str, model: str | None, key: str | None) -> None:
        self._model = model
        self.models: tuple[str, ...] = ()
        """What the server lists, as far as it was asked."""
        self._http = httpx.AsyncClient(
            base_url=url.rstrip("/").removesuffix("/v1"),
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
            # A prompt may take minutes, in which some servers say nothing.
            timeout=httpx.Timeout(None, connect=_CONNECT_S),
        )

    async def prepare(self) -> str:
        """Finds the model and returns its name.

        Raises ConfigError if the server can't be reached, doesn't serve it for chats, or lists none.
        """
        try:
            response = await self._http.get("/v1/models")
            response.raise_for_status()
            data = {str(each["id"]): each for each in response.json()["data"]}
            listed = {name: each for name, each in data.items() if _can_chat(each)}
            self.models = tuple(listed)
            if self._model is None:
                self._model = next((name for name in listed if data[name].get("state") == "loaded"), self.models[0])
            elif self._model in data and self._model not in listed:
                raise ConfigError(f"--url: {self._model} takes no chats; these do: {', '.join(listed) or 'none'}")
            elif self._model not in data:
                await self._refuse_unknown(self._model)
        except httpx.HTTPStatusError as error:
            if error.response.status_code == httpx.codes.UNAUTHORIZED:
                given = "authorization" in self._http.headers
                raise ConfigError.of_key(str(self._http.base_url), "--url-key", is_given=given) from error
            if self._model is None:
                raise ConfigError(f"--url: {_error_text(error.response.text)}") from error
        except httpx.HTTPError as error:
            raise ConfigError(f"--url: nothing answers at {self._http.base_url} ({error})") from error
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            if self._model is None:
                raise ConfigError("--url: the server lists no model for chats; name one") from error
        assert self._model is not None
        return self._model

    async def _refuse_unknown(self, name: str) -> None:
        """Servers may take names that they don't list. Raises ConfigError where Headrace says that it doesn't."""
        response = await self._http.get("/props", params={"model": name})
        if response.status_code == httpx.codes.NOT_FOUND and _error_code(response.text) == "model_not_found":
            raise ConfigError(f"--url: {_error_text(response.text)}")

    async def aclose(self) -> None:
        await self._http.aclose()

    async def requests(self) -> Sequence[RequestStatus]:
        """Other servers don't tell."""
        return ()

    async def chat(self, request: ChatRequest, settings: Mapping[str, Any]) -> AsyncGenerator[Event, None]:
        """Events of the answer. Raises GenerationFailed."""
        reader = EventStreamReader()
        end = _End()
        try:
            async with self._http.stream(
                "POST", "/v1/chat/completions", json=self._body(request, settings)
            ) as response:
                if response.status_code != httpx.codes.OK:
                    raise GenerationFailed(_error_text((await response.aread()).decode("utf-8", "replace")))
                async for piece in response.aiter_bytes():
                    for data in reader.push(piece):
                        for event in _events(data, end):
                            yield event
        except httpx.HTTPError as error:
            raise GenerationFailed(f"the connection broke ({type(error).__name__})") from error
        yield Finished(end.reason, end.usage)

    def _body(self, request: ChatRequest, settings: Mapping[str, Any]) -> dict[str, Any]:
        given = dict(settings)
        if request.enable_thinking is not None:
            given["chat_template_kwargs"] = {"enable_thinking": request.enable_thinking}
        return {
            "model": self._model,
            "messages": json_messages(request.messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            **given,
        }


def _can_chat(model: Mapping[str, Any]) -> bool:
    """Other servers than Headrace tell no capabilities, and it none of a model that was never here."""
    capabilities = model.get("capabilities")
    return not isinstance(capabilities, list) or not capabilities or "chat" in capabilities


class _End:
    """What the chunks say about the answer's end."""

    def __init__(self) -> None:
        self.reason = FinishReason.STOP
        self.usage = Usage(0, 0)


def _events(data: str, end: _End) -> Iterator[Event]:
    if data == "[DONE]":
        return
    try:
        chunk = json.loads(data)
    except ValueError as error:
        raise GenerationFailed("the server sent no JSON") from error
    if "error" in chunk:
        raise GenerationFailed(_error_text(data))
    if usage := chunk.get("usage"):
        details = usage.get("prompt_tokens_details") or {}
        end.usage = Usage(
            usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0), details.get("cached_tokens") or 0
        )
    for choice in chunk.get("choices", ()):
        delta = choice.get("delta") or {}
        if thought := delta.get("reasoning_content") or delta.get("reasoning"):
            yield Reasoning(thought)
        if text := delta.get("content"):
            yield Text(text)
        if choice.get("finish_reason") == "length":
            end.reason = FinishReason.LENGTH


def _error_code(body: str) -> object:
    """None if the body has none, as other servers' bodies."""
    try:
        return json.loads(body)["error"]["code"]
    except (ValueError, LookupError, TypeError):
        return None


def _error_text(body: str) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"the server refused: {body[:200]}"
