"""mlx-lm's own steps on the same model: `generate_step` for one row, `BatchGenerator` for several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import KVCache, make_prompt_cache

from headrace.perf.host import host_work
from headrace.perf.operations import num_launches, operations
from headrace.perf.timing import WARM_UPS, Figure, timed, watch_memory

_ENDLESS = 2**30


class PeerSteps:
    """Steps of the untouched model."""

    def __init__(self, model: Any, vocab_size: int, longest_prefill: int | None = None) -> None:
        """longest_prefill: no more tokens of a prompt are computed, and the rate is told of so many; None for all."""
        self._model = model
        self._vocab_size = vocab_size
        self._longest_prefill = longest_prefill
        self._random = np.random.default_rng(0)
        self._prefills: dict[int, Figure] = {}

    def prefill(self, num_tokens: int, num_repeats: int) -> Figure:
        """From a prompt to its first token, by `generate_step`."""
        computed = min(num_tokens, self._longest_prefill or num_tokens)
        if computed not in self._prefills:
            self._prefills[computed] = self._prefill(computed, num_repeats)
        note = "generate_step" if computed == num_tokens else f"generate_step, {computed} tokens only"
        return replace(self._prefills[computed], measure=f"prefill {num_tokens}", note=note)

    def _prefill(self, num_tokens: int, num_repeats: int) -> Figure:
        watch_memory()
        # asked for none, it waits for the first token and begins no other
        times = timed(lambda: list(generate_step(self._ids(num_tokens), self._model, max_tokens=0)), num_repeats)
        return Figure("mlx-lm", "", times, num_tokens, peak_bytes=mx.get_peak_memory())

    def decode(self, num_rows: int, context: int, num_steps: int) -> Figure:
        """Greedy steps behind caches that are filled at random, since time doesn't depend on what they hold."""
        watch_memory()
        found = self._operations(context) if num_rows == 1 else None
        step, note, close = self._one(context) if num_rows == 1 else self._several(num_rows, context)
        times = timed(step, num_steps, WARM_UPS)
        host = host_work(step, num_steps)
        close()
        return Figure(
            "mlx-lm",
            f"decode {num_rows}@{context}",
            times,
            num_rows,
            num_operations=None if found is None else found.total(),
            num_launches=None if found is None else num_launches(found),
            host=host,
            peak_bytes=mx.get_peak_memory(),
            note=note,
        )

    def _ids(self, num_tokens: int) -> mx.array:
        return mx.array(self._random.integers(0, self._vocab_size, num_tokens), dtype=mx.int32)

    def _one(self, context: int) -> tuple[Callable[[], object], str, Callable[[], None]]:
        steps = generate_step(self._ids(1), self._model, max_tokens=_ENDLESS, prompt_cache=self.caches(1, context)[0])
        return lambda: next(steps), "generate_step", steps.close

    def _several(self, num_rows: int, context: int) -> tuple[Callable[[], object], str, Callable[[], None]]:
        batch = BatchGenerator(
            self._model, max_tokens=_ENDLESS, completion_batch_size=num_rows, prefill_batch_size=num_rows
        )
        prompts = [[int(token)] for token in self._random.integers(0, self._vocab_size, num_rows)]
        batch.insert(prompts, caches=self.caches(num_rows, context))
        while not batch.next_generated():
            pass
        return batch.next_generated, "BatchGenerator", batch.close

    def _operations(self, context: int) -> Any:
        (caches,) = self.caches(1, context)
        logits = self._model(self._ids(1)[None], cache=caches)
        return operations([mx.argmax(logits[:, -1], axis=-1), *_arrays([each.state for each in caches])])

    def caches(self, num_rows: int, context: int) -> list[list[Any]]:
        """Caches of rows that have `context` tokens behind them; rows share the arrays, which every step copies first.

        Their shapes come from a step of one token. What has no token axis stays as that step left it.
        """
        first = make_prompt_cache(self._model)
        mx.eval(self._model(self._ids(1)[None], cache=first), _arrays([each.state for each in first]))
        filled = [_filled(each, context) for each in first]
        rows = []
        for _ in range(num_rows):
            row = make_prompt_cache(self._model)
            for each, state in zip(row, filled, strict=True):
                each.state = _copied(state)
            rows.append(row)
        return rows


def _arrays(state: Any) -> list[mx.array]:
    if isinstance(state, mx.array):
        return [state]
    return [array for part in state for array in _arrays(part)] if isinstance(state, list | tuple) else []


def _filled(cache: Any, context: int) -> Any:
    """The state of a cache that has seen `context` tokens, evaluated."""
    if not isinstance(cache, KVCache):
        return cache.state
    keys, values, _ = cache.state
    made = [mx.random.normal((*part.shape[:2], context, part.shape[3]), dtype=part.dtype) for part in (keys, values)]
    mx.eval(made)
    return (*made, context)


def _copied(state: Any) -> Any:
    """Lists anew: caches put other arrays into theirs."""
    return type(state)(_copied(part) for part in state) if isinstance(state, list | tuple) else state
