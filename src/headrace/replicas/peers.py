"""Requests that concern all replicas: metrics, the prefix cache, ending a request, and the status of each."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from headrace.api.error_bodies import openai_error
from headrace.errors import EngineDead
from headrace.metrics.prometheus import CONTENT_TYPE

_GIVEN_HEADERS = ("authorization", "x-api-key", "host", "origin", "anthropic-version")
"""What an answer depends on, besides its path."""


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    """One replica's answer."""

    replica: str
    status: int
    body: bytes

    @property
    def value(self) -> Any:
        return json.loads(self.body)


Combine = Callable[[Sequence[PeerAnswer]], Response]


def combined(method: str, path: str) -> tuple[str, Combine] | None:
    """The path that all replicas answer, and what one answer is made of theirs. None: one replica is enough."""
    if (method, path) == ("GET", "/metrics"):
        return path, _metrics
    if (method, path) == ("DELETE", "/v1/cache"):
        return path, _cleared
    if (method, path) == ("GET", "/v1/replicas"):
        return "/v1/status", _replicas
    if method == "POST" and path.startswith("/v1/requests/") and path.endswith("/cancel"):
        return path, _cancelled
    return None


async def answer_of(app: ASGIApp, replica: str, method: str, path: str, headers: Mapping[str, str]) -> PeerAnswer:
    """What this process's application answers."""
    given = {name: headers[name] for name in _GIVEN_HEADERS if name in headers}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        response = await client.request(method, path, headers=given)
    return PeerAnswer(replica, response.status_code, response.content)


def combine_answers(answers: Sequence[PeerAnswer], combine: Combine) -> Response:
    """One answer, of those that succeeded; if none did, the first error as it is. answers: may be empty."""
    if not answers:
        error = EngineDead("no replica has answered: send the request again soon")
        return JSONResponse(openai_error(error), error.status)
    good = [each for each in answers if each.status == 200]
    if not good:
        return Response(answers[0].body, answers[0].status, media_type="application/json")
    return combine(sorted(good, key=lambda each: each.replica))


def _metrics(answers: Sequence[PeerAnswer]) -> Response:
    """The samples of all replicas, each with its replica as the label `engine`."""
    families: dict[str, list[str]] = {}
    for answer in answers:
        own = answer.body.decode().replace('engine="0"', f'engine="{answer.replica}"')
        for family in own.split("# HELP ")[1:]:
            help, type, *samples = family.splitlines()
            families.setdefault(f"# HELP {help}\n{type}", []).extend(samples)
    lines = (line for heading, samples in families.items() for line in (heading, *samples))
    text = "".join(f"{line}\n" for line in lines)
    return Response(text, headers={"content-type": CONTENT_TYPE})


def _cleared(answers: Sequence[PeerAnswer]) -> Response:
    freed_bytes = sum(each.value["freed_bytes"] for each in answers)
    return JSONResponse({"object": "cache.cleared", "freed_bytes": freed_bytes})


def _cancelled(answers: Sequence[PeerAnswer]) -> Response:
    cancelled = [each for answer in answers for each in answer.value["cancelled"]]
    return JSONResponse({**answers[0].value, "cancelled": cancelled})


def _replicas(answers: Sequence[PeerAnswer]) -> Response:
    data = [{"id": each.replica, "object": "replica", "status": each.value} for each in answers]
    return JSONResponse({"object": "list", "data": data})
