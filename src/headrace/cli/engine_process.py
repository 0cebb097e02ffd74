"""`python -m headrace.cli.engine_process`: the engines of a server, in a process of their own.

It ends when the connection to the server does, whatever runs.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from importlib import import_module
from logging.handlers import QueueHandler
from typing import TYPE_CHECKING

from headrace.config import Config
from headrace.config_loading import set_up_libraries
from headrace.messages import OneWayCalls
from headrace.ranks.channel import Ranks
from headrace.ranks.start import start_ranks
from headrace.server.log_format import TextLines
from headrace.types.memory import MemoryShare

if TYPE_CHECKING:
    from headrace.engine.thread import EngineThread
    from headrace.engine.turns import DeviceTurns


def main() -> None:
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)  # a service manager sends SIGTERM to all processes, and the server drains
    # The interpreter's switch interval stays long here: threads beside the engine's run while that is in MLX, which
    # gives the interpreter away several times a step.
    set_up_libraries()
    try:
        process = import_module("headrace.engine.process")
    except (ImportError, ValueError):  # the server imports the same, and reports what is missing
        return
    server = process.EngineServer(_launch)
    calls = OneWayCalls(socket.socket(fileno=int(sys.argv[1])), server)
    logging.getLogger().addHandler(_ToServer(calls))
    logging.getLogger().setLevel(logging.WARNING)
    server.serve(calls)


def _launch(config: Config, turns: DeviceTurns, share: MemoryShare | None) -> EngineThread:
    logging.getLogger("headrace").setLevel(config.server.log_level.upper())
    text = import_module("headrace.cli.configured").configured_text_pipeline(config)
    constraints = None if text is None else text.constraints
    thread: type[EngineThread] = import_module("headrace.engine.thread").EngineThread
    return thread.launch(config, constraints, turns=turns, share=share, ranks=_other_ranks(config))


def _other_ranks(config: Config) -> Ranks | None:
    """Start the processes that share the model; None where it is not split. Raises ConfigError."""
    if config.split.ranks is None:
        return None
    group = import_module("headrace.engine.group")
    group.refuse_with_ranks(config)
    ranks = start_ranks(group.ranks_layout(config.split))
    ranks.tell(config)
    return ranks


class _ToServer(QueueHandler):
    """Has the server log the records."""

    def __init__(self, calls: OneWayCalls) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self._calls = calls
        self.setFormatter(TextLines("%(message)s"))

    def enqueue(self, record: logging.LogRecord) -> None:
        self._calls.call("log", record)


if __name__ == "__main__":
    main()
    os._exit(0)
