"""The process that runs a server's engines. It ends when the server does, even during a step."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from copy import copy
from importlib import import_module
from logging.handlers import QueueHandler
from typing import TYPE_CHECKING

from headrace.config import Config
from headrace.config_loading import set_up_libraries
from headrace.messages import OneWayCalls
from headrace.ranks.channel import Ranks
from headrace.ranks.start import start_ranks
from headrace.server.log_format import STACK, stack_without_messages
from headrace.types.memory import MemoryShare

if TYPE_CHECKING:
    from headrace.engine.thread import EngineThread
    from headrace.engine.turns import DeviceTurns


def main() -> None:
    """Command line: file descriptors of the connection, and of a pipe that is closed when the server ends."""
    connection, shutdown_pipe = int(sys.argv[1]), int(sys.argv[2])
    threading.Thread(target=_exit_with_server, args=(shutdown_pipe,), name="headrace-shutdown", daemon=True).start()
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)  # a service manager sends SIGTERM to all processes, and the server drains
    # The interpreter's switch interval stays long here: other threads run while the engine's is in MLX, which releases
    # the GIL several times a step.
    set_up_libraries()
    try:
        process = import_module("headrace.engine.process")
    except (ImportError, ValueError):  # the server imports the same, and reports what is missing
        return
    server = process.EngineServer(_launch)
    calls = OneWayCalls(socket.socket(fileno=connection), server)
    logging.getLogger().addHandler(ServerLogHandler(calls))
    logging.getLogger().setLevel(logging.WARNING)
    server.serve(calls)
    os._exit(0)


def _exit_with_server(shutdown_pipe: int) -> None:
    os.read(shutdown_pipe, 1)
    os._exit(0)


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


class ServerLogHandler(QueueHandler):
    """Sends log records to the server."""

    def __init__(self, calls: OneWayCalls) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self._calls = calls

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        record = copy(record)
        record.msg, record.args = record.getMessage(), None
        if record.exc_info and record.exc_info[1] is not None:
            setattr(record, STACK, stack_without_messages(record.exc_info[1]))
        record.exc_info = record.exc_text = None
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        self._calls.call("log", record)
