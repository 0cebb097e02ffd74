"""The state of a module that runs with its own cache: a cache that can be trimmed is written in place."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ConcatenateKVCache, KVCache, RotatingKVCache

from headrace.state.module import ModuleState

NUM_TOKENS = 4096
HEADS, DIM = 4, 64
CACHE_BYTES = 2 * NUM_TOKENS * HEADS * DIM * 4


def attend(cache: Any, inputs: mx.array) -> mx.array:
    """A module that keeps its inputs `[1, n, DIM]` as the keys and values of all heads, and adds them up."""
    rows = mx.broadcast_to(inputs[:, None], (1, HEADS, *inputs.shape[1:]))
    keys, values = cache.update_and_fetch(rows, 2 * rows)
    total: mx.array = keys.sum(axis=(1, 2)) + values.sum(axis=(1, 2))
    return mx.broadcast_to(total[:, None], inputs.shape)


def tokens(first: int, number: int) -> mx.array:
    return mx.broadcast_to(mx.arange(first, first + number, dtype=mx.float32)[None, :, None], (1, number, DIM))


def test_a_window_of_drafts_copies_no_cache_that_is_trimmed() -> None:
    state = ModuleState(KVCache())
    # the cache has room for the next tokens then
    mx.eval(state.run(attend, tokens(0, NUM_TOKENS - 100), NUM_TOKENS - 100), state.arrays())
    state.commit(NUM_TOKENS - 100, NUM_TOKENS - 100)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for _ in range(3):
        mx.eval(state.run(attend, tokens(5, 4), 1), state.arrays())
        state.commit(2, 4)
    assert before >= CACHE_BYTES
    assert mx.get_peak_memory() - before < CACHE_BYTES // 2


@pytest.mark.parametrize("make", [KVCache, ConcatenateKVCache, lambda: RotatingKVCache(6)])
@pytest.mark.parametrize("num_kept", [1, 2, 3, 4])
def test_after_any_cut_a_window_gives_what_its_kept_tokens_give(make: Any, num_kept: int) -> None:
    cut, plain = ModuleState(make()), ModuleState(make())
    for state in (cut, plain):
        mx.eval(state.run(attend, tokens(0, 7), 7))
        state.commit(7, 7)
    mx.eval(cut.run(attend, tokens(7, 4), 1))
    cut.commit(num_kept, 4)
    mx.eval(plain.run(attend, tokens(7, num_kept), num_kept))
    plain.commit(num_kept, num_kept)
    for first in (50, 60):
        one, other = (state.run(attend, tokens(first, 3), 3) for state in (cut, plain))
        cut.commit(3, 3)
        plain.commit(3, 3)
        assert mx.array_equal(one, other)
