"""The arrays of a state in a file: layer records as named arrays with a description in JSON, and back.

A description is a list with one object for each layer: its key, its sort and where its arrays are. Before anything is
made of what was read, its arrays are compared with those of a state that the model has computed (`StateLayout`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, ConcatenateKVCache, KVCache, RotatingKVCache

from headrace.state.attention import KVRecord
from headrace.state.disk_index import Entry
from headrace.state.hidden import HiddenRecord
from headrace.state.layer import LayerKey, LayerRecord
from headrace.state.module import ModuleRecord
from headrace.state.record_file import BadFile, HostArray, safetensors_name
from headrace.state.recurrent import RecurrentRecord
from headrace.state.sequence import SequenceState

Description = list[dict[str, Any]]
"""JSON."""

Outline = tuple[str, tuple[int, ...]]
"""Type, by safetensors' name, and shape of an array."""

MODULE_CACHES: dict[str, Any] = {
    one.__name__: one for one in (ArraysCache, CacheList, ConcatenateKVCache, KVCache, RotatingKVCache)
}
"""mlx-lm's caches whose `state` is all that they hold."""


class NotStorable(Exception):
    """A layer's record can't be written to a file; the message says why."""


def span_name(key: Sequence[int], part: str) -> str:
    """The name of an array of a span: part is `keys` or `values`."""
    return f"span.{'.'.join(map(str, key))}.{part}"


def describe(layers: Mapping[LayerKey, LayerRecord]) -> tuple[Description, dict[str, mx.array]]:
    """The description of a snapshot's layers, and the arrays that it names. Raises NotStorable."""
    description: Description = []
    arrays: dict[str, mx.array] = {}
    for key, record in layers.items():
        name = f"snapshot.{'.'.join(map(str, key))}"
        match record:
            case KVRecord(start, keys, values):
                stored = {"sort": "kv", "start": start, "arrays": _flatten([keys, values], name, arrays)}
            case RecurrentRecord(state, context):
                stored = {"sort": "recurrent", "arrays": _flatten([state, context], name, arrays)}
            case HiddenRecord(rows):
                stored = {"sort": "hidden", "arrays": _flatten([rows], name, arrays)}
            case ModuleRecord(cache):
                stored = {"sort": "module", "caches": _describe_caches(cache, name, arrays)}
            case _:
                raise NotStorable(f"layer {key} has a record that can't be stored in a file: {type(record).__name__}")
        description.append({"key": list(key), **stored})
    return description, arrays


def rebuild(description: Description, arrays: Mapping[str, mx.array]) -> dict[LayerKey, LayerRecord]:
    return {tuple(one["key"]): _REBUILD[one["sort"]](one, arrays) for one in description}


def _rebuild_module(stored: dict[str, Any], arrays: Mapping[str, mx.array]) -> LayerRecord:
    caches = [
        MODULE_CACHES[one["class"]].from_state(_unflatten(one["state"], arrays)) for one in stored["caches"]["list"]
    ]
    return ModuleRecord(caches if stored["caches"]["is_list"] else caches[0])


_REBUILD: dict[str, Callable[[dict[str, Any], Mapping[str, mx.array]], LayerRecord]] = {
    "kv": lambda stored, arrays: KVRecord(stored["start"], *_unflatten(stored["arrays"], arrays)),
    "recurrent": lambda stored, arrays: RecurrentRecord(*_unflatten(stored["arrays"], arrays)),
    "hidden": lambda stored, arrays: HiddenRecord(*_unflatten(stored["arrays"], arrays)),
    "module": _rebuild_module,
}


def _describe_caches(cache: Any, name: str, arrays: dict[str, mx.array]) -> dict[str, Any]:
    """A module has one cache, a whole model a list of them."""
    caches = cache if isinstance(cache, list) else [cache]
    for each in caches:
        for one in (each, *(each.caches if type(each) is CacheList else ())):
            if type(one) is not MODULE_CACHES.get(type(one).__name__):
                raise NotStorable(
                    f"a module keeps its state in a {type(one).__name__}, which can't be stored in a file"
                )
    stored = [
        {"class": type(one).__name__, "state": _flatten(one.state, f"{name}.{index}", arrays)}
        for index, one in enumerate(caches)
    ]
    return {"is_list": isinstance(cache, list), "list": stored}


