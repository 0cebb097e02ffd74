"""The report as JSON: the machine, the figures, and the raw numbers behind them."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from headrace.bench.client import BenchClient
from headrace.bench.figures import Figures, faults, figures_of, kinds_of, sameness, spread
from headrace.bench.plan import Plan
from headrace.bench.rounds import PlayedLevel, PlayedRound

_PACKAGES = ("headrace", "httpx", "mlx", "mlx-lm")


def machine() -> dict[str, str | int | None]:
    """Processor, cores that this process may use, bytes of memory, system."""
    return {
        "processor": _processor(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        "system": platform.platform(),
    }


def versions() -> dict[str, str | None]:
    return {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _memory_bytes() -> int | None:
    if "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _processor() -> str:
    table = Path("/proc/cpuinfo")
    if table.is_file():
        for line in table.read_text("utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


FORMAT = 1
"""Increased when a reader of older reports would misread a new one."""

_DECIMALS = 6

SPREAD_FIGURES = ("ttft_s", "tpot_s", "gap_s", "max_gap_s", "end_to_end_s", "output_tokens_per_s")


def report(
    plan: Plan,
    command: Sequence[str],
    when: datetime,
    servers: Mapping[str, str | None],
    clients: Sequence[BenchClient],
    levels: Sequence[PlayedLevel],
) -> dict[str, Any]:
    """The whole report. servers: the `server` header by label. The command must not contain a key."""
    targets = [
        {"label": each.target.label, "url": each.target.url, "model": each.model, "server": servers[each.target.label]}
        for each in clients
    ]
    return {
        "format": FORMAT,
        "date": when.isoformat(timespec="seconds"),
        "command": list(command),
        "machine": machine(),
        "versions": versions(),
        "targets": targets,
        "settings": _settings(plan),
        "levels": [_level(level, levels) for level in levels],
        "faults": faults(levels),
    }


def _settings(plan: Plan) -> dict[str, Any]:
    settings = {field.name: getattr(plan, field.name) for field in fields(plan) if field.name != "targets"}
    return {**settings, "tokenizer": None if plan.tokenizer is None else str(plan.tokenizer), "temperature": 0}


def _level(level: PlayedLevel, levels: Sequence[PlayedLevel]) -> dict[str, Any]:
    first = next(each for each in levels if (each.workload, each.streams) == (level.workload, level.streams))
    same_as_first = None if first is level else asdict(sameness(first.rounds[0], level.rounds[0], ignore_ends=True))
    found: dict[str, Any] = _rounded(
        {
            "workload": level.workload,
            "streams": level.streams,
            "target": level.target,
            "figures": _spreads([figures_of(played) for played in level.rounds]),
            "kinds": {
                kind: _spreads([figures_of(played, kind) for played in level.rounds]) for kind in kinds_of(level)
            },
            "same_when_asked_again": asdict(sameness(level.rounds[0], level.again)),
            "same_as_first_target": same_as_first,
            "rounds": [_round(played) for played in level.rounds],
            "again": _round(level.again),
        }
    )
    return found


def _spreads(rounds: Sequence[Figures]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "num_answers": sum(each.num_answers for each in rounds),
        "num_failed": sum(each.num_failed for each in rounds),
    }
    for name in ("num_prompt_tokens", "num_cached_tokens", "num_output_tokens", *SPREAD_FIGURES):
        over_rounds = spread(getattr(each, name) for each in rounds)
        found[name] = None if over_rounds is None else asdict(over_rounds)
    return found


def _round(played: PlayedRound) -> dict[str, Any]:
    answers = []
    for outcome in played.outcomes:
        place = {name: getattr(outcome, name) for name in ("stream", "conversation", "turn", "kind")}
        answers.append({**place, **asdict(outcome.answer), "fault": outcome.answer.fault})
    return {"wall_s": played.wall_s, "figures": asdict(figures_of(played)), "answers": answers}


def _rounded(value: Any) -> Any:
    """Microseconds are finer than what is measured, and half the size."""
    if isinstance(value, float):
        return round(value, _DECIMALS)
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value
