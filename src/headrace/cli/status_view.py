"""A server's status as lines for a terminal of any width."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, Group, JustifyMethod, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from headrace.cli.chat_terminal import CONTROL_CHARACTERS
from headrace.errors import ConfigError

_RATE_S = 5
"""Whole seconds over which tokens per second are averaged."""

_BAR = 20

Body = Mapping[str, Any]
Row = Mapping[str, str]
"""A request's cells by column."""


class StatusView:
    """body: of /v1/status. trouble: why there is no newer one."""

    def __init__(self, body: Body, url: str, trouble: str = "") -> None:
        """Raises ConfigError for the status of a server whose version is too different."""
        self.body = body
        self.url = url
        try:
            self._lines = [*_server_lines(body, url), "", *_work_lines(body)]
            self._requests = [_row(request, model) for request, model in _requests(body)]
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            version = body.get("version", "another version")
            message = f"the status of this server ({version}) can't be shown; --json prints it"
            raise ConfigError(message) from error
        self._trouble = trouble

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        parts: list[RenderableType] = [_line(line) for line in self._lines]
        if self._trouble:
            parts.append(Text(_printable(self._trouble), "bold red"))
        if self._requests:
            # As many rows as a screen has lines left; all of them where nothing limits the height.
            room = len(self._requests) if options.height is None else options.height - len(parts) - 3
            parts += ["", *_table(self._requests, max(1, room), options.max_width)]
        yield Group(*parts)


@dataclass(frozen=True, slots=True)
class _Column:
    """rank: on narrow terminals columns of the highest ranks are left out. is_name: it may be cut."""

    title: str
    name: str
    rank: int
    is_name: bool = False


_COLUMNS = (
    _Column("request", "request", 0, is_name=True),
    _Column("model", "model", 4, is_name=True),
    _Column("phase", "phase", 0),
    _Column("prompt", "prompt", 4),
    _Column("cached", "cached", 5),
    _Column("output", "output", 1),
    _Column("tokens/s", "speed", 2),
    _Column("age", "age", 3),
    _Column("session", "session", 6, is_name=True),
)

_LEAST_NAME = 12
_GAP = 2


def _table(rows: Sequence[Row], room: int, width: int) -> Iterator[RenderableType]:
    """room: lines for requests."""
    all_columns = tuple(column for column in _COLUMNS if column.name in rows[0])
    ranks = range(max(column.rank for column in all_columns), -1, -1)
    shown = (tuple(column for column in all_columns if column.rank <= rank) for rank in ranks)
    narrowest = tuple(column for column in all_columns if column.rank == 0)
    columns = next((each for each in shown if _least_width(each, rows) <= width), narrowest)
    spare = max(0, width - _least_width(columns, rows))
    table = Table(box=None, padding=(0, _GAP, 0, 0), header_style="dim")
    for column in columns:
        is_left = column.is_name or column.name == "phase"
        widest = None
        if column.is_name:
            used = min(spare, max(0, _longest(column, rows) - _LEAST_NAME))
            widest, spare = _LEAST_NAME + used, spare - used
        justify: JustifyMethod = "left" if is_left else "right"
        table.add_column(column.title, justify=justify, no_wrap=True, overflow="ellipsis", max_width=widest)
    for row in rows[:room]:
        table.add_row(*(Text(_printable(row[column.name])) for column in columns))
    yield table
    if len(rows) > room:
        yield Text(f"… and {len(rows) - room} more", "dim")


def _least_width(columns: Sequence[_Column], rows: Sequence[Row]) -> int:
    widths = (_LEAST_NAME if column.is_name else max(len(column.title), _longest(column, rows)) for column in columns)
    return sum(width + _GAP for width in widths)


def _longest(column: _Column, rows: Sequence[Row]) -> int:
    return max(len(row[column.name]) for row in rows)


def _requests(body: Body) -> Iterator[tuple[Body, str | None]]:
    """Of all models, with the model's name if there are several."""
    first, *others = body["models"]
    yield from ((request, first["name"] if others else None) for request in body["requests"])
    for model in others:
        yield from ((request, model["name"]) for request in model["requests"])


def _row(request: Body, model: str | None) -> dict[str, str]:
    speed = request["tokens_per_s"]
    return {
        **({} if model is None else {"model": model}),
        "request": request["request_id"],
        "phase": _phase(request),
        "prompt": f"{request['num_prompt_tokens']:,}",
        "cached": f"{request['num_cached_tokens']:,}",
        "output": f"{request['num_output_tokens']:,}",
        "speed": f"{speed:.1f}" if speed else "",
        "age": _duration(request["age_s"]),
        "session": request["session"],
    }


def _phase(request: Body) -> str:
    phase, reason = request["phase"], request["waits_for"]
    if reason is not None:
        return f"{phase}: {reason}"
    if phase == "prefill":
        return f"{phase} {request['num_computed_tokens'] / request['num_prompt_tokens']:.0%}"
    return str(phase)


def _server_lines(body: Body, url: str) -> Iterator[str]:
    model, warm_up = body["model"], body["warm_up"]
    state = body["status"]
    if state == "warming":
        state = f"warming up, {warm_up['num_done']} of {warm_up['num_pieces']}"
    uptime = _duration(body["process"]["uptime_s"])
    name, several = model["served_names"][0], len(body["models"]) > 1
    what = f"{len(body['models'])} models" if several else name
    yield f"{what} at {url}: {state}, up {uptime}, Headrace {body['version']}"
    if several:
        yield from map(_model_line, body["models"])
    if model["max_model_len"] is not None:
        if several:
            yield ""
        about = "; ".join((f"context {model['max_model_len']:,} tokens", *model["report"][:1]))
        yield f"{name}: {about}" if several else about


