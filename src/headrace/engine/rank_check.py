"""What `headrace doctor` finds out about ranks: all of them do this together, and no model is loaded."""

from __future__ import annotations

import platform
from dataclasses import dataclass

import mlx.core as mx

from headrace import __version__
from headrace.backend import device
from headrace.backend.doctor import package_versions
from headrace.config import Config
from headrace.engine.group import join_group
from headrace.engine.model_files import local_files
from headrace.engine.rank_meter import rank_status
from headrace.errors import ModelError
from headrace.models.collectives import median_s
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


def check_ranks(ranks: Ranks, config: Config) -> CheckedRanks:
    """Raises ConfigError on a rank that can't connect."""
    own = rank_status(ranks.rank, device.current())
    versions = {"headrace": __version__, "Python": platform.python_version(), **package_versions()}
    found = ranks.all((own, {**versions, **_model_digest(config)}))
    link = measure_link(join_group(ranks))
    return CheckedRanks(tuple(each for each, _ in found), tuple(each for _, each in found), link)


def measure_link(group: mx.distributed.Group) -> Link:
    small, large = (mx.zeros(num_bytes // 4, mx.float32) for num_bytes in (_SMALL_BYTES, _LARGE_BYTES))
    small_s = median_s(lambda: mx.eval(mx.distributed.all_sum(small, group=group)), _NUM_SMALL)
    large_s = median_s(lambda: mx.eval(mx.distributed.all_sum(large, group=group)), _NUM_LARGE)
    return Link(small_s, _LARGE_BYTES / large_s)


def _model_digest(config: Config) -> dict[str, str]:
    if not config.model:
        return {}
    try:
        files = local_files(config)
    except ModelError as error:
        return {"the model's files": error.message}
    return {"the model's files": "not on this machine" if files is None else files_digest(files.directory)}
