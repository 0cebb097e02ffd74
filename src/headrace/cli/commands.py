"""The commands, and how the words after each are parsed. Imports nothing heavy: help and mistakes come at once."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.cli.launch_arguments import parse_launch
from headrace.cli.model_arguments import parse_list, parse_pull, parse_remove, parse_show
from headrace.cli.serve_plan import read_plan
from headrace.cli.service_arguments import parse_install
from headrace.config import SERVED
from headrace.config_loading import Parser, load_config, with_suggestion
from headrace.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Command:
    """module: its function `name` takes what `parse` returns. Imported only then, since it imports MLX and starlette.

    parse: raises ConfigError, and SystemExit after `--help`.
    """

    module: str
    help: str
    parse: Callable[[Sequence[str]], Any]
    name: str = "run"


@dataclass(frozen=True, slots=True)
class Group:
    """Commands under a common first word."""

    help: str
    commands: Mapping[str, Command]


def _parse_ray_serve(words: Sequence[str]) -> Any:
    return load_config(
        words,
        program="headrace ray serve",
        about="Serve a model by several replicas under Ray Serve. A conversation stays on its replica.",
        sections=(*SERVED, "replicas"),
    )


def _parse_chat(words: Sequence[str]) -> Any:
    return load_config(
        words,
        program="headrace chat",
        about="Chat with a model in the terminal. /help lists what else can be typed; Ctrl-C stops an answer.",
        sections=("chat", "models", "engine", "defaults"),
    )


def _parse_doctor(words: Sequence[str]) -> Any:
    return load_config(
        words,
        program="headrace doctor",
        about="Say what this machine can do and, with MODEL, how that model would run on it; with --ranks also how it "
        "would be split, and how fast the ranks are connected.",
        sections=("doctor", "models", "engine", "split"),
        default_model="",
    )


def _parse_mtp_extract(words: Sequence[str]) -> Any:
    parser = Parser(
        prog="headrace mtp extract",
        description="Write a checkpoint's prediction head in bfloat16 into a file that is found beside any checkpoint "
        "of the same model. Only the shards that hold the head are read, or downloaded.",
        allow_abbrev=False,
    )
    parser.add_argument("source", metavar="SOURCE", help="full-precision checkpoint: folder or Hugging Face id")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder of the checkpoint that needs the head, or a file")
    return parser.parse_args(list(words))


def _parse_mtp_check(words: Sequence[str]) -> Any:
    return load_config(
        words,
        program="headrace mtp check",
        about="Measure how often a model's prediction head is right, and say why if it hardly ever is. "
        "Ends with 1 if the head is of no use.",
        sections=("models",),
    )


def _parse_status(words: Sequence[str]) -> Any:
    parser = Parser(
        prog="headrace status",
        description="Show what a server is doing: requests, speed, prefix cache, drafts and memory. Ctrl-C ends it.",
        allow_abbrev=False,
    )
    default = "default: the one that `headrace serve` starts here"
    parser.add_argument("url", nargs="?", metavar="URL", help=f"server, like http://127.0.0.1:8080 ({default})")
    parser.add_argument("--api-key", metavar="KEY", help="its key (default: without URL that of `headrace serve`)")
    parser.add_argument("--once", action="store_true", help="print it once; so it does where output is no terminal")
    parser.add_argument("--json", action="store_true", help="print all of it once, as JSON")
    parser.add_argument(
        "--interval", metavar="S", type=_seconds, default=1.0, help="seconds between updates (default: 1)"
    )
    return parser.parse_args(list(words))


def _seconds(text: str) -> float:
    message = f"must be a number from 0.1 to 3600, not {text}"
    try:
        seconds = float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(message) from error
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(message)
    return seconds


_MTP = Group(
    "take a model's prediction head out of a checkpoint, or measure it",
    {
        "extract": Command(
            "headrace.cli.mtp", "SOURCE OUT: write a head into a file", _parse_mtp_extract, "run_extract"
        ),
        "check": Command("headrace.cli.mtp", "MODEL: measure how often a head is right", _parse_mtp_check, "run_check"),
    },
)


def _parse_nothing(about: str) -> Callable[[Sequence[str]], None]:
    def parse(words: Sequence[str]) -> None:
        Parser(prog="headrace service", description=about, allow_abbrev=False).parse_args(list(words))

    return parse


_SERVICE = Group(
    "run a server in the background from login on, by launchd or systemd",
    {
        "install": Command(
            "headrace.cli.service",
            "[MODEL…] [options of serve] [--print]: write its files and start it",
            parse_install,
            "run_install",
        ),
        "remove": Command(
            "headrace.cli.service", "stop it, delete its files", _parse_nothing("Stop and remove it."), "run_remove"
        ),
        "status": Command(
            "headrace.cli.service",
            "whether it is installed and runs",
            _parse_nothing("Say whether it is installed and runs; ends with 3 if it doesn't run."),
            "run_status",
        ),
    },
)

_RAY = Group(
    "serve a model by several replicas, on the GPUs of one host or on several hosts",
    {"serve": Command("headrace.cli.ray_serve", "[MODEL] [options of serve] [--replicas N]", _parse_ray_serve)},
)

COMMANDS: Mapping[str, Command | Group] = {
    "serve": Command("headrace.cli.serve_start", "serve models over HTTP", read_plan),
    "chat": Command("headrace.cli.chat", "chat with a model in the terminal", _parse_chat),
    "status": Command("headrace.cli.status", "show what a server is doing, live", _parse_status),
    "launch": Command("headrace.cli.launch", "start an agent or another client, connected to a server", parse_launch),
    "doctor": Command(
        "headrace.cli.doctor", "say what this machine can do, and how a model would run on it", _parse_doctor
    ),
    "pull": Command("headrace.cli.pull", "fetch models, after saying what that takes", parse_pull),
    "list": Command("headrace.cli.local_models", "list the models on this machine", parse_list, "run_list"),
    "show": Command("headrace.cli.show", "say what a model is and how it would be served", parse_show),
    "remove": Command("headrace.cli.local_models", "delete models from the caches", parse_remove, "run_remove"),
    "service": _SERVICE,
    "ray": _RAY,
    "mtp": _MTP,
    # Its module is light, and parses its own arguments.
    "bench": Command("headrace.cli.bench", "measure a server, alone or beside others", list),
}


def find_command(words: Sequence[str]) -> tuple[Command, Sequence[str]]:
    """The command that the first words name, and the words after them.

    Raises ConfigError for a mistyped one, and SystemExit after a group's `--help`.
    """
    first, rest = words[0], words[1:]
    named = _choose(COMMANDS, first, "")
    if isinstance(named, Command):
        return named, rest
    if rest[:1] in (["-h"], ["--help"]):
        print(_group_parser(first, named).format_help(), end="")
        raise SystemExit(0)
    if not rest:
        raise ConfigError(f"a command of {first} is missing; commands: {', '.join(named.commands)}")
    return _choose(named.commands, rest[0], f" of {first}"), rest[1:]


def _choose(commands: Mapping[str, Any], word: str, owner: str) -> Any:
    if word not in commands:
        message = with_suggestion(f"there is no command {word!r}{owner}", word, commands)
        raise ConfigError(f"{message}; commands: {', '.join(commands)}")
    return commands[word]


def _group_parser(name: str, group: Group) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"headrace {name}",
        usage=f"headrace {name} COMMAND …",
        description=f"{group.help.capitalize()}.",
        epilog=listed(group.commands),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )


def listed(commands: Mapping[str, Command | Group]) -> str:
    return "commands:\n" + "\n".join(f"  {name:<8}{command.help}" for name, command in commands.items())
