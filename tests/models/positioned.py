"""The untouched model on tokens that stand at chosen positions, one by one: what packed steps have to give.

Each layer's cache tells the next token's position as its offset and keeps keys in order of arrival. A window is counted
in positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache, make_prompt_cache


class PositionedCache:
    """Keys and values of tokens at `positions`; a token sees those at most `window - 1` positions before it."""

    def __init__(self, positions: Sequence[int], window: int | None) -> None:
        self.positions = positions
        self.window = window
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    @property
    def num_tokens(self) -> int:
        return 0 if self.keys is None else self.keys.shape[2]

    @property
    def offset(self) -> int:
        return self.positions[self.num_tokens]

    @property
    def max_size(self) -> int | None:
        return self.window

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        assert keys.shape[2] == 1, "one token at a time: so nothing is masked but by what is handed out"
        place = self.num_tokens
        self.keys = keys if self.keys is None else mx.concatenate([self.keys, keys], axis=2)
        self.values = values if self.values is None else mx.concatenate([self.values, values], axis=2)
        first = 0 if self.window is None else self.first_within(self.window, place)
        return self.keys[:, :, first:], self.values[:, :, first:]

    def first_within(self, window: int, place: int) -> int:
        return next(each for each in range(place + 1) if self.positions[each] > self.positions[place] - window)

    def make_mask(self, num_tokens: int, return_array: bool = False, window_size: int | None = None) -> Any:
        if window_size is None or self.window is not None:
            return None
        place = self.num_tokens
        first = self.first_within(window_size, place)
        return mx.array([[each >= first for each in range(place + 1)]])


def reference(model: nn.Module, token_ids: Sequence[int], positions: Sequence[int]) -> mx.array:
    """Logits `[T, vocab_size]` of the untouched model for tokens at these positions."""
    caches = [_positioned(cache, positions) for cache in make_prompt_cache(model)]
    rows = []
    for token_id in token_ids:
        rows.append(model(mx.array([[token_id]]), cache=caches)[0, -1])
        mx.eval(rows[-1])
    return mx.stack(rows)


def _positioned(cache: Any, positions: Sequence[int]) -> Any:
    if isinstance(cache, CacheList):
        return CacheList(*(_positioned(part, positions) for part in cache.caches))
    if isinstance(cache, RotatingKVCache):
        return PositionedCache(positions, cache.max_size)
    return PositionedCache(positions, None) if isinstance(cache, KVCache) else cache
