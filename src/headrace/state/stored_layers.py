"""Layer records as named arrays with a description in JSON, and back.

A description is a list with one object for each layer: its key, its sort and where its arrays are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, ConcatenateKVCache, KVCache, RotatingKVCache

from headrace.state.attention import KVRecord
from headrace.state.hidden import HiddenRecord
from headrace.state.host_arrays import is_storable
from headrace.state.layer import LayerKey, LayerRecord
from headrace.state.module import ModuleRecord
from headrace.state.recurrent import RecurrentRecord

Description = list[dict[str, Any]]
"""JSON."""

MODULE_CACHES: dict[str, Any] = {
    one.__name__: one for one in (ArraysCache, CacheList, ConcatenateKVCache, KVCache, RotatingKVCache)
}
"""mlx-lm's caches whose `state` is all that they hold."""


class NotStorable(Exception):
    """A layer's record can't be written to a file; the message says why."""


def describe(layers: Mapping[LayerKey, LayerRecord]) -> tuple[Description, dict[str, mx.array]]:
    """The description of a snapshot's layers, and the arrays that it names. Raises NotStorable."""
    description: Description = []
    arrays: dict[str, mx.array] = {}
    for key, record in layers.items():
        name = f"snapshot.{'.'.join(map(str, key))}"
        match record:
            case KVRecord(start, keys, values):
                told = {"sort": "kv", "start": start, "arrays": _take([keys, values], name, arrays)}
            case RecurrentRecord(state, context):
                told = {"sort": "recurrent", "arrays": _take([state, context], name, arrays)}
            case HiddenRecord(rows):
                told = {"sort": "hidden", "arrays": _take([rows], name, arrays)}
            case ModuleRecord(cache):
                told = {"sort": "module", "caches": _describe_caches(cache, name, arrays)}
            case _:
                raise NotStorable(f"layer {key} has a record of a sort that no file can hold: {type(record).__name__}")
        description.append({"key": list(key), **told})
    return description, arrays


def rebuild(description: Description, arrays: Mapping[str, mx.array]) -> dict[LayerKey, LayerRecord]:
    """The layers of a description that `describe` gave, out of arrays with the same names."""
    return {tuple(one["key"]): _REBUILD[one["sort"]](one, arrays) for one in description}


def _rebuild_module(told: dict[str, Any], arrays: Mapping[str, mx.array]) -> LayerRecord:
    caches = [MODULE_CACHES[one["class"]].from_state(_give(one["state"], arrays)) for one in told["caches"]["list"]]
    return ModuleRecord(caches if told["caches"]["is_list"] else caches[0])


_REBUILD: dict[str, Callable[[dict[str, Any], Mapping[str, mx.array]], LayerRecord]] = {
    "kv": lambda told, arrays: KVRecord(told["start"], *_give(told["arrays"], arrays)),
    "recurrent": lambda told, arrays: RecurrentRecord(*_give(told["arrays"], arrays)),
    "hidden": lambda told, arrays: HiddenRecord(*_give(told["arrays"], arrays)),
    "module": _rebuild_module,
}


def _describe_caches(cache: Any, name: str, arrays: dict[str, mx.array]) -> dict[str, Any]:
    """A module has one cache, a whole model a list of them."""
    caches = cache if isinstance(cache, list) else [cache]
    for each in caches:
        for one in (each, *(each.caches if type(each) is CacheList else ())):
            if type(one) is not MODULE_CACHES.get(type(one).__name__):
                raise NotStorable(f"a module keeps its state in a {type(one).__name__}, which no file can hold")
    told = [
        {"class": type(one).__name__, "state": _take(one.state, f"{name}.{index}", arrays)}
        for index, one in enumerate(caches)
    ]
    return {"is_list": isinstance(cache, list), "list": told}


def _take(tree: Any, name: str, arrays: dict[str, mx.array]) -> Any:
    """A tree of arrays and plain values as JSON; the arrays go into `arrays`."""
    if isinstance(tree, mx.array):
        if not is_storable(tree.dtype):
            raise NotStorable(f"a state holds numbers of type {tree.dtype}, which no file can hold")
        arrays[name] = tree
        return {"array": name}
    if isinstance(tree, list | tuple):
        parts = [_take(part, f"{name}.{index}", arrays) for index, part in enumerate(tree)]
        return {"tuple": parts} if isinstance(tree, tuple) else parts
    if tree is None or isinstance(tree, str | int | float | bool):
        return tree
    raise NotStorable(f"a module's state holds a {type(tree).__name__}, which no file can hold")


def _give(told: Any, arrays: Mapping[str, mx.array]) -> Any:
    """The tree that `_take` described."""
    if isinstance(told, list):
        return [_give(part, arrays) for part in told]
    if not isinstance(told, dict):
        return told
    if "array" in told:
        return arrays[cast(str, told["array"])]
    return tuple(_give(part, arrays) for part in told["tuple"])
