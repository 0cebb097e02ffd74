"""The measurement plan, checked before the first request."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from headrace.errors import ConfigError

WORKLOADS = ("short-chat", "long-prompt", "repeated-prompt", "shared-prefix", "growing-conversation", "mixed")

_MIN_PROMPT_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Target:
    """A running server.

    url: without `/v1` and without a slash at its end. model: None for the first one that the server lists.
    """

    label: str
    url: str
    model: str | None = None
    api_key: str | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """Every workload at every number of streams, `num_repeats` times on each target in turn.

    num_conversations: per level; None chooses by workload and streams.
    num_prompt_tokens: approximate, for the long prompts.
    num_turns: questions of a growing conversation.
    tokenizer: a tokenizer.json for servers without usage.
    timeout_s: longest silence within an answer.
    """

    targets: tuple[Target, ...]
    workloads: tuple[str, ...] = ("short-chat",)
    streams: tuple[int, ...] = (1, 4, 8, 16)
    num_conversations: int | None = None
    num_repeats: int = 3
    seed: int = 0
    max_tokens: int = 64
    num_prompt_tokens: int = 2500
    num_turns: int = 5
    tokenizer: Path | None = None
    timeout_s: float = 600.0

    def levels(self) -> tuple[tuple[str, int], ...]:
        """Workload and number of streams of each level. `mixed` needs a stream for each of its two kinds."""
        return tuple(
            (workload, streams)
            for workload in self.workloads
            for streams in self.streams
            if workload != "mixed" or streams > 1
        )


def check(plan: Plan) -> None:
    """Raises ConfigError that names the flag."""
    for workload in plan.workloads:
        if workload not in WORKLOADS:
            raise ConfigError(f"--workload must be all or some of {', '.join(WORKLOADS)}, not {workload!r}")
    _at_least(1, "--streams", *plan.streams)
    _at_least(1, "--requests", *(() if plan.num_conversations is None else (plan.num_conversations,)))
    _at_least(1, "--repeats", plan.num_repeats)
    _at_least(1, "--max-tokens", plan.max_tokens)
    _at_least(_MIN_PROMPT_TOKENS, "--prompt-tokens", plan.num_prompt_tokens)
    _at_least(1, "--turns", plan.num_turns)
    if not plan.timeout_s > 0:
        raise ConfigError(f"--timeout must be more than 0, not {plan.timeout_s}")
    if not plan.levels():
        raise ConfigError("--streams must hold 2 or more for the workload mixed")
    labels = [target.label for target in plan.targets]
    if len(set(labels)) < len(labels):
        raise ConfigError(f"every server needs a different label, not {', '.join(labels)}: see --label and --peer")


def parse_url(text: str, flag: str) -> str:
    """The server's root from a URL with or without `/v1`. Raises ConfigError that names the flag."""
    url = text.strip().rstrip("/").removesuffix("/v1")
    try:
        parts = urlsplit(url)
        usable = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0
    except ValueError:  # a port that is no number
        usable = False
    if not usable:
        raise ConfigError(f"{flag} must be like http://127.0.0.1:8080, not {text!r}")
    return url


def parse_peer(text: str) -> Target:
    """A target from `LABEL=URL` or `LABEL=URL,MODEL`. Raises ConfigError."""
    label, mark, rest = text.partition("=")
    url, _, model = rest.partition(",")
    if not mark or not label.strip():
        raise ConfigError(f"--peer must be LABEL=URL or LABEL=URL,MODEL, not {text!r}")
    return Target(label.strip(), parse_url(url, "--peer"), model.strip() or None)


def _at_least(minimum: int, flag: str, *numbers: int) -> None:
    for number in numbers:
        if number < minimum:
            raise ConfigError(f"{flag} must be at least {minimum}, not {number}")
