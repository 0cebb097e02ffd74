"""`headrace serve | chat | doctor | mtp | bench`: finds the command, runs it, and says in one line what went wrong."""

from __future__ import annotations

import argparse
import io
import logging
import os
import resource
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from types import FrameType
from typing import Any, NoReturn

from headrace import __version__
from headrace.config import set_up_libraries, with_flags
from headrace.errors import ConfigError, HeadraceError
from headrace.server.log_format import TEXT_FORMAT

# Modules, not functions: importing a command imports MLX and the web framework, a second or more that `--version`,
# `--help` and a mistyped command don't have to wait for.
_COMMANDS: Mapping[str, tuple[str, str]] = {
    "serve": ("headrace.cli.serve", "serve a model over HTTP"),
    "chat": ("headrace.cli.chat", "chat with a model in the terminal"),
    "doctor": ("headrace.cli.doctor", "say what this machine can do, and how a model would run on it"),
    "mtp": ("headrace.cli.mtp", "take a model's prediction head out of a checkpoint, or measure it"),
    "bench": ("headrace.cli.bench", "measure a server, or what runs on this device, alone or beside others"),
}

_LEAST_OPEN_FILES = 4096

_USAGE_ERROR = 2
_INTERRUPTED = 130
_PIPE_CLOSED = 141
"""What a shell shows for a program that writes into a pipe which nobody reads: 128 and the number of SIGPIPE."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the process's exit code: 0, 2 for an error, 130 after Ctrl-C."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] not in _COMMANDS:
        return _without_command(arguments)
    module, _ = _COMMANDS[arguments[0]]
    # Our own log in full, except in the middle of a conversation; of the libraries only what went wrong.
    logging.basicConfig(level=logging.WARNING, format=TEXT_FORMAT)
    if arguments[0] != "chat":
        logging.getLogger("headrace").setLevel(logging.INFO)
    set_up_libraries()
    try:
        _import_command(module).run(arguments[1:])
    except HeadraceError as error:
        print(f"headrace: {with_flags(error.message)}", file=sys.stderr)
        return _USAGE_ERROR
    except KeyboardInterrupt:
        print("headrace: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except SystemExit as end:
        # argparse exits this way after --help.
        return int(end.code or 0)
    return 0


def _import_command(module: str) -> Any:
    """Raises ConfigError where mlx-lm's import fails because it asks for 4096 open files."""
    try:
        return import_module(module)
    except ValueError as error:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        if not 0 <= most < _LEAST_OPEN_FILES:
            raise
        raise ConfigError(
            f"this process may open {most} files at most (ulimit -Hn), and mlx-lm needs {_LEAST_OPEN_FILES}"
        ) from error


def command() -> NoReturn:
    """The `headrace` command: `main` between a terminal or pipe of any kind and the process's end."""
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            # Models say anything, in any language; a terminal without a character for it shows a question mark.
            stream.reconfigure(errors="replace")
    if sys.argv[1:2] != ["chat"]:  # where Ctrl-C ends an answer only
        signal.signal(signal.SIGINT, _interrupt)
    try:
        code = main()
        sys.stdout.flush()
    except KeyboardInterrupt:  # one more, while the first was being told
        code = _INTERRUPTED
    except BrokenPipeError:  # as in `headrace doctor | head`
        code = _PIPE_CLOSED
    # From here on a Ctrl-C could only spoil the exit code.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    # An ordinary exit would wait for worker threads, which may be stuck, and abort in the middle of MLX's work.
    os._exit(code)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """The first Ctrl-C ends the command in order, the next one the process, whatever it is at."""
    signal.signal(number, lambda *_: os._exit(_INTERRUPTED))
    raise KeyboardInterrupt


def _without_command(arguments: Sequence[str]) -> int:
    listed = "\n".join(f"  {name:<8}{help}" for name, (_, help) in _COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="headrace",
        usage="headrace COMMAND [MODEL] [options]",
        description="One exact engine that serves MLX language models over HTTP.",
        epilog=f"commands:\n{listed}\n\n`headrace COMMAND --help` lists a command's options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"headrace {__version__}")
    try:
        _, rest = parser.parse_known_args(arguments)
    except SystemExit as end:
        return int(end.code or 0)
    message = f"there is no command {rest[0]!r}" if rest else "a command is missing"
    print(f"headrace: {message}; commands: {', '.join(_COMMANDS)}", file=sys.stderr)
    return _USAGE_ERROR
