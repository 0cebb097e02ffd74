"""What /metrics shows of a field of the status, as its annotation says."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_type_hints


@dataclass(frozen=True, slots=True)
class Metric:
    """A field's name, help and type in /metrics. Counters get the suffix `_total` there.

    Names and labels are vLLM's where it has the metric, so that its dashboards and autoscalers work; others begin with
    `headrace:`.

    key: of a field of (key, number) pairs, the label with the key. keys: those that are shown from the start, because
    a counter that appears with its first event hides that event from rates.
    kind_label: the value of a further label, `kind`; empty for none.
    """

    name: str
    help: str
    type: Literal["counter", "gauge", "histogram"] = "counter"
    key: str = ""
    keys: tuple[str, ...] = ()
    kind_label: str = ""


def metrics_of(status: object) -> tuple[tuple[str, Metric], ...]:
    """The fields of a status with their metrics."""
    return _metrics_of(type(status))  # type: ignore[arg-type]  # mypy takes the class for an instance


@cache
def _metrics_of(kind: type[Any]) -> tuple[tuple[str, Metric], ...]:
    return tuple(
        (field, each)
        for field, hint in get_type_hints(kind, include_extras=True).items()
        for each in getattr(hint, "__metadata__", ())
        if isinstance(each, Metric)
    )
