"""`headrace serve`: what it prints, and how it starts and ends."""

from __future__ import annotations

import asyncio
import json
import shlex
import socket
from dataclasses import replace

import httpx
import pytest
from fakes import END, FakeEngine, FakeProcess, PlainTemplate, describe, fake_session
from loopback import serving

from headrace.cli import serve, serve_models
from headrace.cli.serve import summary
from headrace.cli.serve_plan import PlannedModel, ServePlan
from headrace.config import Config, EngineConfig, ServerConfig
from headrace.errors import ConfigError, ModelError
from headrace.session.model_entry import ModelEntry, ModelSource
from headrace.session.models import Models
from headrace.session.session import Session
from headrace.types.model import ModelOutline
from headrace.types.status import DeviceStatus

DEFAULT = Config()


def alone(config: Config) -> ServePlan:
    return ServePlan(config, (PlannedModel((), config, is_kept=False, starts=True),))


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "compiler", lambda: "/usr/bin/g++")
    monkeypatch.setattr(serve.os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(serve, "num_usable_cores", lambda: 8)
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)


def lines(session: Session, config: Config = DEFAULT) -> dict[str, str]:
    device = DeviceStatus("cpu", "Some CPU", 16_000_000_000, 4)
    return dict(line.split(": ", 1) for line in summary(config, session, device))


def test_a_model_that_lacks_nothing() -> None:
    report = ("device: x", "drafts: up to 4 at once, by the head")
    model = replace(describe(max_model_len=4096), report=report, takes_media=True, config={"vision_config": {"x": 1}})
    said = lines(fake_session(FakeEngine(model=model)))
    assert said["model"] == "fake-model (fake) on Some CPU (cpu), 16.0 GB"
    assert said["context"].startswith("4096 tokens")
    assert said["can do"].split(", ") == [
        *("chats and completions", "thinking", "tool calls", "structured output", "images and videos"),
        *("speculative decoding", "prefix caching"),
    ]
    assert said["missing"] == "nothing"


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "compiler", lambda: None)
    template = PlainTemplate()
    template.exists = False
    model = replace(describe(), config={"vision_config": {"x": 1}}, report=("drafts: none, as configured",))
    said = lines(fake_session(FakeEngine(model=model), template), Config(engine=EngineConfig(prefix_cache="off")))
    assert said["can do"] == "completions, thinking, structured output"
    assert "this is a base model" in said["missing"]
    assert "images and videos" in said["missing"]
    assert "C++ compiler" in said["missing"]


def test_a_name_that_is_of_no_chat_model_is_taken_at_its_word() -> None:
    for name, purpose in (("Qwen3-Reranker-4B", "a reranker"), ("Qwen3-4B-Base", "a base model, not trained to chat")):
        said = lines(fake_session(FakeEngine(model=replace(describe(), name=name))))
        assert said["missing"] == f"a purpose for chats: by its name this is {purpose}"


@pytest.mark.parametrize("takes_chats", [True, False])
def test_the_curl_line_that_is_printed_works_as_it_stands(takes_chats: bool) -> None:
    async def scenario() -> httpx.Response:
        template = PlainTemplate()
        template.exists = takes_chats
        session = fake_session(FakeEngine("Paris", (END,)), template)
        async with serving(session) as url:
            text = serve.ready_text(Config(), url, session, session.model.name)
            words = shlex.split(next(line for line in text.splitlines() if line.startswith("curl ")))
            assert words[1] == "-N"
            name, _, value = words[words.index("-H") + 1].partition(": ")
            async with httpx.AsyncClient() as client:
                return await client.post(words[2], content=words[words.index("-d") + 1], headers={name: value})

    response = asyncio.run(scenario())
    assert response.status_code == 200
    chunks = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
    choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
    said = [choice["delta"].get("content", "") if takes_chats else choice["text"] for choice in choices]
    assert "".join(said) == "Paris"


