"""Which arrays a model's states have: what is read from a file must have the same before anything is made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.state.disk_index import Entry
from headrace.state.disk_save import span_name
from headrace.state.host_arrays import HostArray, safetensors_name
from headrace.state.layer import LayerKey
from headrace.state.record_file import BadFile
from headrace.state.sequence import SequenceState
from headrace.state.stored_layers import Description, NotStorable, describe

Outline = tuple[str, tuple[int, ...]]
"""Type, by safetensors' name, and shape of an array."""


@dataclass(frozen=True, slots=True)
class StateForm:
    """Read off a state of few tokens.

    spans: of each sliceable layer the keys and values. description: of a snapshot there, whose arrays are `arrays`.
    length: the state's.
    """

    has_spans: bool
    needs_snapshots: bool
    spans: Mapping[LayerKey, tuple[Outline, Outline]]
    description: Description
    arrays: Mapping[str, Outline]
    length: int

    @classmethod
    def of(cls, state: SequenceState) -> StateForm:
        """Of what a model has computed of a few tokens. A snapshot that no file can hold counts as empty."""
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
        except NotStorable:  # nothing will be written, and told about then
            description, arrays = [], {}
        outlines = {name: (safetensors_name(array.dtype), array.shape) for name, array in arrays.items()}
        return cls(cost.has_spans, cost.needs_snapshots, spans, description, outlines, state.length)

    def check(self, entry: Entry, about: Mapping[str, Any], arrays: Mapping[str, HostArray]) -> None:
        """Raises BadFile if a file that tells `about` itself has other arrays than a state at its end would have."""
        found = {name: (array.dtype, array.data.shape) for name, array in arrays.items()}
        try:
            names = self._check_span(entry, about["span"], found)
            description = self.description if entry.is_tail else []
            told = about["snapshot"]
            if len(told) != len(description):
                raise BadFile("its snapshot is of other layers than the model's")
            for layer, expected in zip(told, description, strict=True):
                _Snapshot(self, entry.end, found).check(layer, expected)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError) as error:
            raise BadFile(f"its description can't be read: {error}") from error
        names |= self.arrays.keys() if entry.is_tail else set()
        if found.keys() != names:
            raise BadFile("it has other arrays than the model's states")

    def _check_span(self, entry: Entry, told: Any, found: Mapping[str, Outline]) -> set[str]:
        """The names of a span's arrays."""
        num_tokens = entry.end - entry.start
        expected = self.spans if num_tokens else {}
        if {tuple(key) for key in told} != expected.keys() or len(told) != len(expected):
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
class _Snapshot:
    """Layers of a file's snapshot at `length`, whose arrays are `found`, beside those of a form."""

    form: StateForm
    length: int
    found: Mapping[str, Outline]

    def check(self, told: Any, expected: Any) -> None:
        """A layer. Raises BadFile, and what comes of reading something else than a description."""
        if told["key"] != expected["key"] or told["sort"] != expected["sort"]:
            raise BadFile("its snapshot is of other layers than the model's")
        match expected["sort"]:
            case "kv":
                start = told["start"]
                num_tokens = self.length - start if isinstance(start, int) and start >= 0 else 0
                for one, other in zip(told["arrays"], expected["arrays"], strict=True):
                    self._same(one, other, 2, num_tokens, num_tokens)
            case "recurrent":
                self._same(told["arrays"][0], expected["arrays"][0])
                # the form's has the inputs of its own tokens behind those that a step needs
                least = self.form.arrays[expected["arrays"][1]["array"]][1][1] - self.form.length
                self._same(told["arrays"][1], expected["arrays"][1], 1, max(1, least), None)
            case "hidden":
                self._same(told["arrays"][0], expected["arrays"][0], 1, 1, self.length)
            case _:
                self._tree(told["caches"], expected["caches"])

    def _tree(self, told: Any, expected: Any) -> None:
        """What a module's caches hold. All but numbers of tokens must be the same."""
        if _is_kv_cache(expected):
            keys, values, *numbers = told["tuple"]
            _, _, *others = expected["tuple"]
            held = self.found[keys["array"]][1][2]
            self._same(keys, expected["tuple"][0], 2, 1, None)
            self._same(values, expected["tuple"][1], 2, held, held)
            # how many tokens it has seen, its settings, and where in its arrays the next one goes
            is_in_bounds = not numbers or (0 <= numbers[0] <= self.length and 0 <= numbers[-1] <= held)
            if len(numbers) != len(others) or numbers[1:-1] != others[1:-1] or not is_in_bounds:
                raise BadFile("the cache of a module has other numbers than the model's")
        elif isinstance(expected, dict) and "array" in expected:
            self._same(told, expected)
        elif isinstance(expected, dict | list):
            if type(told) is not type(expected) or len(told) != len(expected):
                raise BadFile("the cache of a module is of another form than the model's")
            for place in expected if isinstance(expected, dict) else range(len(expected)):
                self._tree(told[place], expected[place])
        elif told != expected:
            raise BadFile("the cache of a module is of another form than the model's")

    def _same(self, told: Any, expected: Any, axis: int = 0, least: int = 1, most: int | None = 1) -> None:
        """An array is as expected but for the length of an axis, which is `least` to `most`; that of a batch is 1."""
        name = expected["array"]
        dtype, shape = self.form.arrays[name]
        if told != expected or self.found[name][0] != dtype or len(self.found[name][1]) != len(shape):
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
