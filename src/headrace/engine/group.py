"""The ranks of a model as one of MLX's groups, and the check that they will compute the same."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import mlx.core as mx

from headrace.backend import device
from headrace.backend.doctor import package_versions
from headrace.config import Config, SplitConfig
from headrace.config_loading import set_variables
from headrace.engine.mirror import Lead
from headrace.engine.rank_meter import RankMeter, rank_status
from headrace.errors import ConfigError, ModelError
from headrace.models.collectives import Collective, time_collectives
from headrace.models.fingerprint import files_digest
from headrace.models.source import ModelFiles
from headrace.ranks.channel import Ranks
from headrace.ranks.layout import Layout, read_layout


class RankSetup:
    """The ranks of an engine while it is prepared. ranks: None for an engine of one."""

    def __init__(self, ranks: Ranks | None) -> None:
        self._ranks = ranks
        self.clock = time.monotonic if ranks is None else ranks.clock
        """For loops that all ranks must leave together."""
        self.group: mx.distributed.Group | None = None
        self.lead: Lead | None = None
        """On rank 0 of several."""

    def connect(self, config: Config, files: ModelFiles) -> Config:
        """Connect the ranks. Returns the configuration for them. Raises ConfigError and ModelError on every rank."""
        if self._ranks is None:
            return config
        if files.recipe is not None:
            raise ConfigError(f"{files.name} makes no text, and such models are not supported with --ranks")
        check_same(self._ranks, files)
        self.group = join_group(self._ranks)
        here = device.current()
        if self._ranks.rank:
            self._ranks.report(partial(rank_status, self._ranks.rank, here))
        else:
            self.lead = Lead(self._ranks, config.engine.max_num_seqs, RankMeter(self._ranks, here))
        return replace(config, models=replace(config.models, vision="off"))

    def time(self, collectives: Sequence[Collective]) -> tuple[str, ...]:
        """Time a forward's collectives. Returns lines about them."""
        if self.group is None:
            return ()
        times = time_collectives(collectives, self.group)
        return () if self.lead is None else (self.lead.meter.expect(collectives, times),)

    def smallest(self, num_bytes: int) -> int:
        """The least of all ranks' numbers."""
        return num_bytes if self._ranks is None else min(self._ranks.all(num_bytes))


def ranks_layout(config: SplitConfig) -> Layout:
    """Raises ConfigError."""
    assert config.ranks is not None, "only of a model that is split"
    backend = config.ranks_backend
    if backend == "auto":
        backend = "nccl" if device.device_kind() == "cuda" else "ring"
    return read_layout(config.ranks, backend)


def refuse_with_ranks(config: Config) -> None:
    """Raises ConfigError for what is not split over ranks."""
    asked = {name: getattr(config.engine, name) for name in ("cache_dir", "kv_bits", "sparse_draft", "draft_model")}
    asked |= {name: getattr(config.models, name) for name in ("adapter", "quantize")}
    for name, value in asked.items():
        if value:
            raise ConfigError(f"{name} is not supported with --ranks", param=name)


def join_group(ranks: Ranks) -> mx.distributed.Group:
    """Connect MLX to the other ranks. Raises ConfigError."""
    backend = ranks.layout.backend
    ranks.all(ranks.rank)  # so that none waits long for the others
    with tempfile.TemporaryDirectory() as folder:
        connections = Path(folder) / "connections.json"
        connections.write_text(json.dumps(ranks.layout.connections), encoding="utf-8")
        set_variables(ranks.layout.variables(ranks.rank, connections))
        try:
            return mx.distributed.init(strict=True, backend=backend)
        except (RuntimeError, ValueError) as error:
            raise ConfigError(f"rank {ranks.rank} can't connect by {backend}: {error}") from error


def check_same(ranks: Ranks, files: ModelFiles) -> None:
    """Raises ModelError on every rank for the first difference in versions or in the model's files."""
    own = {**package_versions(), "the model's files": files_digest(files.directory)}
    if (difference := next(differences(ranks.all(own)), None)) is not None:
        raise ModelError(difference)


def differences(found: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """For each rank that differs from rank 0, the first value that does. found: by name, of each rank."""
    first, *others = found
    for rank, other in enumerate(others, start=1):
        name = next((name for name in {**first, **other} if first.get(name) != other.get(name)), None)
        if name is not None:
            yield f"rank {rank} differs from rank 0 in {name}: {other.get(name)} instead of {first.get(name)}"