def _flatten(tree: Any, name: str, arrays: dict[str, mx.array]) -> Any:
    """A tree of arrays and plain values as JSON; the arrays go into `arrays`."""
    if isinstance(tree, mx.array):
        try:
            safetensors_name(tree.dtype)
        except KeyError as error:
            raise NotStorable(f"a state holds numbers of type {tree.dtype}, which can't be stored in a file") from error
        arrays[name] = tree
        return {"array": name}
    if isinstance(tree, list | tuple):
        parts = [_flatten(part, f"{name}.{index}", arrays) for index, part in enumerate(tree)]
        return {"tuple": parts} if isinstance(tree, tuple) else parts
    if tree is None or isinstance(tree, str | int | float | bool):
        return tree
    raise NotStorable(f"a module's state holds a {type(tree).__name__}, which can't be stored in a file")


def _unflatten(stored: Any, arrays: Mapping[str, mx.array]) -> Any:
    if isinstance(stored, list):
        return [_unflatten(part, arrays) for part in stored]
    if not isinstance(stored, dict):
        return stored
    if "array" in stored:
        return arrays[cast(str, stored["array"])]
    return tuple(_unflatten(part, arrays) for part in stored["tuple"])


@dataclass(frozen=True, slots=True)
class StateLayout:
    """The arrays of a model's states, taken from a state of `length` tokens.

    spans: of each sliceable layer the keys and values. description: of a snapshot there, whose arrays are `arrays`.
    """

    has_spans: bool
    needs_snapshots: bool
    spans: Mapping[LayerKey, tuple[Outline, Outline]]
    description: Description
    arrays: Mapping[str, Outline]
    length: int

    @classmethod
    def of(cls, state: SequenceState) -> StateLayout:
        """From a state of a few tokens. A snapshot that no file can hold counts as empty."""
        cost = state.cost()
        span = state.copy_span(0, state.length)
        spans = {}
        for key, record in span.layers.items():
            if record.keys is not None and record.values is not None:
                spans[key] = (
                    (safetensors_name(record.keys.dtype), record.keys.shape),
                    (safetensors_name(record.values.dtype), record.values.shape),
                )
        try:
            description, arrays = describe(state.snapshot().layers)
        except NotStorable:  # the first save reports it
            description, arrays = [], {}
        outlines = {name: (safetensors_name(array.dtype), array.shape) for name, array in arrays.items()}
        return cls(cost.has_spans, cost.needs_snapshots, spans, description, outlines, state.length)

    def check(self, entry: Entry, about: Mapping[str, Any], arrays: Mapping[str, HostArray]) -> None:
        """Raise BadFile if a file with the JSON `about` has other arrays than the model's state at its end."""
        found = {name: (array.dtype, array.data.shape) for name, array in arrays.items()}
        try:
            names = self._check_span(entry, about["span"], found)
            description = self.description if entry.is_tail else []
            stored = about["snapshot"]
            expected = {tuple(layer["key"]): layer for layer in description}
            if {tuple(layer["key"]) for layer in stored} != expected.keys() or len(stored) != len(expected):
                raise BadFile("its snapshot is of other layers than the model's")
            for layer in stored:
                _SnapshotCheck(self, entry.end, found).check(layer, expected[tuple(layer["key"])])
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError) as error:
            raise BadFile(f"its description can't be read: {error}") from error
        names |= self.arrays.keys() if entry.is_tail else set()
        if found.keys() != names:
            raise BadFile("its arrays differ from those of the model's states")

    def _check_span(self, entry: Entry, stored: Any, found: Mapping[str, Outline]) -> set[str]:
        num_tokens = entry.end - entry.start
        expected = self.spans if num_tokens else {}
        if {tuple(key) for key in stored} != expected.keys() or len(stored) != len(expected):
            raise BadFile("its keys and values are of other layers than the model's")
        names = set()
        for key, outlines in expected.items():
            for part, (dtype, shape) in zip(("keys", "values"), outlines, strict=True):
                name = span_name(key, part)
                names.add(name)
                if found[name] != (dtype, (*shape[:2], num_tokens, *shape[3:])):
                    raise BadFile(f"{name} has another type or shape than the model's")
        return names


