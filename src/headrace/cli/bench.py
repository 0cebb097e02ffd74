"""`headrace bench URL`: measures a server, alone or beside others."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from headrace.bench.plan import WORKLOADS, Plan, Target, check, parse_peer, parse_url
from headrace.config_loading import Parser
from headrace.errors import ConfigError, HeadraceError


def whole_numbers(text: str) -> tuple[int, ...]:
    """`1,2,4`, each once."""
    return tuple(dict.fromkeys(int(number) for number in text.split(",")))


def make_folder(file: Path) -> None:
    """Called before measuring, so that an hour of results is not lost because they can't be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--json {file} can't be written ({error})") from error


_ABOUT = """Measure a server that speaks OpenAI's chat completions: time to the first text, time per token, tokens per
second, and whether the same question at temperature 0 gets the same answer twice."""

_HIDDEN = "…"

_MOVED = ("model", "kernels")
"""Former commands, which measure without a server."""


def run(argv: Sequence[str]) -> None:
    """Print tables and write the report. Raises ConfigError, and HeadraceError when answers failed."""
    if argv and argv[0] in _MOVED:
        raise ConfigError(
            f"`headrace bench {argv[0]}` is `python -m benchmarks.{argv[0]}` now, in a checkout of Headrace's sources: "
            "see docs/benchmarks.md"
        )
    given = _parser().parse_args(list(argv))
    plan = _plan(given)
    check(plan)
    _measure(plan, given.json, ["headrace", "bench", *_without_keys(argv)])


def _measure(plan: Plan, file: Path | None, command: Sequence[str]) -> None:
    # Imported here, so that a faulty command line is reported without waiting for these.
    from headrace.bench.figures import faults
    from headrace.bench.measure import measure
    from headrace.bench.progress import ProgressBar
    from headrace.bench.rounds import total_requests
    from headrace.bench.table import tables

    if file is not None:
        make_folder(file)
    bar = ProgressBar(total_requests(plan), sys.stderr)
    try:
        levels, report = asyncio.run(measure(plan, command, bar.advance))
    finally:
        bar.close()
    print(tables(plan, levels), end="")
    if file is not None:
        file.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", "utf-8")
        print(f"\nAll numbers are in {file}")
    if failed := faults(levels):
        raise HeadraceError(f"{len(failed)} answers failed")


def _parser() -> argparse.ArgumentParser:
    defaults = Plan(())
    parser = Parser(prog="headrace bench", description=_ABOUT, allow_abbrev=False)
    parser.add_argument("url", metavar="URL", help="server, like http://127.0.0.1:8080")
    parser.add_argument("--label", metavar="NAME", default="server", help="what the tables call it (default: server)")
    parser.add_argument("--model", metavar="NAME", help="model to ask for (default: the first that the server lists)")
    parser.add_argument("--api-key", metavar="KEY", help="key sent to URL as a Bearer token")
    parser.add_argument(
        "--peer",
        metavar="LABEL=URL[,MODEL]",
        action="append",
        default=[],
        help="another server that is measured in turn with the first, repeatable; compared in a table of ratios",
    )
    parser.add_argument(
        "--workload",
        metavar="NAMES",
        default=",".join(defaults.workloads),
        help=f"all, or some of {', '.join(WORKLOADS)}, with commas (default: {','.join(defaults.workloads)})",
    )
    parser.add_argument(
        "--streams",
        metavar="NUMBERS",
        type=whole_numbers,
        default=defaults.streams,
        help=f"conversations at a time, with commas (default: {','.join(map(str, defaults.streams))})",
    )
    _add_numbers(parser, defaults)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write everything that was measured to this file")
    return parser


def _add_numbers(parser: argparse.ArgumentParser, defaults: Plan) -> None:
    numbers = (
        ("--requests", "num_conversations", "conversations of each round", "2 a stream, 1 if they grow"),
        ("--repeats", "num_repeats", "rounds of each level", defaults.num_repeats),
        ("--seed", "seed", "other seeds ask other questions", defaults.seed),
        ("--max-tokens", "max_tokens", "length of an answer at most", defaults.max_tokens),
        ("--prompt-tokens", "num_prompt_tokens", "length of long prompts, about", defaults.num_prompt_tokens),
        ("--turns", "num_turns", "questions of a growing conversation", defaults.num_turns),
    )
    for flag, name, text, shown in numbers:
        default = getattr(defaults, name)
        parser.add_argument(flag, metavar="N", dest=name, type=int, default=default, help=f"{text} (default: {shown})")
    parser.add_argument(
        "--timeout",
        metavar="S",
        dest="timeout_s",
        type=float,
        default=defaults.timeout_s,
        help=f"longest silence within an answer, in seconds (default: {defaults.timeout_s:g})",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="FILE",
        type=Path,
        help="tokenizer.json that counts the tokens of servers that don't say (default: words and marks are counted)",
    )


def _plan(given: argparse.Namespace) -> Plan:
    target = Target(given.label, parse_url(given.url, "URL"), given.model, given.api_key)
    workloads = WORKLOADS if given.workload == "all" else tuple(dict.fromkeys(given.workload.split(",")))
    return Plan(
        targets=(target, *map(parse_peer, given.peer)),
        workloads=workloads,
        streams=given.streams,
        num_conversations=given.num_conversations,
        num_repeats=given.num_repeats,
        seed=given.seed,
        max_tokens=given.max_tokens,
        num_prompt_tokens=given.num_prompt_tokens,
        num_turns=given.num_turns,
        tokenizer=given.tokenizer,
        timeout_s=given.timeout_s,
    )


def _without_keys(argv: Sequence[str]) -> list[str]:
    shown = []
    for before, word in zip(("", *argv), argv, strict=False):
        if before == "--api-key":
            word = _HIDDEN
        elif word.startswith("--api-key="):
            word = f"--api-key={_HIDDEN}"
        shown.append(word)
    return shown
