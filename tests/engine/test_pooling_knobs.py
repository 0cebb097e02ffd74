"""Flags of models that write text are refused for embedding models, and embedding models as drafts."""

from __future__ import annotations

from typing import Any

import pytest
from embedding_models import FOLDER

from headrace.config import Config, EngineConfig, ModelConfig
from headrace.engine.engine import Engine
from headrace.errors import ConfigError, ModelError


@pytest.mark.parametrize("name", ["qwen_embedding", "bert_mean"])
@pytest.mark.parametrize(
    ("models", "engine", "flag"),
    [
        ({"adapter": ("a=b",)}, {}, "--adapter"),
        ({}, {"draft_model": "miniature-draft"}, "--draft-model"),
        ({}, {"kv_bits": 8}, "--kv-bits"),
        ({}, {"mtp": "on"}, "--mtp"),
        ({}, {"sparse_draft": "miniature-draft"}, "--sparse-draft"),
    ],
)
def test_flags_for_text_are_refused(name: str, models: dict[str, Any], engine: dict[str, Any], flag: str) -> None:
    config = Config(str(FOLDER / name), models=ModelConfig(**models), engine=EngineConfig(**engine))
    with pytest.raises(ConfigError, match=f"{flag}: {name} gives vectors or scores, and writes no text"):
        Engine.launch(config)


@pytest.mark.parametrize("knob", ["sparse_draft", "draft_model"])
def test_an_embedding_model_drafts_nothing(knob: str) -> None:
    config = Config("miniature", engine=EngineConfig(**{knob: str(FOLDER / "qwen_embedding")}))
    with pytest.raises((ModelError, ConfigError), match="qwen_embedding gives vectors or scores, and writes no text"):
        Engine.launch(config)


def test_the_context_may_be_shorter_than_the_models_and_not_longer() -> None:
    for name, own in (("bert_mean", 48), ("qwen_embedding", 1024)):
        engine = Engine.launch(Config(str(FOLDER / name), engine=EngineConfig(max_model_len=20)))
        assert engine.model.max_model_len == 20
        engine.stop()
        with pytest.raises(ConfigError, match=f"over the model's own context of {own} tokens"):
            Engine.launch(Config(str(FOLDER / name), engine=EngineConfig(max_model_len=own + 1)))
