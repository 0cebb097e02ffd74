"""State of a module that runs row by row with its own mlx-lm cache.

Rollback needs no knowledge of the module: the cache from before the window is kept, and the window's accepted inputs
are fed again before the next step (deferred replay at the module's level). A cache that can be trimmed is trimmed
instead.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache

from headrace.state.layer import LayerCost, LayerRecord

Feed = Callable[[Any, mx.array], mx.array]
"""Run the module on inputs `[1, n, ...]` with a cache, which it advances; gives its outputs."""


@dataclass(frozen=True, slots=True)
class ModuleRecord(LayerRecord):
    """A copy of the module's cache."""

    cache: Any

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return cache_arrays(self.cache)


@dataclass(frozen=True, slots=True)
class _Replay:
    """A cache from before a window, and those of the window's inputs that it is to be fed again."""

    cache: Any
    inputs: mx.array
    feed: Feed


class ModuleState:
    """Opaque: a cache, and after a window with dropped tokens what it is replayed from."""

    is_sliceable = False

    def __init__(self, cache: Any) -> None:
        self._snapshots: dict[int, ModuleRecord] = {}
        self._cache = cache
        self._replay: _Replay | None = None

    def run(
        self, feed: Feed, inputs: mx.array, num_certain: int, start: int = 0, snapshot_points: Sequence[int] = ()
    ) -> mx.array:
        """Feed a window `[1, n, ...]`, of which the first `num_certain` tokens can't be dropped.

        start: how many tokens came before. snapshot_points: lengths inside the certain tokens.
        """
        self._settle()
        # a second reference to a cache's arrays would make the module copy them, so none is held of one that is trimmed
        if num_certain < inputs.shape[1] and not _trims(self._cache):
            self._replay = _Replay(copy.deepcopy(self._cache), inputs, feed)
        outputs, done = [], 0
        for length in snapshot_points:
            outputs.append(feed(self._cache, inputs[:, done : length - start]))
            self._snapshots[length] = ModuleRecord(copy.deepcopy(self._cache))
            done = length - start
        outputs.append(feed(self._cache, inputs[:, done:]))
        return mx.concatenate(outputs, axis=1)

    def commit(self, num_kept: int, num_window: int) -> None:
        if num_kept == num_window:
            self._replay = None
        elif self._replay is None:
            for one in _as_list(self._cache):
                one.trim(num_window - num_kept)
        else:
            self._replay = replace(self._replay, inputs=self._replay.inputs[:, :num_kept])

    def _settle(self) -> None:
        """Replay the accepted part of a window that was cut."""
        if self._replay is not None:
            self._cache = self._replay.cache
            if self._replay.inputs.shape[1]:
                self._replay.feed(self._cache, self._replay.inputs)
            self._replay = None

    def take_snapshot(self, length: int) -> ModuleRecord | None:
        return self._snapshots.pop(length, None)

    def checkpoint(self, length: int) -> ModuleRecord:
        self._settle()
        return ModuleRecord(copy.deepcopy(self._cache))

    def restore(self, record: ModuleRecord, length: int) -> None:
        self._cache = copy.deepcopy(record.cache)
        self._replay = None

    def cost(self) -> LayerCost:
        """The cache's bytes: per token for caches of keys and values, fixed for all others."""
        caches = [one for cache in _as_list(self._cache) for one in caches_in(cache)]
        growing: list[Any] = [
            one for one in caches if isinstance(one, KVCache | RotatingKVCache) and one.keys is not None
        ]
        per_token = sum((one.keys.nbytes + one.values.nbytes) // one.keys.shape[2] for one in growing)
        fixed = sum(array.nbytes for one in caches if one not in growing for array in cache_arrays(one))
        windows = {one.max_size if isinstance(one, RotatingKVCache) else None for one in growing}
        return LayerCost(fixed, per_token, max_tokens=windows.pop() if len(windows) == 1 else None)

    def arrays(self) -> tuple[mx.array, ...]:
        replayed = () if self._replay is None else (*cache_arrays(self._replay.cache), self._replay.inputs)
        snapshots = [array for record in self._snapshots.values() for array in record.arrays]
        return (*cache_arrays(self._cache), *replayed, *snapshots)


def token_by_token(feed: Feed, cache: Any, inputs: mx.array) -> mx.array:
    """Feed the tokens of a window one by one: for modules whose results depend on how many come at once."""
    return mx.concatenate([feed(cache, inputs[:, token : token + 1]) for token in range(inputs.shape[1])], axis=1)


def cache_arrays(cache: Any) -> tuple[mx.array, ...]:
    leaves: Any = tree_flatten([one.state for one in _as_list(cache)])
    return tuple(leaf for _, leaf in leaves if isinstance(leaf, mx.array))


def _trims(cache: Any) -> bool:
    """Whether the last tokens of an mlx-lm cache, or of all in a list, can be dropped.

    Others than KVCache say so too (`is_trimmable`), but may have let old tokens go by then, or keep the dropped ones:
    ConcatenateKVCache puts new tokens after them.
    """
    return all(type(part) is KVCache for one in _as_list(cache) for part in caches_in(one))


def _as_list(cache: Any) -> list[Any]:
    """A module has one cache, a whole model a list of them."""
    return cache if isinstance(cache, list) else [cache]


def caches_in(cache: Any) -> list[Any]:
    return list(cache.caches) if isinstance(cache, CacheList) else [cache]
