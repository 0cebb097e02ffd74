"""The `headrace` command: runs what `commands.py` lists; errors are one line."""

from __future__ import annotations

import argparse
import io
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import NoReturn

from headrace import __version__
from headrace.cli.commands import COMMANDS, find_command, listed
from headrace.cli.installed import import_command
from headrace.config import all_knobs
from headrace.config_loading import Parser, set_up_libraries
from headrace.errors import ConfigError, HeadraceError
from headrace.server.log_format import TEXT_FORMAT

_USAGE_ERROR = 2
_INTERRUPTED = 130
_PIPE_CLOSED = 141
"""Exit code for writing to a closed pipe, as shells use it: 128 plus the number of SIGPIPE."""


def main(argv: Sequence[str] | None = None, on_imported: Callable[[], object] = lambda: None) -> int:
    """Runs one command and returns the process's exit code: 0, 2 for an error, 130 after Ctrl-C.

    on_imported: called when the command's modules have been imported.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    # Our own log in full, except in a chat; of libraries only warnings.
    logging.basicConfig(level=logging.WARNING, format=TEXT_FORMAT)
    if words[:1] != ["chat"]:
        logging.getLogger("headrace").setLevel(logging.INFO)
    set_up_libraries()
    try:
        _run(words, on_imported)
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


def _run(words: Sequence[str], on_imported: Callable[[], object]) -> None:
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    if not words or words[0].startswith("-"):
        _options_parser().parse_args(words)
        raise ConfigError(f"a command is missing; commands: {', '.join(COMMANDS)}")
    command, rest = find_command(words)
    parsed = command.parse(rest)
    run = getattr(import_command(command.module), command.name)
    on_imported()
    run(parsed)


def with_flags(message: str) -> str:
    """The message with field names of knobs, like `max_model_len`, replaced by their flags."""
    flags = {each.name: each.flag for each in all_knobs() if "_" in each.name}
    # not inside a path or another name
    return re.sub(r"(?<![\w./-])[a-z]+(?:_[a-z]+)+(?![\w./-])", lambda found: flags.get(found[0], found[0]), message)


def command() -> NoReturn:
    """The `headrace` command: `main` between a terminal or pipe of any kind and the process's end."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # closed, so that a connection to another process would take its place
            os.open(os.devnull, os.O_RDWR)
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            # Model output may contain any character; a terminal without it shows a question mark.
            stream.reconfigure(errors="replace")
    try:
        code = main(on_imported=_take_interrupts)
        if sys.stdout is not None:
            sys.stdout.flush()
    except KeyboardInterrupt:  # another one, while the first was being reported
        code = _INTERRUPTED
    except ImportError:  # Ctrl-C within an extension's import comes out as this
        if signal.getsignal(signal.SIGINT) is not _end_at_once:
            raise
        code = _INTERRUPTED
    except BrokenPipeError:  # as in `headrace doctor | head`
        code = _PIPE_CLOSED
    # From here on Ctrl-C could only change the exit code.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            if stream is not None:
                stream.flush()
    # An ordinary exit would wait for worker threads, which may be stuck, and abort in the middle of MLX's work.
    os._exit(code)


def _take_interrupts() -> None:
    """Until then Ctrl-C ends the process at once, as `__main__` has it."""
    # In a chat Ctrl-C ends an answer only. Both hold even if the caller ignores it, as nohup's shell does.
    signal.signal(signal.SIGINT, signal.default_int_handler if sys.argv[1:2] == ["chat"] else _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """The first Ctrl-C ends the command in order, the next one kills the process."""
    signal.signal(number, _end_at_once)
    raise KeyboardInterrupt


def _end_at_once(number: int, frame: FrameType | None) -> NoReturn:
    os._exit(_INTERRUPTED)


def _options_parser() -> Parser:
    parser = Parser(
        prog="headrace",
        usage="headrace COMMAND [MODEL] [options]",
        description="One exact engine that serves MLX language models over HTTP.",
        epilog=f"{listed(COMMANDS)}\n\n`headrace COMMAND --help` lists a command's options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"headrace {__version__}")
    return parser
