"""Layer records as JSON and arrays, and back; only files with the arrays of the model's states are accepted."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from headrace.state.attention import KVRecord, SlidingAttentionState
from headrace.state.disk_index import MARK_BYTES, Entry
from headrace.state.hidden import HiddenRecord
from headrace.state.layer import LayerKey, LayerRecord
from headrace.state.module import ModuleRecord, ModuleState
from headrace.state.record_file import BadFile, HostArray, to_host
from headrace.state.recurrent import RecurrentRecord
from headrace.state.sequence import SequenceState
from headrace.state.slabs import StatePool
from headrace.state.stored_state import NotStorable, StateLayout, describe, rebuild, span_name

WINDOW = 6
CONTEXT = 3
ATTENTION, SLIDING, RECURRENT, HIDDEN, WHOLE = (0,), (1,), (2,), (3,), (4,)

File = tuple[Entry, dict[str, Any], dict[str, HostArray]]


def numbers(*shape: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(sum(shape)))


class Fixed:
    """A state whose record a test gives."""

    is_sliceable = False

    def __init__(self, record: LayerRecord) -> None:
        self._record = record

    def checkpoint(self, length: int) -> LayerRecord:
        return self._record

    def commit(self, num_kept: int, num_window: int) -> None:
        pass

    def arrays(self) -> tuple[mx.array, ...]:
        return self._record.arrays

    def cost(self) -> Any:
        return ModuleState(KVCache()).cost()


def whole_cache(num_tokens: int) -> list[Any]:
    """As a model that runs whole keeps its state: plain, rotating and recurrent caches."""
    plain, rotating, arrays, inner = KVCache(), RotatingKVCache(4), ArraysCache(2), KVCache()
    for _ in range(num_tokens):
        for cache in (plain, rotating, inner):
            cache.update_and_fetch(numbers(1, 2, 1, 8), numbers(1, 2, 1, 8))
    arrays[0], arrays[1] = numbers(1, CONTEXT, 8), numbers(1, 2, 4, 4)
    return [plain, rotating, arrays, CacheList(inner)]


def state_of(num_tokens: int) -> SequenceState:
    """A state with a layer of each sort, after a window of so many tokens."""
    records: dict[LayerKey, LayerRecord] = {
        RECURRENT: RecurrentRecord(numbers(1, 2, 4, 4), numbers(1, CONTEXT + num_tokens, 8)),
        HIDDEN: HiddenRecord(numbers(1, 1, 8)),
        WHOLE: ModuleRecord(whole_cache(num_tokens)),
    }
    state = SequenceState(StatePool(), num_tokens)
    state.begin(num_tokens)
    state.full_attention(ATTENTION).write(0, numbers(1, 2, num_tokens, 8), numbers(1, 2, num_tokens, 4))
    sliding = state.layer(SLIDING, lambda: SlidingAttentionState(WINDOW))
    sliding.write(0, numbers(1, 2, num_tokens, 8), numbers(1, 2, num_tokens, 8))
    for key, record in records.items():
        state.layer(key, lambda record=record: Fixed(record))
    mx.eval(state.arrays())
    state.commit(num_tokens)
    return state


FORM = StateLayout.of(state_of(2))


def file_of(num_tokens: int) -> File:
    """A tail with a whole state."""
    state = state_of(num_tokens)
    description, made = describe(state.snapshot().layers)
    record = state.copy_span(0, num_tokens).layers[ATTENTION]
    assert record.keys is not None and record.values is not None
    made = {**made, span_name(ATTENTION, "keys"): record.keys, span_name(ATTENTION, "values"): record.values}
    mx.eval(made)
    entry = Entry("name", b"", b"", 0, bytes(MARK_BYTES * num_tokens), True, 0)
    about = json.loads(json.dumps({"span": [ATTENTION], "snapshot": description}))
    return entry, about, {name: to_host(array) for name, array in made.items()}


@pytest.mark.parametrize("num_tokens", [1, 2, 5, 9, 300])
def test_states_of_any_length_have_the_form_of_one_with_two_tokens(num_tokens: int) -> None:
    FORM.check(*file_of(num_tokens))


def test_layers_of_a_snapshot_may_be_in_any_order_but_each_once() -> None:
    entry, about, arrays = file_of(9)
    layers = about["snapshot"]
    FORM.check(entry, {**about, "snapshot": layers[::-1]}, arrays)
    for wrong in (layers[1:], [*layers, layers[0]], [layers[0], *layers[:-1]]):
        with pytest.raises(BadFile):
            FORM.check(entry, {**about, "snapshot": wrong}, arrays)


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1, 400])
def test_a_recurrent_layer_may_have_as_many_inputs_as_its_last_window_had(length: int) -> None:
    entry, about, arrays = file_of(9)
    arrays["snapshot.2.1"] = to_host(numbers(1, length, 8))
    FORM.check(entry, about, arrays)


def test_a_block_has_keys_and_values_only() -> None:
    entry, about, arrays = file_of(9)
    block = Entry("name", b"", b"", 0, entry.marks, False, 0)
    spans = {name: array for name, array in arrays.items() if name.startswith("span.")}
    FORM.check(block, {**about, "snapshot": []}, spans)
    for wrong in ((block, about, arrays), (block, {**about, "snapshot": []}, arrays), (entry, about, spans)):
        with pytest.raises(BadFile):
            FORM.check(*wrong)


@pytest.mark.parametrize("name", sorted(file_of(9)[2]))
def test_every_array_has_its_type_and_every_length_of_its_own(name: str) -> None:
    entry, about, arrays = file_of(9)
    data = arrays[name].data
    wrong = [HostArray("F16", data.astype("float16")), HostArray("F32", data[..., :-1]), HostArray("F32", data[None])]
    wrong += [HostArray("F32", data.repeat(2, axis)) for axis in range(data.ndim) if axis != 2 or data.ndim != 4]
    if name in ("snapshot.2.1", "snapshot.3.0"):  # of inputs and hidden rows there may be more
        wrong = [array for array in wrong if array.dtype == "F16" or array.data.ndim != 3 or array.data.shape[2] != 8]
    for array in (*wrong, HostArray("F32", data[..., :0, :])):
        with pytest.raises(BadFile):
            FORM.check(entry, about, {**arrays, name: array})
    with pytest.raises(BadFile):
        FORM.check(entry, about, {each: array for each, array in arrays.items() if each != name})


def change(about: dict[str, Any], layer: int, *path: str | int, to: Any) -> None:
    inside = about["snapshot"][layer]
    for step in path[:-1]:
        inside = inside[step]
    inside[path[-1]] = to


@pytest.mark.parametrize(
    "spoil",
    [
        lambda about, arrays: about.update(span=[]),
        lambda about, arrays: about.update(span=[[0], [0]]),
        lambda about, arrays: about.update(span=[[9]]),
        lambda about, arrays: about.update(span=7),
        lambda about, arrays: about.update(snapshot=about["snapshot"][:-1]),
        lambda about, arrays: about.update(snapshot=[*about["snapshot"], about["snapshot"][0]]),
        lambda about, arrays: about.update(snapshot={}),
        lambda about, arrays: about.pop("snapshot"),
        lambda about, arrays: change(about, 0, "sort", to="hidden"),
        lambda about, arrays: change(about, 0, "key", to=[7]),
        lambda about, arrays: change(about, 0, "start", to=-4),
        lambda about, arrays: change(about, 0, "start", to=5),
        lambda about, arrays: change(about, 0, "start", to="4"),
        lambda about, arrays: change(about, 0, "arrays", 0, to=None),
        lambda about, arrays: change(about, 0, "arrays", 0, to={"array": "snapshot.1.1"}),
        lambda about, arrays: change(about, 3, "caches", "is_list", to=False),
        lambda about, arrays: change(about, 3, "caches", "list", 0, "class", to="RotatingKVCache"),
        lambda about, arrays: change(about, 3, "caches", "list", 0, "class", to="Popen"),
        lambda about, arrays: change(about, 3, "caches", "list", 0, "state", "tuple", 2, to=257),
        lambda about, arrays: change(about, 3, "caches", "list", 0, "state", "tuple", 2, to=10),
        lambda about, arrays: change(about, 3, "caches", "list", 0, "state", "tuple", 2, to=-1),
        lambda about, arrays: change(about, 3, "caches", "list", 0, "state", "tuple", 2, to="9"),
        lambda about, arrays: change(about, 3, "caches", "list", 1, "state", "tuple", 4, to=10**9),
        lambda about, arrays: change(about, 3, "caches", "list", 1, "state", "tuple", 5, to=5),
        lambda about, arrays: arrays.update(other=arrays["snapshot.3.0"]),
    ],
)
def test_a_description_of_something_else_is_refused(spoil: Callable[[dict[str, Any], dict[str, Any]], object]) -> None:
    entry, about, arrays = file_of(9)
    spoil(about, arrays)
    with pytest.raises(BadFile):
        FORM.check(entry, about, arrays)


def fed(cache: Any, num_tokens: int) -> Any:
    """A cache of keys and values after some tokens, one by one."""
    for _ in range(num_tokens):
        cache.update_and_fetch(numbers(1, 2, 1, 4), numbers(1, 2, 1, 4))
    return cache


def arrays_cache() -> ArraysCache:
    cache = ArraysCache(3)
    cache[0], cache[2] = numbers(1, 3, 8), numbers(1, 2, 4, 4)
    return cache


def round_trip(layers: dict[LayerKey, LayerRecord]) -> dict[LayerKey, LayerRecord]:
    description, arrays = describe(layers)
    assert all(name.startswith("snapshot.") for name in arrays)
    return rebuild(json.loads(json.dumps(description)), arrays)


def test_our_own_records_come_back() -> None:
    layers: dict[LayerKey, LayerRecord] = {
        (0,): KVRecord(7, numbers(1, 2, 3, 4), numbers(1, 2, 3, 5)),
        (1, 0): RecurrentRecord(numbers(1, 2, 3, 4), numbers(1, 3, 8)),
        (2,): KVRecord(9, None, None),
    }
    assert round_trip(layers) == layers


@pytest.mark.parametrize(
    "make",
    [
        lambda: fed(KVCache(), 3),
        lambda: KVCache(),
        lambda: fed(ConcatenateKVCache(), 3),
        lambda: fed(RotatingKVCache(4), 7),
        arrays_cache,
        lambda: CacheList(arrays_cache(), fed(KVCache(), 2)),
        lambda: [fed(KVCache(), 300), fed(RotatingKVCache(4, keep=1), 2), arrays_cache()],
    ],
)
def test_a_modules_cache_comes_back_and_goes_on_alike(make: Any) -> None:
    cache = make()
    record = round_trip({(): ModuleRecord(cache)})[()]
    assert isinstance(record, ModuleRecord)
    for old, new in zip(flat(cache), flat(record.cache), strict=True):
        assert type(old) is type(new)
        assert states(old) == states(new)
        if isinstance(old, KVCache | RotatingKVCache):
            for one in (old, new):
                fed(one, 2)
            assert states(old) == states(new)


def flat(cache: Any) -> list[Any]:
    caches = cache if isinstance(cache, list) else [cache]
    return [part for one in caches for part in (one.caches if isinstance(one, CacheList) else [one])]


def states(cache: Any) -> list[tuple[str, Any]]:
    leaves: Any = tree_flatten(cache.state)
    return [(name, leaf.tolist() if isinstance(leaf, mx.array) else leaf) for name, leaf in leaves]


class OwnCache(KVCache):
    """A custom model file might bring such a class."""


@pytest.mark.parametrize("cache", [QuantizedKVCache(), OwnCache(), CacheList(OwnCache()), [KVCache(), OwnCache()]])
def test_a_cache_of_an_unknown_sort_is_refused_by_its_name(cache: Any) -> None:
    with pytest.raises(NotStorable, match="QuantizedKVCache|OwnCache"):
        describe({(): ModuleRecord(cache)})


def test_numbers_of_an_unknown_type_are_refused_by_its_name() -> None:
    cache = ArraysCache(1)
    cache[0] = mx.zeros((1, 2), mx.complex64)
    with pytest.raises(NotStorable, match="complex64"):
        describe({(): ModuleRecord(cache)})
