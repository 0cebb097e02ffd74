"""What is printed while a server starts, in a few lines for people."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from typing import Any

from headrace.backend.device import current
from headrace.backend.doctor import compiler
from headrace.config import Config
from headrace.models.purpose import purpose_by_name
from headrace.session.session import Session


def summary(config: Config, session: Session) -> tuple[str, ...]:
    """The model and the device, the context, what it can do, and what is missing. The address follows later."""
    model, here = session.model, current()
    return (
        f"model: {model.name} ({model.model_type}) on {here.name} ({here.kind}), {here.memory_bytes / 1e9:.1f} GB",
        f"context: {model.max_model_len} tokens, prompt and answer together",
        f"can do: {', '.join(_abilities(config, session))}",
        f"missing: {'; '.join(_gaps(config, session)) or 'nothing'}",
    )


def _abilities(config: Config, session: Session) -> Iterator[str]:
    yield "chats and completions" if session.takes_chats else "completions"
    if session.traits.thinks:
        yield "thinking"
    if session.takes_tools:
        yield "tool calls"
    yield "structured output"
    if session.model.takes_media:
        yield "images and videos"
    if any(line.startswith("drafts: up to") for line in session.model.report):
        yield "speculative decoding"
    if config.engine.prefix_cache == "on":
        yield "prefix caching"


def _gaps(config: Config, session: Session) -> Iterator[str]:
    if not session.takes_chats:
        yield "a chat template, so chats are refused: this is a base model"
    elif (purpose := purpose_by_name(session.model.name)) is not None:
        yield f"a purpose for chats: by its name this is {purpose}"
    if session.model.config.get("vision_config") and not session.model.takes_media:
        yield "images and videos"
    if current().kind == "cpu" and compiler() is None:
        yield "a C++ compiler (g++), without which a CPU runs fused operations one by one"


def ready_text(config: Config, url: str, session: Session) -> str:
    """Where the server listens, and a line that can be pasted into a shell to try it."""
    name = (*config.server.served_model_name, session.model.name)[0]
    if session.takes_chats:
        route = "chat/completions"
        question: dict[str, Any] = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
    else:
        route, question = "completions", {"prompt": "The capital of France is"}
    words = ["curl", "-N", f"{url}/v1/{route}", "-H", "Content-Type: application/json"]
    if config.server.api_key is not None:
        # The key itself stays out of terminals and logs.
        words += ["-H", "Authorization: Bearer YOUR_KEY"]
    words += ["-d", json.dumps({"model": name, **question, "stream": True})]
    return f"{name} is served at {url}/v1\n\n{shlex.join(words)}\n"