_STATES = {"sleeping": "not loaded"}


def _model_line(model: Body) -> str:
    parts = [_STATES.get(model["state"], str(model["state"]))]
    if model["reason"] is not None:
        parts[0] += f": {model['reason']}"
    if model["progress"] is not None:
        parts[0] += f" {model['progress']:.0%}"
    if model["loading_s"] is not None:
        parts.append(_duration(model["loading_s"]))
    if model["state"] == "loaded":
        parts += [f"weights {_size(model['weights_bytes'])}", f"{_size(model['budget_bytes'])} for states and caches"]
    if model["num_requests"]:
        parts.append(f"{model['num_requests']} requests" if model["num_requests"] > 1 else "1 request")
    return f"  {model['name']}: {', '.join(parts)}"


def _work_lines(body: Body) -> Iterator[str]:
    history = body["history"]
    output, prompt = _per_second(history["num_output_tokens"]), _per_second(history["num_prompt_tokens"])
    running, waiting = body["num_running"], body["num_waiting"]
    yield f"sequences  {running} of {body['max_num_seqs']} run, {waiting} wait"
    yield f"tokens/s   {output:.1f} output, {prompt:.1f} prompt"
    yield f"cache      {_cache(body['cache'])}"
    if body["drafts"] is not None:
        yield f"drafts     {_drafts(body['counters']['drafts'])}"
    yield f"memory     {_memory(body['memory'])}"
    if (ranks := body.get("ranks")) is not None:
        yield f"ranks      {_ranks(ranks)}"
        yield from (f"  rank {rank['rank']}   {_rank(rank)}" for rank in ranks["ranks"])
    yield f"in total   {_totals(body['counters'])}"
    if body["errors"]:
        last = body["errors"][-1]
        moment = time.strftime("%H:%M:%S", time.localtime(last["time"]))
        yield f"errors     {len(body['errors'])} lately, the last at {moment}: {last['status']} {last['code']}"


def _per_second(counts: Sequence[int]) -> float:
    """The average of the last whole seconds; the last one is in progress."""
    whole = counts[-1 - _RATE_S : -1]
    return sum(whole) / len(whole) if whole else 0.0


def _cache(cache: Body | None) -> str:
    if cache is None:
        return "off"
    num_looked_up = cache["num_lookup_tokens"]
    reused = f"; {cache['num_hit_tokens'] / num_looked_up:.0%} of prompt tokens reused" if num_looked_up else ""
    disk = "" if cache["disk"] is None else f", {_size(cache['disk']['num_bytes'])} on disk"
    return f"{_size(cache['num_bytes'])}{disk}{reused}"


def _drafts(drafts: Body) -> str:
    num_drafted = drafts["num_drafted"]
    return (
        f"{sum(drafts['accepted_at']) / num_drafted:.0%} of {num_drafted:,} accepted" if num_drafted else "none so far"
    )


def _memory(memory: Body) -> str:
    """How much of the budget beside the weights is taken, and by what."""
    names = ("state", "preempted", "records", "features", "disk")
    used = {name: memory[f"{name}_bytes"] for name in names}
    budget = memory["budget_bytes"]
    filled = min(_BAR, round(_BAR * sum(used.values()) / budget)) if budget else 0
    bar = "█" * filled + "░" * (_BAR - filled)
    shown = ", ".join(f"{_MEMORY[name]} {_size(number)}" for name, number in used.items() if number)
    parts = f"; {shown}" if shown else ""
    weights = _size(memory["weights_bytes"])
    if adapters := memory.get("adapters_bytes"):
        weights += f", adapters {_size(adapters)}"
    return f"{bar} {_size(sum(used.values()))} of {_size(budget)}, weights {weights}{parts}"


def _ranks(ranks: Body) -> str:
    num_messages, step_s = ranks["num_messages"], ranks["step_s"]
    share = f"; about {ranks['collective_s'] / step_s:.0%} of step time in collectives (estimated)" if step_s else ""
    mean = f", {ranks['num_message_bytes'] / num_messages:.0f} B a message" if num_messages else ""
    return f"{len(ranks['ranks'])} over {ranks['backend']}{mean}{share}"


def _rank(rank: Body) -> str:
    used, available = _size(rank["used_bytes"]), _size(rank["available_bytes"])
    return f"{rank['host']}, {rank['device']} ({rank['kind']}): {used} used, {available} available"


_MEMORY = {
    "state": "states",
    "preempted": "preempted",
    "records": "prefix cache",
    "features": "pictures",
    "disk": "to and from disk",
}


def _totals(counters: Body) -> str:
    ends = ", ".join(f"{number:,} {reason}" for reason, number in counters["finished"].items())
    tokens = f"{counters['num_prompt_tokens']:,} prompt and {counters['num_output_tokens']:,} output tokens"
    return f"{tokens}; answers by end: {ends or 'none'}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"


def _duration(seconds: float) -> str:
    for unit, length, part, smaller in (("d", 86400, 3600, "h"), ("h", 3600, 60, "min"), ("min", 60, 1, "s")):
        if seconds >= length:
            return f"{int(seconds // length)} {unit} {int(seconds % length // part)} {smaller}"
    return f"{seconds:.0f} s"


def _line(text: str) -> Text:
    """Cut at the terminal's edge."""
    return Text(_printable(text), no_wrap=True, overflow="ellipsis")


def _printable(text: str) -> str:
    return text.replace("\n", " ").translate(CONTROL_CHARACTERS)
