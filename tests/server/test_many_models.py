"""The routes of several models: whatever they are named, who may load them, and what a stream keeps."""

from __future__ import annotations

import asyncio
import json
from urllib.parse import quote

import httpx
import pytest
from fakes import END, FakeEngine, describe, fake_session
from loopback import served, serving

from headrace.config import ServerConfig
from headrace.session.model_entry import ModelEntry, ModelSource
from headrace.session.models import Models
from headrace.session.session import Session
from headrace.types.memory import MemoryShare
from headrace.types.model import ModelOutline

ODD = (
    "org/name",
    "a%2Fb",
    "100%",
    'say "x"',
    "it's",
    "a b",
    "ünï",
    "x?y=1#z",
    "a/load",
    "load",
    "<b>",
    "a\\b",
    "{name}",
)


def entry(name: str, engine: FakeEngine | None = None) -> ModelEntry:
    def load(share: MemoryShare | None) -> Session:
        return fake_session(engine or FakeEngine(f"I am {name}", (END,), model=describe(name)))

    return ModelEntry((name,), ModelSource(name, lambda: 1, load, ModelOutline))


def chat(name: str) -> dict[str, object]:
    return {"model": name, "messages": [{"role": "user", "content": "hi"}]}


def test_any_name_is_listed_asked_loaded_and_unloaded() -> None:
    with served(Models([entry(name) for name in ODD], 100_000)) as url, httpx.Client(base_url=url) as client:
        listed = client.get("/v1/models").json()["data"]
        assert tuple(each["id"] for each in listed) == ODD
        for name in ODD:
            path = f"/v1/models/{quote(name, safe='')}"
            for route, state in (("/load", "loaded"), ("/unload", "sleeping"), ("/unload", "sleeping")):
                answer = client.post(path + route).json()
                assert (answer["id"], answer["state"]) == (name, state)
            assert client.get(path).json()["id"] == name
            assert client.get("/props", params={"model": name}).status_code == 200
            said = client.post("/v1/chat/completions", json=chat(name)).json()
            assert (said["model"], said["choices"][0]["message"]["content"]) == (name, f"I am {name}")
            assert client.get(path).json()["state"] == "loaded"
            assert client.get(path.replace("%2F", "/")).json()["id"] == name


@pytest.mark.parametrize("takes_any_name", [False, True])
def test_only_a_served_name_is_loaded_or_unloaded(takes_any_name: bool) -> None:
    with served(Models([entry("a"), entry("b")], 10_000, takes_any_name=takes_any_name)) as url:
        for route in ("load", "unload"):
            answer = httpx.post(f"{url}/v1/models/gpt-9/{route}")
            assert answer.status_code == 404
            assert answer.json()["error"]["message"] == "The model `gpt-9` does not exist; served: a, b"
            assert httpx.get(f"{url}/v1/models/a/{route}").status_code == 404
        assert [each["state"] for each in httpx.get(f"{url}/v1/models").json()["data"]] == ["sleeping", "sleeping"]


def test_loading_and_unloading_need_the_key() -> None:
    with served(Models([entry("a"), entry("b")], 10_000), ServerConfig(api_key="k")) as url:
        for route in ("load", "unload"):
            assert httpx.post(f"{url}/v1/models/a/{route}").status_code == 401
            answer = httpx.post(f"{url}/v1/models/a/{route}", headers={"Authorization": "Bearer k"})
            assert answer.status_code == 200


def test_a_model_is_not_unloaded_under_a_stream() -> None:
    async def scenario() -> None:
        engine = FakeEngine(*"abcdefgh", (END,), model=describe("a"))
        models = Models([entry("a", engine), entry("b")], 10_000)
        async with serving(models) as url, httpx.AsyncClient(base_url=url) as client:
            async with client.stream("POST", "/v1/chat/completions", json={**chat("a"), "stream": True}) as answer:
                lines = answer.aiter_lines()
                text = [await anext(lines)]
                refused = await client.post("/v1/models/a/unload")
                text += [line async for line in lines]
            if text[-2:] != ["data: [DONE]", ""]:
                raise AssertionError(text)
            chunks = [json.loads(line[6:]) for line in text if line.startswith("data: {")]
            said = "".join(each["delta"].get("content") or "" for chunk in chunks for each in chunk["choices"])
            assert said == "abcdefgh"
            # the stream may have ended before
            assert refused.status_code in (200, 400)
            assert (await client.post("/v1/models/a/unload")).json()["state"] == "sleeping"

    asyncio.run(scenario())
