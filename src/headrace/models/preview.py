"""Estimates a model's memory from its configuration and file sizes, before its weights are fetched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from headrace.backend.device import Device
from headrace.errors import ModelError
from headrace.isolation import errors_as
from headrace.models.collectives import AbsentGroup, Collective, collectives_of
from headrace.models.hub import Repository, find, hub_errors
from headrace.models.levels import choose_levels
from headrace.models.sharding import split
from headrace.models.source import ModelFiles, loaded_bytes, read_files, read_small_files, weights_bytes
from headrace.models.weights import MEMORY_SHARE, build_model, num_parameters
from headrace.state.layer import LayerCost
from headrace.state.module import caches_in
from headrace.state.quantized_kv import group_size, packed_bytes
from headrace.state.sequence import StateCost


@dataclass(frozen=True, slots=True)
class Preview:
    """weights_bytes: of the files that are loaded. missing_bytes: of those that are not on this machine yet."""

    files: ModelFiles
    weights_bytes: int
    missing_bytes: int = 0


def preview_folder(files: ModelFiles) -> Preview:
    return Preview(files, weights_bytes(files.directory))


def preview_on_hub(name: str) -> Preview:
    """Of a Hugging Face repository, of which only the small files are fetched. Raises ModelError."""
    with hub_errors(name):
        found = find(name)
        return preview_folder(read_files(name, found)) if isinstance(found, Path) else preview_repository(found)


def preview_repository(repository: Repository) -> Preview:
    """Raises ModelError and the hub's errors."""
    files = read_small_files(repository)
    sizes = {file.name: file.num_bytes for file in repository.files}
    return Preview(files, loaded_bytes(sizes), repository.num_bytes - repository.fetched_bytes)


@dataclass(frozen=True, slots=True)
class ModelEstimate:
    """num_parameters: of the text model. cost: of a sequence's state, with numbers of `item_bytes`.

    layers: classes of mixers, each with how it will take part in packed steps.
    """

    num_parameters: int
    cost: StateCost
    layers: Mapping[str, str]

    def held_bytes(self, stored_bytes: int, dtype: str, here: Device, bits: float | None = None) -> int:
        """Memory that weights will take, `dtype` as in `ModelConfig.dtype`: see `weights.set_precision`.

        bits: of a weight with its share of scales, if they are to be quantised.
        """
        if bits is not None:
            return int(self.num_parameters * bits / 8)
        in_float32 = 4 * self.num_parameters
        is_chosen = dtype == "auto" and here.kind == "cpu" and in_float32 <= MEMORY_SHARE * here.memory_bytes
        return in_float32 if is_chosen or dtype == "float32" else stored_bytes


@dataclass(frozen=True, slots=True)
class SplitEstimate:
    """What one of several ranks has of a model. share: of its weights. collectives: of a forward."""

    share: float
    collectives: tuple[Collective, ...]


def estimate_split(files: ModelFiles, num_ranks: int) -> SplitEstimate:
    """Needs no weights and no other ranks. Raises ModelError for a model that can't be split so."""
    with errors_as(lambda error: ModelError(f"{files.name} can't be split: {error}"), may_exit=True):
        model = build_model(files.config)
        num_whole = num_parameters(model)
        split(model, files, cast(mx.distributed.Group, AbsentGroup(num_ranks)))
        return SplitEstimate(num_parameters(model) / num_whole, collectives_of(model))


def estimate(
    config: Mapping[str, Any], item_bytes: int, *, has_fine_slots: bool = False, kv_bits: int | None = None
) -> ModelEstimate | None:
    """None for a model that mlx-lm doesn't know or can't build like this.

    kv_bits: of stored keys and values, where heads allow it; None for exact ones.

    mlx-lm's model is built from the configuration and run on one token without evaluating any array: shapes suffice.
    """
    try:
        # a configuration may make a model file fail in any way
        with errors_as(lambda error: ModelError(str(error)), may_exit=True):
            model = build_model(config)
            caches = make_prompt_cache(model)
            model(mx.array([[0]]), cache=caches)
            costs = tuple(_cost(one, item_bytes, kv_bits) for cache in caches for one in caches_in(cache))
            cost = StateCost(costs, has_fine_slots)
            layers = {each.__name__: level.value for each, level in choose_levels(model).items()}
    except ModelError:
        return None
    return ModelEstimate(num_parameters(model), cost, layers)


def _cost(cache: Any, item_bytes: int, kv_bits: int | None) -> LayerCost:
    """Of a cache that holds one token. Its arrays are `[1, heads, capacity, width]`, or fixed ones in float32."""
    keys = getattr(cache, "keys", None)
    if keys is None:
        arrays: Any = tree_flatten(getattr(cache, "cache", ()))
        return LayerCost(fixed=sum(array.size * 4 for _, array in arrays))
    window = getattr(cache, "max_size", None)
    heads = [(each.shape[1], each.shape[3]) for each in (keys, cache.values)]
    per_token = sum(number * width * item_bytes for number, width in heads)
    if kv_bits is None or window is not None or any(group_size(width) is None for _, width in heads):
        return LayerCost(per_token=per_token, max_tokens=window, in_slots=window is None)
    packed = sum(number * packed_bytes(width, kv_bits, item_bytes) for number, width in heads)
    return LayerCost(per_token=packed, in_slots=True, unpacked_per_token=per_token)
