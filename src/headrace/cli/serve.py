"""`headrace serve [MODEL]`."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket

from headrace.cli.defaults import server_defaults
from headrace.cli.media import media_limits, media_policy
from headrace.cli.progress import ProgressLine, Waiting, loading_text, preparing_text, show_prompts
from headrace.cli.startup import ready_text, summary
from headrace.cli.text_pipeline import configured_text_pipeline, without_missing_vision
from headrace.config import Config, warn_of_unknown_variables
from headrace.engine.engine import Engine
from headrace.server.log_format import use_log_format
from headrace.server.run import base_url, open_listener, serve
from headrace.session.session import Session
from headrace.session.text_pipeline import TextPipeline

logger = logging.getLogger(__name__)

TERMINATED = 143
"""Exit code after SIGTERM, as shells use it."""


def run(config: Config) -> None:
    """Loads the model and serves it until a signal comes. Raises ConfigError and ModelError."""
    use_log_format(config.server.log_format)
    logging.getLogger("headrace").setLevel(config.server.log_level.upper())
    warn_of_unknown_variables()
    if os.getpid() == 1:
        # In a container: for process 1 the kernel ignores signals that have no handler.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(TERMINATED))
    with open_listener(config.server) as listener:
        print(f"loading {config.model}", flush=True)  # a large one takes long, and a download longer
        with Waiting(preparing_text(config)):
            config = without_missing_vision(config)
            text = configured_text_pipeline(config)
        with Waiting(loading_text(config)):
            engine = Engine.launch(config, text.constraints)
        try:
            left_s = _serve(config, engine, text, listener)
        except KeyboardInterrupt:
            # A second Ctrl-C: the engine's thread would end only after its current step.
            raise
        except BaseException:
            engine.stop()
            raise
        if not engine.stop(left_s):
            logger.warning("the engine is still busy, the process ends without it")


def _serve(config: Config, engine: Engine, text: TextPipeline, listener: socket.socket) -> float:
    """Serve until a signal comes. Returns the seconds left for shutting down."""
    session = Session.over(
        engine,
        text,
        prepares_turns=config.engine.prefix_cache == "on",
        media=(media_policy(config.media), media_limits(config.media)),
        defaults=server_defaults(config.defaults),
    )
    details = (*engine.model.report, *session.notes) if config.server.verbose else ()
    for line in (*details, *summary(config, session)):
        print(line, flush=True)
    session.warm()
    ready = ready_text(config, base_url(listener), session)
    progress, tasks = ProgressLine(), set[asyncio.Task[None]]()

    def announce() -> None:
        print(ready, flush=True)
        if progress.is_possible:
            tasks.add(asyncio.create_task(show_prompts(session, progress)))

    return serve(session, config.server, listener, announce)
