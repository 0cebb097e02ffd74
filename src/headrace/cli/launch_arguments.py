"""The words after `headrace launch`. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from headrace.cli.serve_plan import read_plan
from headrace.clients.record import Client
from headrace.clients.registry import CLIENTS
from headrace.config import ChatConfig, ServerConfig
from headrace.config_loading import Parser, load_config, parse_served, with_suggestion
from headrace.errors import ConfigError
from headrace.knobs import knobs_of

_REMOTE = knobs_of(ChatConfig)

_ADDRESS = {"host", "port", "api_key"}
"""Flags that also find a server which runs."""


@dataclass(frozen=True, slots=True)
class LaunchArguments:
    """chat: names a server to use. server: of one that runs already, or is started.

    model: as given. serve_words: for a server that is started. num_models: that it would serve. first_model: the one
    that the client would use of them. has_serve_flags: whether more than an address and a key is given for it.
    """

    client: Client
    chat: ChatConfig
    server: ServerConfig
    model: str | None
    action: str
    says_yes: bool
    shows_key: bool
    serve_words: tuple[str, ...]
    num_models: int
    first_model: str
    has_serve_flags: bool
    client_words: tuple[str, ...]


def parse_launch(words: Sequence[str]) -> LaunchArguments:
    """Raises ConfigError, and SystemExit after `--help`."""
    end = words.index("--") if "--" in words else len(words)
    own, client_words = list(words[:end]), tuple(words[end + 1 :])
    parser = _parser()
    if own[:1] in (["-h"], ["--help"]):
        parser.parse_args(own)
    if not own:
        raise ConfigError(f"a client is missing; clients: {', '.join(CLIENTS)}")
    client = _client(own.pop(0))
    given, serve_words = parser.parse_known_args(own)
    for flag, needed in (("yes", "save"), ("show_key", "print")):
        if getattr(given, flag) and not getattr(given, needed):
            raise ConfigError(f"--{flag.replace('_', '-')} has no effect without --{needed}")
    remote = [word for knob in _REMOTE if knob.name in given for word in (knob.flag, getattr(given, knob.name))]
    chat = load_config(remote, program=parser.prog, sections=("chat",)).chat
    if chat.url is not None:
        chat = replace(chat, url=_normal_url(chat.url))
    named, flags = parse_served(serve_words, program=parser.prog, about="")
    if named:
        raise ConfigError(f"unknown argument {named[0]}: --model names a model, {client.title}'s own follow --")
    plan = read_plan([*given.model, *serve_words])
    first = plan.models[0]
    first_model = given.model[0] if given.model else first.names[0] if first.names else first.config.model
    return LaunchArguments(
        client=client,
        chat=chat,
        server=plan.config.server,
        model=given.model[0] if given.model else None,
        action="print" if given.print else "save" if given.save else "run",
        says_yes=given.yes,
        shows_key=given.show_key,
        serve_words=(*(given.model or [first_model]), *serve_words),
        num_models=len(plan.models),
        first_model=first_model,
        has_serve_flags=len(given.model) > 1 or not _ADDRESS.issuperset(flags),
        client_words=client_words,
    )


def _client(name: str) -> Client:
    if name not in CLIENTS:
        message = with_suggestion(f"there is no client {name!r}", name, CLIENTS)
        raise ConfigError(f"{message}; clients: {', '.join(CLIENTS)}")
    return CLIENTS[name]


def _normal_url(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url must begin with http:// or https://, not {url!r}")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _parser() -> Parser:
    parser = Parser(
        prog="headrace launch",
        usage="headrace launch CLIENT [options] [options of headrace serve] [-- CLIENT's own arguments]",
        description="Start a client with settings for this run only, connected to a server: the one that --url names, "
        "else one that answers at --host and --port, else a new one, which ends with the client. "
        f"CLIENT: {', '.join(CLIENTS)}.",
        allow_abbrev=False,
    )
    for knob in _REMOTE:
        knob.add_to(parser)
    parser.add_argument(
        "--model",
        metavar="MODEL",
        action="append",
        default=[],
        help="model to serve, or one that the server lists; repeatable for a new server. The client gets the "
        "first one, and without it the first of --models-file or --models-dir",
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--print", action="store_true", help="print the settings instead of starting the client")
    action.add_argument(
        "--save",
        action="store_true",
        help="keep the settings in files of their own beside the client's, after showing what would change, and print "
        "how to start the client with them",
    )
    parser.add_argument("--yes", action="store_true", help="save without asking")
    parser.add_argument("--show-key", action="store_true", help="print the key too")
    return parser