@dataclass(frozen=True, slots=True)
class _SnapshotCheck:
    """Compares a file's snapshot at `length`, with the arrays `found`, with a layout."""

    layout: StateLayout
    length: int
    found: Mapping[str, Outline]

    def check(self, stored: Any, expected: Any) -> None:
        """Check a layer. Raises BadFile, or any error of reading malformed JSON."""
        if stored["sort"] != expected["sort"]:
            raise BadFile("its snapshot is of other layers than the model's")
        match expected["sort"]:
            case "kv":
                start = stored["start"]
                num_tokens = self.length - start if isinstance(start, int) and start >= 0 else 0
                for one, other in zip(stored["arrays"], expected["arrays"], strict=True):
                    self._same(one, other, 2, num_tokens, num_tokens)
            case "recurrent":
                self._same(stored["arrays"][0], expected["arrays"][0])
                # the layout's has its tokens' inputs after those that a step needs
                least = self.layout.arrays[expected["arrays"][1]["array"]][1][1] - self.layout.length
                self._same(stored["arrays"][1], expected["arrays"][1], 1, max(1, least), None)
            case "hidden":
                self._same(stored["arrays"][0], expected["arrays"][0], 1, 1, self.length)
            case _:
                self._tree(stored["caches"], expected["caches"])

    def _tree(self, stored: Any, expected: Any) -> None:
        if _is_kv_cache(expected):
            keys, values, *numbers = stored["tuple"]
            _, _, *others = expected["tuple"]
            held = self.found[keys["array"]][1][2]
            self._same(keys, expected["tuple"][0], 2, 1, None)
            self._same(values, expected["tuple"][1], 2, held, held)
            # how many tokens it has seen, its settings, and where in its arrays the next one goes
            is_in_bounds = not numbers or (0 <= numbers[0] <= self.length and 0 <= numbers[-1] <= held)
            if len(numbers) != len(others) or numbers[1:-1] != others[1:-1] or not is_in_bounds:
                raise BadFile("the cache of a module has other settings than the model's")
        elif isinstance(expected, dict) and "array" in expected:
            self._same(stored, expected)
        elif isinstance(expected, dict | list):
            if type(stored) is not type(expected) or len(stored) != len(expected):
                raise BadFile("the cache of a module is of another form than the model's")
            for place in expected if isinstance(expected, dict) else range(len(expected)):
                self._tree(stored[place], expected[place])
        elif stored != expected:
            raise BadFile("the cache of a module is of another form than the model's")

    def _same(self, stored: Any, expected: Any, axis: int = 0, least: int = 1, most: int | None = 1) -> None:
        """Check that an array is as expected, except for the length of an axis, which is `least` to `most`."""
        name = expected["array"]
        dtype, shape = self.layout.arrays[name]
        if stored != expected or self.found[name][0] != dtype or len(self.found[name][1]) != len(shape):
            raise BadFile(f"{name} has another type or shape than the model's")
        length = self.found[name][1][axis]
        fits = 1 <= least <= length and (most is None or length <= most)
        if not fits or self.found[name][1] != (*shape[:axis], length, *shape[axis + 1 :]):
            raise BadFile(f"{name} has another type or shape than the model's")


def _is_kv_cache(expected: Any) -> bool:
    """Whether part of a description is a cache of keys and values: these come first, then whole numbers."""
    parts = expected.get("tuple") if isinstance(expected, dict) else None
    if not isinstance(parts, list) or len(parts) < 2:
        return False
    return all(isinstance(part, dict) and "array" in part for part in parts[:2]) and all(
        type(part) is int for part in parts[2:]
    )
