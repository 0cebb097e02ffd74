"""Our steps and mlx-lm's on the same model."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import KVCache, make_prompt_cache

from benchmarks.figures import WARM_UPS, Figure, timed, watch_memory
from benchmarks.host import host_work, num_host_steps
from headrace.backend.operations import num_launches, operations
from headrace.engine.runner import Runner
from headrace.models.packed import PackedModel
from headrace.models.step import Row
from headrace.scheduler.admission import MemoryBudget
from headrace.scheduler.scheduler import Scheduler
from headrace.state.sequence import SequenceState
from headrace.state.slabs import StatePool
from headrace.types.request import GREEDY, GenerationRequest

_AMPLE = MemoryBudget(2**62, lambda num_tokens: 1)
_LONGEST = 2**30


class OurSteps:
    """Steps of a model that runs packed ones."""

    def __init__(self, packed: PackedModel, vocab_size: int, chunk_tokens: int, *, runs_ahead: bool = False) -> None:
        """chunk_tokens: of prompts, at most so many in a step. runs_ahead: see `engine/forward.py`."""
        self._packed = packed
        self._vocab_size = vocab_size
        self._chunk_tokens = chunk_tokens
        self._runs_ahead = runs_ahead
        self._random = np.random.default_rng(0)

    def prefill(self, num_tokens: int, num_repeats: int) -> Figure:
        """From a request with a prompt to its first token."""
        watch_memory()
        times = timed(lambda: self._first_token(num_tokens), num_repeats)
        return Figure("headrace", f"prefill {num_tokens}", times, num_tokens, peak_bytes=mx.get_peak_memory())

    def decode(self, num_rows: int, context: int, num_steps: int) -> Figure:
        """Steps of greedy rows that share a prompt, each continuing with its own tokens."""
        watch_memory()
        engine = self.engine(num_rows)
        num_tokens = WARM_UPS + num_steps + num_host_steps(num_steps) + 3
        request = GenerationRequest("rows", self._ids(context), GREEDY, num_tokens, num_choices=num_rows)
        engine.scheduler.add(request, 0.0)
        while engine.step() < num_rows:
            pass
        # one prompt for all, but from here on each row has its own tokens: experts are chosen for each anew
        engine.step(self._ids(num_rows))
        times = timed(engine.step, num_steps, WARM_UPS)
        host = host_work(engine.step, num_steps)
        peak_bytes = mx.get_peak_memory()
        engine.runner.drop()
        forwards = Forwards(
            self._packed, self._ids(context), self._ids(num_rows), WARM_UPS + num_steps + 2, self._chunk_tokens
        )
        found = forwards.count()
        forward_s = timed(forwards.step, num_steps, WARM_UPS)
        return Figure(
            "headrace",
            f"decode {num_rows}@{context}",
            times,
            num_rows,
            forward_s=forward_s,
            build_s=tuple(forwards.build_s[-num_steps:]),
            num_operations=found.total(),
            num_launches=num_launches(found),
            host=host,
            peak_bytes=peak_bytes,
        )

    def _ids(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(self._random.integers(0, self._vocab_size, num_tokens).tolist())

    def engine(self, num_rows: int) -> StepEngine:
        scheduler = Scheduler(num_rows, self._chunk_tokens, _LONGEST, memory=_AMPLE)
        runner = Runner(self._packed, self._vocab_size, ahead=self._runs_ahead)
        return StepEngine(runner, scheduler)

    def _first_token(self, num_tokens: int) -> None:
        engine = self.engine(1)
        engine.scheduler.add(GenerationRequest("prompt", self._ids(num_tokens), GREEDY, max_tokens=1), 0.0)
        while not engine.step():
            pass
        engine.runner.drop()


class StepEngine:
    """What the engine's thread does for one step; see `engine/loop.py`."""

    def __init__(self, runner: Runner, scheduler: Scheduler) -> None:
        self.runner = runner
        self.scheduler = scheduler

    def step(self, token_ids: Sequence[int] = ()) -> int:
        """One step; gives how many rows have got a token.

        token_ids: for the rows instead of those that they got last, if any.
        """
        started = time.monotonic()
        plan = self.scheduler.schedule()
        if token_ids:
            own = zip(plan.chunks, token_ids, strict=True)
            plan = replace(plan, chunks=tuple(replace(chunk, token_ids=(token,)) for chunk, token in own))
        result = self.runner.execute(plan, self.scheduler.planned_requests())
        if result.failures:
            raise result.failures[0].error
        now = time.monotonic()
        outcome = self.scheduler.update(result, now - started, now)
        self.scheduler.set_num_drafts(self.runner.draft())
        return len(outcome.outputs)


