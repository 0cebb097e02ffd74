"""The tiny embedding models and rerankers of `data/embedding`, and what sentence-transformers computes with them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.config import Config, EngineConfig
from headrace.engine.engine import Engine
from headrace.session.embeddings import EmbeddingSession

FOLDER = Path(__file__).parent / "data" / "embedding"

EXPECTED: dict[str, Any] = json.loads((FOLDER / "expected.json").read_text(encoding="utf-8"))

TEXTS: list[str] = EXPECTED["texts"]

PAIRS: list[tuple[str, str]] = [(query, document) for query, document in EXPECTED["pairs"]]


@contextmanager
def embedding_session(name: str | Path, **engine: Any) -> Iterator[EmbeddingSession]:
    """name: of a checkpoint in FOLDER, or another folder. engine: knobs."""
    launched = Engine.launch(Config(str(FOLDER / name), engine=EngineConfig(**engine)))
    try:
        yield EmbeddingSession.for_engine(launched)
    finally:
        launched.stop()
