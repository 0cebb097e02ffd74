"""What a model would take in memory, from its configuration and the sizes of its files, before weights are fetched."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import _get_classes

from headrace.backend.device import Device
from headrace.errors import ModelError
from headrace.models.hub import Repository, find, hub_errors
from headrace.models.source import ModelFiles, foreign_errors, read_files, read_small_files
from headrace.models.weights import MEMORY_SHARE, num_parameters
from headrace.state.layer import LayerCost
from headrace.state.sequence import StateCost


@dataclass(frozen=True, slots=True)
class Preview:
    """weights_bytes: of the files that are loaded. missing_bytes: of those that are not on this machine yet."""

    files: ModelFiles
    weights_bytes: int
    missing_bytes: int = 0


def preview_folder(files: ModelFiles) -> Preview:
    """Of a model that is on this machine."""
    return Preview(files, _loaded_bytes(_sizes_in(files.directory)))


def preview_on_hub(name: str) -> Preview:
    """Of a Hugging Face repository, of which only the small files are fetched. Raises ModelError."""
    with hub_errors(name):
        found = find(name)
        if not isinstance(found, Repository):
            return preview_folder(read_files(name, found))
        files = read_small_files(found)
    sizes = {file.name: file.num_bytes for file in found.files}
    return Preview(files, _loaded_bytes(sizes), found.num_bytes - found.fetched_bytes)


def _sizes_in(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in folder.glob("*.safetensors")}


def _loaded_bytes(sizes: Mapping[str, int]) -> int:
    return sum(size for name, size in sizes.items() if name.startswith("model") and name.endswith(".safetensors"))


@dataclass(frozen=True, slots=True)
class Foreseen:
    """num_parameters: of the text model. cost: of a sequence's state, with numbers of `item_bytes`."""

    num_parameters: int
    cost: StateCost

    def held_bytes(self, stored_bytes: int, dtype: str, here: Device) -> int:
        """Memory that weights will take, `dtype` as in `ModelConfig.dtype`: see `weights.hold`."""
        in_float32 = 4 * self.num_parameters
        is_chosen = dtype == "auto" and here.kind == "cpu" and in_float32 <= MEMORY_SHARE * here.memory_bytes
        return in_float32 if is_chosen or dtype == "float32" else stored_bytes


def foresee(config: Mapping[str, Any], item_bytes: int, *, has_fine_slots: bool = False) -> Foreseen | None:
    """None for a model that mlx-lm doesn't know or can't build like this.

    mlx-lm's model is built from the configuration and run on one token without evaluating any array: shapes suffice.
    """
    try:
        # a configuration may make a model file fail in any way
        with foreign_errors(lambda error: ModelError(str(error))):
            model_class, arguments = _get_classes(dict(config))
            model: Any = model_class(arguments.from_dict(copy.deepcopy(dict(config))))
            caches = make_prompt_cache(model)
            model(mx.array([[0]]), cache=caches)
            costs = tuple(_cost(one, item_bytes) for cache in caches for one in _parts(cache))
            cost = StateCost(costs, has_fine_slots)
    except ModelError:
        return None
    return Foreseen(num_parameters(model), cost)


def _parts(cache: Any) -> Iterator[Any]:
    """A cache of mlx-lm, or those that it consists of."""
    yield from getattr(cache, "caches", (cache,))


def _cost(cache: Any, item_bytes: int) -> LayerCost:
    """Of a cache that holds one token. Its arrays are `[1, heads, capacity, width]`, or fixed ones in float32."""
    keys = getattr(cache, "keys", None)
    if keys is None:
        arrays: Any = tree_flatten(getattr(cache, "cache", ()))
        return LayerCost(fixed=sum(array.size * 4 for _, array in arrays))
    window = getattr(cache, "max_size", None)
    per_token = sum(each.size // each.shape[2] for each in (keys, cache.values)) * item_bytes
    return LayerCost(per_token=per_token, max_tokens=window, in_slots=window is None)
