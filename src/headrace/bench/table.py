"""The results as text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from headrace.bench.figures import Figures, Sameness, Spread, faults, figures_of, kinds_of, ratio, sameness, spread
from headrace.bench.plan import Plan
from headrace.bench.rounds import PlayedLevel

Row = tuple[str, ...]
Figure = Callable[[Figures], float | None]

_TEXT_COLUMNS = 2
_SHOWN_FAULTS = 10
_SHOWN_CHARACTERS = 60

# Title, unit and what a value is multiplied by where the figure itself is shown, and how a round's answers make it.
_FIGURES: tuple[tuple[str, str, Figure, float, str], ...] = (
    ("first text", " ms", lambda figures: figures.ttft_s, 1000, "median"),
    ("per token", " ms", lambda figures: figures.tpot_s, 1000, "median"),
    ("longest gap", " ms", lambda figures: figures.max_gap_s, 1000, "maximum"),
    ("whole answer", " s", lambda figures: figures.end_to_end_s, 1, "median"),
    ("tokens/s", "", lambda figures: figures.output_tokens_per_s, 1, "sum"),
)
_WAYS = tuple(way for *_, way in _FIGURES)


def tables(plan: Plan, levels: Sequence[PlayedLevel]) -> str:
    """A table for each workload, one of ratios if there are several servers, and a list of faults."""
    return "\n\n".join("\n".join(block) for block in _blocks(plan, levels) if block) + "\n"


def _blocks(plan: Plan, levels: Sequence[PlayedLevel]) -> Iterator[list[str]]:
    yield [
        "Under each title: how the answers of a round make the figure.",
        f"Cells: the median of {plan.num_repeats} rounds (smallest to largest); failed: of all rounds together.",
    ]
    for workload, of_workload in groupby(levels, key=lambda level: level.workload):
        yield [workload, *aligned(_measured(list(of_workload)))]
    if len(plan.targets) > 1:
        yield [f"Others over {plan.targets[0].label}, paired by round", *aligned(_compared(plan, levels))]
    yield _differences(levels)
    yield _faults(levels)


def _measured(levels: Sequence[PlayedLevel]) -> list[Row]:
    rows: list[Row] = [
        (
            "streams",
            "server",
            "prompt",
            "output",
            *(title + unit for title, unit, *_ in _FIGURES),
            "failed",
            "same again",
        ),
        ("", "", "median", "sum", *_WAYS, "sum", "sum"),
    ]
    for level in levels:
        rows += [_row(level, kind) for kind in (None, *kinds_of(level))]
    return rows


def _row(level: PlayedLevel, kind: str | None) -> Row:
    rounds = [figures_of(played, kind) for played in level.rounds]
    of_whole_level = (
        f"{sum(each.num_failed for each in rounds)}/{sum(each.num_answers for each in rounds)}",
        _share(sameness(level.rounds[0], level.again)) if kind is None else "",
    )
    return (
        str(level.streams) if kind is None else "",
        level.target if kind is None else f"  {kind}",
        _middle(spread(each.num_prompt_tokens for each in rounds)),
        _middle(spread(each.num_output_tokens for each in rounds)),
        *(spread_text(spread(figure(each) for each in rounds), scale) for _, _, figure, scale, _ in _FIGURES),
        *of_whole_level,
    )


def _compared(plan: Plan, levels: Sequence[PlayedLevel]) -> list[Row]:
    rows: list[Row] = [
        ("workload", "server", "streams", *(title for title, *_ in _FIGURES), "same answers"),
        ("", "", "", *_WAYS, "sum"),
    ]
    for _, group in groupby(levels, key=lambda level: (level.workload, level.streams)):
        ours, *others = group
        for theirs in others:
            rows += [_compared_row(ours, theirs, kind) for kind in (None, *kinds_of(ours))]
    return rows


def _compared_row(ours: PlayedLevel, theirs: PlayedLevel, kind: str | None) -> Row:
    ratios = (spread_text(ratio(ours, theirs, figure, kind)) for _, _, figure, *_ in _FIGURES)
    if kind is not None:
        return ("", f"  {kind}", "", *ratios, "")
    same = _share(sameness(ours.rounds[0], theirs.rounds[0], ignore_ends=True))
    return (theirs.workload, theirs.target, str(theirs.streams), *ratios, same)


def _differences(levels: Sequence[PlayedLevel]) -> list[str]:
    for level in levels:
        found = sameness(level.rounds[0], level.again).difference
        if found is not None:
            place = f"stream {found.stream}, conversation {found.conversation}, turn {found.turn}"
            return [
                f"First answer that differs when asked again: {level.target}, {level.workload},"
                f" {level.streams} streams; {place}",
                *(f"  {_around(text, found.first, found.second)}" for text in (found.first, found.second)),
            ]
    return []


def _around(text: str, first: str, second: str) -> str:
    same = next(
        (at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    begin = max(0, same - _SHOWN_CHARACTERS // 2)
    shown = repr(text[begin : begin + _SHOWN_CHARACTERS])
    return f"at character {same}: {'…' if begin else ''}{shown}"


def _faults(levels: Sequence[PlayedLevel]) -> list[str]:
    found = faults(levels)
    if not found:
        return []
    more = [f"  and {len(found) - _SHOWN_FAULTS} more"] if len(found) > _SHOWN_FAULTS else []
    return [f"{len(found)} answers failed:", *(f"  {line}" for line in found[:_SHOWN_FAULTS]), *more]


def aligned(rows: Sequence[Row]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(_cell(row, at, width) for at, width in enumerate(widths)).rstrip() for row in rows]


def _cell(row: Row, at: int, width: int) -> str:
    return row[at].ljust(width) if at < _TEXT_COLUMNS else row[at].rjust(width)


def _share(found: Sameness) -> str:
    return f"{found.num_same}/{found.num_compared}"


def _middle(found: Spread | None) -> str:
    return "-" if found is None else _number(found.median)


def spread_text(found: Spread | None, scale: float = 1) -> str:
    if found is None:
        return "-"
    middle = _number(found.median * scale)
    return f"{middle} ({_number(found.minimum * scale)} to {_number(found.maximum * scale)})"


def _number(value: float) -> str:
    """Three significant digits, more for larger numbers."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
