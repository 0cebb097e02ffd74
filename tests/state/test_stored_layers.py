"""Layer records as JSON and arrays, and back."""

from __future__ import annotations

import json
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

from headrace.state.attention import KVRecord
from headrace.state.layer import LayerKey, LayerRecord
from headrace.state.module import ModuleRecord
from headrace.state.recurrent import RecurrentRecord
from headrace.state.stored_layers import NotStorable, describe, rebuild


def numbers(*shape: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(sum(shape)))


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
        (3,): RecurrentRecord(None, None),
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
    """As a model file of its own might bring along."""


@pytest.mark.parametrize("cache", [QuantizedKVCache(), OwnCache(), CacheList(OwnCache()), [KVCache(), OwnCache()]])
def test_a_cache_of_an_unknown_sort_is_refused_by_its_name(cache: Any) -> None:
    with pytest.raises(NotStorable, match="QuantizedKVCache|OwnCache"):
        describe({(): ModuleRecord(cache)})


def test_numbers_of_an_unknown_type_are_refused_by_its_name() -> None:
    cache = ArraysCache(1)
    cache[0] = mx.zeros((1, 2), mx.complex64)
    with pytest.raises(NotStorable, match="complex64"):
        describe({(): ModuleRecord(cache)})
