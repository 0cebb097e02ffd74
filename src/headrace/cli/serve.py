"""`headrace serve [MODEL]`."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shlex
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

from headrace.backend.device import num_usable_cores
from headrace.backend.doctor import busy_advice, compiler
from headrace.cli.progress import show_prompts
from headrace.cli.progress_line import ProgressLine
from headrace.cli.serve_models import load_first, planned_models
from headrace.cli.serve_plan import ServePlan
from headrace.config import Config, ServerConfig
from headrace.config_loading import warn_of_unknown_variables
from headrace.engine.remote import EngineProcess
from headrace.models.purpose import purpose_by_name
from headrace.server.log_format import use_log_format
from headrace.server.run import base_url, open_listener, serve
from headrace.session.embeddings import AnySession, EmbeddingSession
from headrace.session.models import Models
from headrace.session.session import Session
from headrace.types.pooling import PoolingTask
from headrace.types.status import DeviceStatus


def summary(config: Config, session: AnySession, device: DeviceStatus) -> tuple[str, ...]:
    """The model and the device, the context, what it can do, and what is missing. The address follows later."""
    model = session.model
    first = (
        f"model: {model.name} ({model.model_type}) on {device.name} ({device.kind}), {device.memory_bytes / 1e9:.1f} GB"
    )
    if isinstance(session, EmbeddingSession):
        return (
            first,
            f"context: {model.max_model_len} tokens of an input",
            f"can do: {', '.join(_pooling_abilities(session))}",
            f"assumed: {session.pooling.assumed or 'nothing'}",
        )
    lines = (
        first,
        f"context: {model.max_model_len} tokens, prompt and answer together",
        f"can do: {', '.join(_abilities(config, session))}",
        f"missing: {'; '.join(_gaps(session, device.kind)) or 'nothing'}",
    )
    return (*lines, *_handover(config.server))


def _handover(config: ServerConfig) -> Iterator[str]:
    limits = []
    if config.handover_tokens is not None:
        limits.append(f"prompts of more than {config.handover_tokens} uncached tokens")
    if config.handover_wait is not None:
        limits.append(f"requests that would wait more than {config.handover_wait:g} s")
    if config.handover is not None:
        yield f"hands over: {' and '.join(limits)}, to {config.handover}"


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


def _pooling_abilities(session: EmbeddingSession) -> Iterator[str]:
    if session.pooling.task is PoolingTask.EMBED:
        yield f"embeddings of {session.pooling.dimensions} numbers, and scores by their similarity"
    else:
        yield "reranking and scores"
    if session.pooling.prompts:
        yield f"prompts {', '.join(session.pooling.prompts)}"


def _gaps(session: Session, device_kind: str) -> Iterator[str]:
    if not session.takes_chats:
        yield "a chat template, so chats are refused: this is a base model"
    elif (purpose := purpose_by_name(session.model.name)) is not None:
        yield f"a purpose for chats: by its name this is {purpose}"
    if session.model.config.get("vision_config") and not session.model.takes_media:
        yield "images and videos"
    if device_kind == "cpu" and compiler() is None:
        yield "a C++ compiler (g++), without which a CPU runs fused operations one by one"


def ready_text(config: Config, url: str, session: AnySession, name: str) -> str:
    if isinstance(session, EmbeddingSession):
        return _pooling_ready_text(config, url, session, name)
    if session.takes_chats:
        route = "chat/completions"
        question: dict[str, Any] = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
    else:
        route, question = "completions", {"prompt": "The capital of France is"}
    command = _curl(config, f"{url}/v1/{route}", {"model": name, **question, "stream": True})
    page = f"chat with it in a browser: {url}\n" if config.server.page == "on" else ""
    return f"{name} is served at {url}/v1\n{page}\n{command}\n"


def _curl(config: Config, url: str, body: dict[str, Any]) -> str:
    words = ["curl", "-N", url, "-H", "Content-Type: application/json"]
    if config.server.api_key is not None:
        # The key itself stays out of terminals and logs.
        words += ["-H", "Authorization: Bearer YOUR_KEY"]
    return shlex.join([*words, "-d", json.dumps(body)])


def _pooling_ready_text(config: Config, url: str, session: EmbeddingSession, name: str) -> str:
    route = "embeddings"
    body: dict[str, Any] = {"model": name, "input": "The capital of France is Paris."}
    if session.pooling.task is PoolingTask.SCORE:
        route = "rerank"
        body = {
            "model": name,
            "query": "What is the capital of France?",
            "documents": ["The capital of France is Paris.", "Rain falls in spring."],
        }
    return f"{name} is served at {url}/v1\n\n{_curl(config, f'{url}/v1/{route}', body)}\n"


logger = logging.getLogger(__name__)

TERMINATED = 143
"""Exit code after SIGTERM, as shells use it."""


def run(plan: ServePlan, process: EngineProcess) -> None:
    """Loads models in a process and serves them until a signal comes. Raises ConfigError and ModelError."""
    config = plan.config
    use_log_format(config.server.log_format)
    logging.getLogger("headrace").setLevel(config.server.log_level.upper())
    warn_of_unknown_variables()
    if os.getpid() == 1:
        # In a container: for process 1 the kernel ignores signals that have no handler.
        _end_on_sigterm()
    models = planned_models(plan, process)
    with open_listener(config.server) as listener:
        try:
            load_first(models, plan)
            left_s = _serve(plan, models, listener)
        except KeyboardInterrupt:
            # A second Ctrl-C: the engine's thread would end only after its current step.
            raise
        except BaseException:
            models.stop()
            raise
        if not models.stop(left_s):
            logger.warning("the engine is still busy, the process ends without it")


def _end_on_sigterm() -> None:
    """Have a thread end the process after SIGTERM: the handler itself waits as long as native code is running."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)

    def end() -> None:
        while os.read(read_end, 1)[0] != signal.SIGTERM:
            pass
        os._exit(TERMINATED)

    threading.Thread(target=end, name="sigterm", daemon=True).start()
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(TERMINATED))


def _serve(plan: ServePlan, models: Models, listener: socket.socket) -> float:
    """Serve until a signal comes. Returns the seconds left for shutting down."""
    config = plan.config
    for line in _start_lines(plan, models):
        print(line, flush=True)
    ready = models_text(config, models, base_url(listener))
    progress, tasks = ProgressLine(), set[asyncio.Task[None]]()

    def announce() -> None:
        print(ready, flush=True)
        if progress.is_possible:
            tasks.add(asyncio.create_task(show_prompts(models, progress)))

    return serve(models, config.server, listener, announce)


def _start_lines(plan: ServePlan, models: Models) -> Iterator[str]:
    kinds = [entry.source.host.device().kind for entry in models.entries if entry.session is not None]
    if "cpu" in kinds and (advice := busy_advice(num_usable_cores(), os.getloadavg()[0])) is not None:
        yield f"slow: {advice}"
    for planned, entry in zip(plan.models, models.entries, strict=True):
        if (session := entry.session) is not None:
            if plan.config.server.verbose:
                yield from (*session.model.report, *session.notes)
            yield from summary(planned.config, session, entry.source.host.device())
        else:
            yield f"model: {entry.name}, {entry.state.value}{'' if entry.reason is None else f': {entry.reason}'}"


def models_text(config: Config, models: Models, url: str) -> str:
    entry = models.main
    if entry.session is None:
        return f"{', '.join(models.names)} are served at {url}/v1; a request loads its model\n"
    others = ", ".join(each.name for each in models.entries if each is not entry)
    also = f"other models: {others}\n" if others else ""
    return also + ready_text(config, url, entry.session, entry.name)