class Forwards:
    """The model's share of decode steps, up to the most likely tokens and the states of the next step."""

    def __init__(
        self, packed: PackedModel, prompt: Sequence[int], token_ids: Sequence[int], num_steps: int, chunk_tokens: int
    ) -> None:
        """prompt: of all rows, `chunk_tokens` at a time. token_ids: one for each row, fed in every step."""
        self._packed = packed
        self.build_s: list[float] = []
        """Seconds in which the host built the graph of each step."""
        pool = StatePool(has_batches=packed.kernels.attends_in_batches)
        first = SequenceState(pool, len(prompt))
        for lo in range(0, len(prompt), chunk_tokens):
            part = prompt[lo : lo + chunk_tokens]
            first.begin(len(part))
            mx.eval(packed.forward([Row(first, part)], [len(part) - 1]), first.arrays())
            first.commit(len(part))
        record = first.checkpoint()
        first.release()
        self._rows = [Row(SequenceState(pool, len(prompt) + num_steps), (token,)) for token in token_ids]
        for row in self._rows:
            row.state.restore(record)
        self.step()

    def step(self) -> None:
        """One step, evaluated."""
        self._close(self._open())

    def count(self) -> Counter[str]:
        """A step's operations."""
        graph = self._open()
        found = operations(graph)
        self._close(graph)
        return found

    def _open(self) -> list[mx.array]:
        started = time.perf_counter()
        for row in self._rows:
            row.state.begin(1)
        logits = self._packed.graph(self._rows, range(len(self._rows)))
        graph = [mx.argmax(logits, axis=-1), *self._packed.unevaluated(self._rows)]
        self.build_s.append(time.perf_counter() - started)
        return graph

    def _close(self, graph: list[mx.array]) -> None:
        mx.eval(graph)
        for row in self._rows:
            row.state.commit(1)


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
        steps = generate_step(self._ids(1), self._model, max_tokens=_LONGEST, prompt_cache=self.caches(1, context)[0])
        return lambda: next(steps), "generate_step", steps.close

    def _several(self, num_rows: int, context: int) -> tuple[Callable[[], object], str, Callable[[], None]]:
        batch = BatchGenerator(
            self._model, max_tokens=_LONGEST, completion_batch_size=num_rows, prefill_batch_size=num_rows
        )
        prompts = [[int(token)] for token in self._random.integers(0, self._vocab_size, num_rows)]
        batch.insert(prompts, caches=self.caches(num_rows, context))
        while not batch.next_generated():
            pass
        return batch.next_generated, "BatchGenerator", batch.close

    def _operations(self, context: int) -> Any:
        (caches,) = self.caches(1, context)
        logits = self._model(self._ids(1)[None], cache=caches)
        return operations([mx.argmax(logits[:, -1], axis=-1), *_arrays(caches)])

    def caches(self, num_rows: int, context: int) -> list[list[Any]]:
        """Caches of rows that have `context` tokens behind them; rows share the arrays, which every step copies first.

        Their shapes come from a step of one token. What has no token axis stays as that step left it.
        """
        first = make_prompt_cache(self._model)
        mx.eval(self._model(self._ids(1)[None], cache=first), _arrays(first))
        filled = [_filled(each, context) for each in first]
        rows = []
        for _ in range(num_rows):
            row = make_prompt_cache(self._model)
            for each, state in zip(row, filled, strict=True):
                each.state = _copied(state)
            rows.append(row)
        return rows


def _arrays(caches: Sequence[Any]) -> list[mx.array]:
    leaves: Any = tree_flatten([each.state for each in caches])
    return [leaf for _, leaf in leaves if isinstance(leaf, mx.array)]


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
