"""What `headrace doctor` finds out about ranks: all of them do this together, and no model is loaded."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx

from headrace import __version__
from headrace.backend import device
from headrace.backend.doctor import package_versions
from headrace.config import Config
from headrace.engine.group import first_difference, join_group
from headrace.engine.model_files import local_files
from headrace.engine.rank_meter import rank_status
from headrace.errors import ModelError
from headrace.models.fingerprint import files_digest
from headrace.ranks.channel import Ranks
from headrace.types.ranks import RankStatus

_SMALL_BYTES, _LARGE_BYTES = 8 * 1024, 16 * 1024 * 1024
_NUM_SMALL, _NUM_LARGE = 50, 3


@dataclass(frozen=True, slots=True)
class RankCheck:
    """Tells another rank to take part in `check_ranks` instead of serving."""

    config: Config


@dataclass(frozen=True, slots=True)
class Link:
    """Seconds for a sum of 8 KiB over all ranks, and bytes a second for one of 16 MiB."""

    sum_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class CheckedRanks:
    """versions: of each rank, with the digest of the model's files."""

    ranks: tuple[RankStatus, ...]
    versions: tuple[dict[str, str], ...]
    link: Link

    @property
    def differences(self) -> Iterator[str]:
        first, *others = self.versions
        for rank, other in enumerate(others, start=1):
            if (name := first_difference(first, other)) is not None:
                yield f"rank {rank} differs from rank 0 in {name}: {other.get(name)} instead of {first.get(name)}"


def check_ranks(ranks: Ranks, config: Config) -> CheckedRanks:
    """Raises ConfigError on a rank that can't connect."""
    own = rank_status(ranks.rank, device.current())
    found = ranks.all((own, {**_versions(), **_model_digest(config)}))
    link = measure_link(join_group(ranks))
    return CheckedRanks(tuple(each for each, _ in found), tuple(versions for _, versions in found), link)


def measure_link(group: mx.distributed.Group) -> Link:
    small_s = _median_s(group, _SMALL_BYTES, _NUM_SMALL)
    return Link(small_s, _LARGE_BYTES / _median_s(group, _LARGE_BYTES, _NUM_LARGE))


def _median_s(group: mx.distributed.Group, num_bytes: int, times: int) -> float:
    x = mx.zeros(num_bytes // 4, mx.float32)
    seconds = []
    for _ in range(1 + times):
        started = time.perf_counter()
        mx.eval(mx.distributed.all_sum(x, group=group))
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])  # the first one warms up


def _versions() -> dict[str, str]:
    return {"headrace": __version__, "Python": platform.python_version(), **package_versions()}


def _model_digest(config: Config) -> dict[str, str]:
    if not config.model:
        return {}
    try:
        files = local_files(config)
    except ModelError as error:
        return {"the model's files": error.message}
    return {"the model's files": "not on this machine" if files is None else files_digest(files.directory)}
