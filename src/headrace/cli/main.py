"""`headrace serve | chat | doctor | bench`: finds the command, runs it, and says in one line what went wrong."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module

from headrace import __version__
from headrace.config import quiet_libraries
from headrace.errors import HeadraceError

# Modules, not functions: importing a command imports MLX and the web framework, a second or more that `--version`,
# `--help` and a mistyped command don't have to wait for.
_COMMANDS: Mapping[str, tuple[str, str]] = {
    "serve": ("headrace.cli.serve", "serve a model over HTTP"),
    "chat": ("headrace.cli.chat", "chat with a model in the terminal"),
    "doctor": ("headrace.cli.doctor", "say what this machine can do, and how a model would run on it"),
    "bench": ("headrace.cli.bench", "measure a server, alone or beside others"),
}

_USAGE_ERROR = 2
_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the process's exit code: 0, 2 for an error, 130 after Ctrl-C."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] not in _COMMANDS:
        return _without_command(words)
    module, _ = _COMMANDS[words[0]]
    # Our own log in full, of the libraries only what went wrong.
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("headrace").setLevel(logging.INFO)
    quiet_libraries()
    try:
        import_module(module).run(words[1:])
    except HeadraceError as error:
        print(f"headrace: {error.message}", file=sys.stderr)
        return _USAGE_ERROR
    except KeyboardInterrupt:
        print("headrace: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except SystemExit as end:
        # argparse ends this way after --help.
        return int(end.code or 0)
    return 0


def command() -> int:
    """The `headrace` command: `main`, and the process's end after an interruption."""
    code = main()
    if code == _INTERRUPTED:
        # The engine's thread may be loading a model, in the middle of MLX's work: an ordinary exit would abort there.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _without_command(words: Sequence[str]) -> int:
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
        _, rest = parser.parse_known_args(words)
    except SystemExit as end:
        return int(end.code or 0)
    said = f"there is no command {rest[0]!r}" if rest else "a command is missing"
    print(f"headrace: {said}; commands: {', '.join(_COMMANDS)}", file=sys.stderr)
    return _USAGE_ERROR
