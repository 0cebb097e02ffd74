"""The sums and gathers over ranks that a forward of a split model makes, and how long they take."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx

_NUM_TIMED = 5


@dataclass(frozen=True, slots=True)
class Collective:
    """width: numbers that each rank sends for a token."""

    kind: Literal["sum", "gather"]
    width: int
    dtype: mx.Dtype

    @property
    def num_bytes(self) -> int:
        return self.width * self.dtype.size


@dataclass(frozen=True, slots=True)
class AbsentGroup:
    """Stands for MLX's group where only shapes matter and there are no ranks."""

    num_ranks: int
    own_rank: int = 0

    def size(self) -> int:
        return self.num_ranks

    def rank(self) -> int:
        return self.own_rank


@dataclass(frozen=True, slots=True)
class CollectiveTimes:
    """Seconds for a forward's collectives: a fixed part, sums by token, and gathers by row of logits."""

    fixed_s: float = 0.0
    token_s: float = 0.0
    logits_s: float = 0.0

    def seconds(self, num_tokens: int, num_logits: int) -> float:
        return self.fixed_s + self.token_s * num_tokens + self.logits_s * num_logits


def collectives_of(model: Any) -> tuple[Collective, ...]:
    """Of a forward of mlx-lm's split model. Computes nothing, and needs no other rank."""
    found: list[Collective] = []
    with _noted(found):
        model(mx.array([[0]]))
    return tuple(found)


@contextmanager
def _noted(found: list[Collective]) -> Iterator[None]:
    """Record collectives instead of running them; mlx-lm looks the functions up at each call."""

    def all_sum(x: mx.array, **_: Any) -> mx.array:
        found.append(Collective("sum", x.size, x.dtype))
        return x

    def all_gather(x: mx.array, *, group: Any = None, **_: Any) -> mx.array:
        found.append(Collective("gather", x.size, x.dtype))
        return x if group is None else mx.concatenate([x] * group.size())

    originals = mx.distributed.all_sum, mx.distributed.all_gather
    mx.distributed.all_sum, mx.distributed.all_gather = all_sum, all_gather
    try:
        yield
    finally:
        mx.distributed.all_sum, mx.distributed.all_gather = originals


def time_collectives(collectives: Sequence[Collective], group: mx.distributed.Group) -> CollectiveTimes:
    """Measured with all ranks, which call this together."""
    sums, gathers = ([each for each in collectives if each.kind == kind] for kind in ("sum", "gather"))
    fixed_s, token_s = _line(sums, group, 64)
    fixed_logits_s, logits_s = _line(gathers, group, 4)
    return CollectiveTimes(fixed_s + fixed_logits_s, token_s, logits_s)


def _line(collectives: Sequence[Collective], group: mx.distributed.Group, many: int) -> tuple[float, float]:
    """Fixed seconds and seconds per row, from the times of one row and of many."""
    one_s, many_s = (_forward_s(collectives, group, number) for number in (1, many))
    each_s = max(0.0, many_s - one_s) / (many - 1)
    return max(0.0, one_s - each_s), each_s


def _forward_s(collectives: Sequence[Collective], group: mx.distributed.Group, num_rows: int) -> float:
    def forward() -> None:
        for one, number in Counter(collectives).items():
            mx.eval(_chain(one, number, group, num_rows))

    return median_s(forward, _NUM_TIMED)


def median_s(compute: Callable[[], object], num_timed: int) -> float:
    """Seconds of a computation that waits for its result, after one that warms up."""
    times = []
    for _ in range(1 + num_timed):
        started = time.perf_counter()
        compute()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def _chain(one: Collective, length: int, group: mx.distributed.Group, num_rows: int) -> mx.array:
    """As in a forward, each needs a result of the device that needs the one before."""
    x = mx.zeros((num_rows, one.width), one.dtype)
    for _ in range(length):
        if one.kind == "sum":
            x = mx.distributed.all_sum(x + 1, group=group) * 0
        else:
            x = mx.distributed.all_gather(x + 1, group=group)[:num_rows] * 0
    return x
