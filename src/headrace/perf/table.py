"""Figures as lines, a table and JSON."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from headrace.bench.figures import spread
from headrace.bench.table import Row, aligned, spread_text
from headrace.perf.host import HostWork
from headrace.perf.timing import Figure

TITLES: Row = (
    *("measure", "side", "tokens/s or ms", "other : ours", "forward ms", "built in ms", "operations", "launches"),
    *("host ms", "calls", "objects", "GB moved", "of copy", "peak GB", ""),
)


def line(figure: Figure, copy_bytes_per_s: float) -> str:
    cells = zip(TITLES[3:], row(figure, None, copy_bytes_per_s)[3:], strict=True)
    metadata = ", ".join(f"{title} {cell}".strip() for title, cell in cells if cell)
    unit = "tokens/s" if figure.is_prefill else "ms"
    return f"{figure.measure}, {figure.side}: {_value(figure)} {unit}{', ' if metadata else ''}{metadata}"


def table(figures: Sequence[Figure], copy_bytes_per_s: float) -> str:
    """All figures by their measures, ours first, and how many times ours the other's time is, medians."""
    measures = dict.fromkeys(figure.measure for figure in figures)
    rows = [TITLES]
    for measure in measures:
        of_measure = [figure for figure in figures if figure.measure == measure]
        rows += [row(figure, of_measure[0], copy_bytes_per_s) for figure in of_measure]
    return "\n".join(aligned(rows))


def row(figure: Figure, first: Figure | None, copy_bytes_per_s: float) -> Row:
    """Cells of a figure under TITLES. first: what it is compared with, if it is another."""
    is_other = first is not None and first is not figure
    return (
        figure.measure,
        figure.side,
        _value(figure),
        f"{figure.token_s / first.token_s:.2f}" if is_other and first is not None else "",
        _median_ms(figure.forward_s),
        _median_ms(figure.build_s),
        "" if figure.num_operations is None else str(figure.num_operations),
        "" if figure.num_launches is None else str(figure.num_launches),
        *(("", "", "") if figure.host is None else _host(figure.host)),
        "" if figure.num_bytes is None else f"{figure.num_bytes / 1e9:.3g}",
        "" if figure.num_bytes is None else f"{figure.num_bytes / figure.time_s.median / copy_bytes_per_s:.0%}",
        f"{figure.peak_bytes / 1e9:.3g}",
        figure.note,
    )


def as_json(figure: Figure, copy_bytes_per_s: float) -> dict[str, Any]:
    """Raw times and counts, and what they come to."""
    metadata = asdict(figure)
    metadata["tokens_per_s"] = 1 / figure.token_s
    if figure.num_bytes is not None:
        metadata["share_of_copy"] = figure.num_bytes / figure.time_s.median / copy_bytes_per_s
    return metadata


def _value(figure: Figure) -> str:
    if not figure.is_prefill:
        return spread_text(figure.time_s, 1000)
    return spread_text(spread(figure.num_tokens / time for time in figure.times_s))


def _host(work: HostWork) -> Row:
    return f"{work.seconds * 1000:.2f}", str(work.num_calls), str(work.num_objects)


def _median_ms(times_s: Sequence[float]) -> str:
    return f"{statistics.median(times_s) * 1000:.2f}" if times_s else ""
