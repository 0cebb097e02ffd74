"""The words after `headrace launch`. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from headrace.clients.record import Client
from headrace.clients.registry import CLIENTS
from headrace.config import ChatConfig, Config
from headrace.config_loading import Parser, load_config, with_suggestion
from headrace.errors import ConfigError
from headrace.knobs import knobs_of

_REMOTE = knobs_of(ChatConfig)


@dataclass(frozen=True, slots=True)
class LaunchArguments:
    """config: of a server that is started; its `chat` part names one that is used.

    serve_words: flags for a server that is started. has_serve_flags: whether they say more than its address and key.
    """

    client: Client
    config: Config
    model: str | None
    action: str
    says_yes: bool
    shows_key: bool
    serve_words: tuple[str, ...]
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
    model = [] if given.model is None else [given.model]
    remote = [word for knob in _REMOTE if knob.name in given for word in (knob.flag, getattr(given, knob.name))]
    config = _config([*model, *remote, *serve_words])
    if config.chat.url is not None:
        config = replace(config, chat=replace(config.chat, url=_normal_url(config.chat.url)))
    if given.model is None and config.model in serve_words:
        raise ConfigError(f"unknown argument {config.model}: --model names a model, {client.title}'s own follow --")
    return LaunchArguments(
        client=client,
        config=config,
        model=given.model,
        action="print" if given.print else "save" if given.save else "run",
        says_yes=given.yes,
        shows_key=given.show_key,
        serve_words=tuple(serve_words),
        has_serve_flags=_without_address(config) != _without_address(_config([*model, *remote])),
        client_words=client_words,
    )


def _config(words: Sequence[str]) -> Config:
    return load_config(words, sections=("chat", "models", "engine", "server", "media", "defaults"))


def _without_address(config: Config) -> Config:
    return replace(config, chat=ChatConfig(), server=replace(config.server, host="", port=0, api_key=None))


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
    parser.add_argument("--model", metavar="MODEL", help="model to serve, or one that the server lists")
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
