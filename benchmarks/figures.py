"""Figures, how their times are taken, and how they are shown: as lines, a table and JSON."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import mlx.core as mx

from benchmarks.host import HostWork
from headrace.bench.figures import Spread, spread
from headrace.bench.table import Row, aligned, spread_text

WARM_UPS = 4
"""Steps before timed ones: kernels are built, memory is touched."""

Side = Literal["headrace", "mlx-lm"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One measure of one side.

    times_s: of each timed repeat. num_tokens: that each of them computed. num_bytes: that each had to move at least;
    None if not counted. forward_s, build_s: the forward alone of a decode step, and of that the time in which the
    host builds its graph. num_operations, num_launches: of the forward; the latter without those that only name views.
    host: what a decode step costs the host. peak_bytes: of all memory held meanwhile. note: what is to be known of it.
    """

    side: Side
    measure: str
    times_s: tuple[float, ...]
    num_tokens: int
    num_bytes: int | None = None
    forward_s: tuple[float, ...] = ()
    build_s: tuple[float, ...] = ()
    num_operations: int | None = None
    num_launches: int | None = None
    host: HostWork | None = None
    peak_bytes: int = 0
    note: str = ""

    @property
    def is_prefill(self) -> bool:
        """Whether it is told by its rate."""
        return self.measure.startswith("prefill")

    @property
    def token_s(self) -> float:
        """Seconds a token, at the median."""
        return self.time_s.median / self.num_tokens

    @property
    def time_s(self) -> Spread:
        """Of the repeats."""
        found = spread(self.times_s)
        assert found is not None, "a figure has at least one repeat"
        return found


def timed(call: Callable[[], object], num_repeats: int, num_warm_ups: int = 1) -> tuple[float, ...]:
    """Seconds of each repeat. The call has to wait for the device itself."""
    times = []
    for _ in range(num_warm_ups + num_repeats):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return tuple(times[num_warm_ups:])


def watch_memory() -> None:
    """Begin a measure: buffers of the last one are given back, and the peak starts anew."""
    mx.clear_cache()
    mx.reset_peak_memory()


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