def test_the_key_is_not_printed() -> None:
    config = Config(server=ServerConfig(api_key="secret", served_model_name=("mine",)))
    text = serve.ready_text(config, "http://127.0.0.1:1", fake_session(FakeEngine()), "mine")
    assert "secret" not in text
    assert "Authorization: Bearer YOUR_KEY" in text
    assert '"mine"' in text


@pytest.mark.parametrize("page", ["on", "off"])
def test_the_page_is_named_where_there_is_one(page: str) -> None:
    config = Config(server=ServerConfig(page=page))
    text = serve.ready_text(config, "http://127.0.0.1:1", fake_session(FakeEngine()), "mine")
    assert ("in a browser: http://127.0.0.1:1\n" in text) == (page == "on")


def test_all_models_are_named_and_the_line_asks_one_that_is_loaded() -> None:
    source = ModelSource("", lambda: 0, lambda share: fake_session(FakeEngine()), ModelOutline)
    _, loaded, _ = entries = [ModelEntry((name,), source) for name in ("asleep", "loaded", "failed")]
    assert "asleep, loaded, failed are served at http://h/v1; a request" in serve.models_text(
        DEFAULT, Models(entries, 1), "http://h"
    )
    loaded.session = fake_session(FakeEngine())
    text = serve.models_text(DEFAULT, Models(entries, 1), "http://h")
    assert text.startswith("other models: asleep, failed\nloaded is served at http://h/v1\n")
    assert '"model": "loaded"' in text
    assert "other models" not in serve.models_text(DEFAULT, Models([loaded]), "http://h")


def test_an_interrupted_server_does_not_wait_for_the_engine(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(serve, "serve", interrupt)
    with pytest.raises(KeyboardInterrupt):
        serve.run(alone(Config(server=ServerConfig(port=0))), FakeProcess())
    assert not engine.stopped


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    engine = FakeEngine("hi", model=describe(generation_config={"repetition_penalty": 1.2}))
    monkeypatch.setattr(serve_models, "load_session", lambda *_: fake_session(engine))
    return engine


@pytest.mark.parametrize("verbose", [False, True])
def test_the_summary_comes_first_and_the_address_only_once_the_server_listens(
    verbose: bool, engine: FakeEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def listen(session: object, config: ServerConfig, listener: socket.socket, announce: object) -> None:
        before = capsys.readouterr().out
        assert ("repetition_penalty 1.2" in before) == verbose
        assert before.count("\n") == 5 or verbose
        assert "curl" not in before
        announce()
        port = listener.getsockname()[1]
        assert f"http://127.0.0.1:{port}/v1" in capsys.readouterr().out

    monkeypatch.setattr(serve, "serve", listen)
    serve.run(alone(Config(server=ServerConfig(port=0, verbose=verbose))), FakeProcess())
    assert engine.stopped


def test_cores_that_other_programs_use_are_told_at_the_start(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve.os, "getloadavg", lambda: (30.0, 0.0, 0.0))
    monkeypatch.setattr(serve, "serve", lambda *_: 0.0)
    serve.run(alone(Config(server=ServerConfig(port=0))), FakeProcess())
    assert "slow: the load is 30 on 8 cores" in capsys.readouterr().out


def test_the_engine_is_stopped_when_serving_fails(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ConfigError("can't listen")

    monkeypatch.setattr(serve, "serve", fail)
    with pytest.raises(ConfigError):
        serve.run(alone(Config(server=ServerConfig(port=0))), FakeProcess())
    assert engine.stopped


def test_what_is_being_loaded_is_said_before_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve_models, "_fetch", lambda *_: 0)

    def load(*_: object) -> FakeEngine:
        raise ModelError(f"after {capsys.readouterr().out!r}")

    monkeypatch.setattr(serve_models, "load_session", load)
    with pytest.raises(ModelError, match="after 'loading some-model"):
        serve.run(alone(Config("some-model", server=ServerConfig(port=0))), FakeProcess())
