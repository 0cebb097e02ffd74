"""The draft model of sparse prefill: an engine inside the engine, of the same parts."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.engine.failures import boundary
from headrace.engine.pool import PrefixCache
from headrace.engine.runner import Runner
from headrace.errors import GenerationFailed
from headrace.scheduler.scheduler import Scheduler
from headrace.sparse.scoring import importance
from headrace.types.request import GREEDY, GenerationRequest

logger = logging.getLogger(__name__)

LOOKAHEAD = 8
"""Tokens that the draft model continues a prompt with; their attention gives the scores (SpecPrefill, arXiv
2502.02789)."""


Importance = npt.NDArray[np.float32]
"""Of each token of a prompt, `[M]`."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A prompt that the draft model has finished. importance: None if that failed."""

    request_id: str
    importance: Importance | None


class SparseDraft:
    """Scores prompts in chunks, in batches and with its own prefix cache.

    Belongs to the engine's thread.
    """

    def __init__(
        self, name: str, runner: Runner, scheduler: Scheduler, prefixes: PrefixCache, weights_bytes: int
    ) -> None:
        """runner: one that records queries. prefixes: the runner's."""
        self.name = name
        self.weights_bytes = weights_bytes
        self._runner = runner
        self._scheduler = scheduler
        self._prefixes = prefixes
        self._is_over = False
        self._lengths: dict[str, int] = {}
        """Of the prompts that are worked on."""

    @property
    def num_scoring(self) -> int:
        """Prompts in progress."""
        return len(self._lengths)

    @property
    def reserved_bytes(self) -> int:
        """Reserved for the states of prompts."""
        return 0 if self._is_over else self._scheduler.reserved_bytes

    @property
    def state_bytes(self) -> int:
        """Held by these states."""
        return self._runner.state_bytes

    @property
    def records_bytes(self) -> int:
        """Held by the prefix cache."""
        return self._prefixes.num_bytes

    def begin(self, request: GenerationRequest) -> None:
        """Start on a request's prompt. Raises ContextTooLong for one that the draft model has no room for."""
        reading = GenerationRequest(
            request.request_id,
            request.prompt,
            GREEDY,
            max_tokens=LOOKAHEAD,
            boundaries=request.boundaries,
            session=request.session,
            priority=request.priority,
            cache_salt=request.cache_salt,
        )
        self._scheduler.add(reading, time.monotonic())
        self._lengths[request.request_id] = len(request.prompt)

    def abort(self, request_id: str) -> None:
        """End work on a prompt; what was computed of it stays in the prefix cache."""
        del self._lengths[request_id]
        self._scheduler.abort(request_id)
        self._free()

    def advance(self, limit_s: float | None) -> list[Scored]:
        """One step with the time limit `limit_s` for prompt tokens, None for no limit; returns the finished prompts."""
        plan = self._scheduler.schedule(limit_s)
        if plan.is_empty:
            return []
        started = time.monotonic()
        result = self._runner.execute(plan, self._scheduler.planned_requests())
        now = time.monotonic()
        outcome = self._scheduler.update(result, now - started, now)
        scored = [Scored(failure.request_id, None) for failure in outcome.failures]
        # before their states are freed
        scored += [Scored(request_id, self._score(request_id)) for request_id in outcome.finished]
        for one in scored:
            del self._lengths[one.request_id]
        self._free()
        return scored

    def _score(self, request_id: str) -> Importance | None:
        def fail(error: Exception) -> None:
            logger.error("the prompt of %s could not be scored", request_id, exc_info=error)

        with boundary(fail):
            found = importance(*self._runner.recorded(request_id), self._lengths[request_id])
            if not np.isfinite(found).all():
                raise GenerationFailed("the draft model's attention is not numbers")
            return found
        return None

    def close(self) -> None:
        """Drop all prompts in progress; afterwards only the memory still held may be asked for."""
        self._is_over = True
        self._lengths.clear()
        self._runner.drop()

    def _free(self) -> None:
        self._runner.free(self._scheduler.released())
        self._scheduler.forget_ended()

    def evict(self, num_bytes: int) -> int:
        """Evict this much of the prefix cache, or all that isn't in use. Returns the bytes freed."""
        return self._prefixes.evict(num_bytes)

    def clear(self) -> int:
        """Evict everything from the prefix cache that isn't in use. Returns the bytes freed."""
        return self._prefixes.clear()
