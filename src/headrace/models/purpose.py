"""What a checkpoint was made for: embedding models, rerankers and classifiers write no text, and are refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.errors import ModelError

_SENTENCE_TRANSFORMERS = ("modules.json", "config_sentence_transformers.json")

_BY_ARCHITECTURE = (
    (r"ForSequenceClassification$", "a reranker or classifier, which scores texts"),
    (r"For(Masked|Token|Question)\w+$", "an encoder, which writes no text"),
    # A transformer without an output layer. `GPT2LMHeadModel` and `ChatGLMModel` have one.
    (r"^(?!.*(LMHead|Chat|Generation))\w+Model$", "an embedding model, which turns texts into vectors"),
)

_BY_NAME = (
    (r"rerank(er)?", "a reranker"),
    (r"embed(ding)?\w*", "an embedding model"),
    (r"base", "a base model, not trained to chat"),
)


def refuse_other_purposes(name: str, directory: Path, config: Mapping[str, Any]) -> None:
    """Raise ModelError for a checkpoint whose files say that it writes no text. directory: its JSON files suffice."""
    for file in _SENTENCE_TRANSFORMERS:
        if (directory / file).is_file():
            _refuse(name, "an embedding model, which turns texts into vectors", file)
    architectures = config.get("architectures")
    for architecture in architectures if isinstance(architectures, list) else ():
        for pattern, purpose in _BY_ARCHITECTURE:
            if re.search(pattern, str(architecture)):
                _refuse(name, purpose, f"architecture {architecture}")


def _refuse(name: str, purpose: str, evidence: str) -> None:
    raise ModelError(f"{name} is {purpose} ({evidence}); headrace serves models that write text")


def purpose_by_name(name: str) -> str | None:
    """What a model's name says it is, if that is no chat model; None if the name says nothing of the kind.

    Converters often drop the files that would tell, and a base model may have a chat template.
    """
    own_name = name.rpartition("/")[2].lower()
    for pattern, purpose in _BY_NAME:
        if re.search(rf"(?:^|[-_.]){pattern}(?:[-_.]|$)", own_name):
            return purpose
    return None
