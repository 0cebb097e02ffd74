"""What a server says of itself at start-up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes import FakeEngine, PlainTemplate, describe, fake_session

from headrace.backend.device import Device
from headrace.cli import startup
from headrace.cli.startup import summary
from headrace.config import Config, EngineConfig
from headrace.session.session import Session

DEFAULT = Config()


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "current", lambda: Device("cpu", "Some CPU", 16_000_000_000, 4))
    monkeypatch.setattr(startup, "compiler", lambda: "/usr/bin/g++")


def lines(session: Session, config: Config = DEFAULT) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in summary(config, session))


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
    monkeypatch.setattr(startup, "compiler", lambda: None)
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
