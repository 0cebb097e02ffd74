"""`headrace serve [MODEL]`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence

from headrace.config import Config, load_config
from headrace.engine.engine import Engine
from headrace.server.log_format import use_log_format
from headrace.server.run import base_url, open_listener, serve
from headrace.session.session import Session


def run(argv: Sequence[str]) -> None:
    """Loads the model and serves it until a signal comes. Raises ConfigError and ModelError."""
    config = load_config(argv, program="headrace serve", about="Serve a model over HTTP.")
    use_log_format(config.server.log_format)
    with open_listener(config.server) as listener:
        engine = Engine.launch(config)
        try:
            session = Session.over(engine)
            for line in (*engine.model.report, *session.notes):
                print(line, flush=True)
            ready = ready_text(config, base_url(listener), engine.model.name)
            serve(session, config.server, listener, lambda: print(ready, flush=True))
        finally:
            engine.stop()


def ready_text(config: Config, url: str, model_name: str) -> str:
    """Where the server listens, and a line that can be pasted into a shell to try it."""
    name = (*config.server.served_model_name, model_name)[0]
    body = {"model": name, "messages": [{"role": "user", "content": "What is the capital of France?"}], "stream": True}
    words = ["curl", "-N", f"{url}/v1/chat/completions", "-H", "Content-Type: application/json"]
    if config.server.api_key is not None:
        # The key itself stays out of terminals and logs.
        words += ["-H", "Authorization: Bearer YOUR_KEY"]
    words += ["-d", json.dumps(body)]
    return f"{name} is served at {url}/v1\n\n{shlex.join(words)}\n"
