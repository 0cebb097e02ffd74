"""Sparse prefill's draft model: what it must be able to do, and its engine inside the engine, of the same parts."""

from __future__ import annotations

import logging
import time

import numpy as np
import numpy.typing as npt

from headrace.config import Config
from headrace.engine.draft_model import DraftModel, refused
from headrace.engine.prefix_cache import PrefixCache
from headrace.engine.runner import Runner
from headrace.engine.sparse.scoring import importance, num_scoring_layers
from headrace.errors import GenerationFailed
from headrace.isolation import isolated
from headrace.models.load import LoadedModel
from headrace.models.source import ModelFiles
from headrace.scheduler.scheduler import Scheduler
from headrace.state.sequence import StateCost
from headrace.types.request import GREEDY, GenerationRequest

logger = logging.getLogger(__name__)

LOOKAHEAD = 8
"""Tokens that the draft model continues a prompt with; their attention gives the scores (SpecPrefill, arXiv
2502.02789)."""

Importance = npt.NDArray[np.float32]
"""Of each token of a prompt, `[M]`."""


def memory_share(draft: DraftModel, cost: StateCost, num_tokens: int) -> float:
    """The draft model's share of the memory for states beside one of that cost, for prompts of this length."""
    own, other = draft.cost.num_bytes(num_tokens + LOOKAHEAD), cost.num_bytes(num_tokens)
    return own / (own + other)


def report_line(draft: DraftModel, config: Config, budget_bytes: int) -> str:
    knobs = config.engine
    return (
        f"sparse prefill: prompts with {knobs.sparse_threshold} uncached tokens or more keep "
        f"{knobs.sparse_keep:.0%} of them, chosen by {draft.name} ({draft.weights_bytes / 1e9:.2f} GB, "
        f"{budget_bytes / 1e9:.1f} GB for its states)"
    )


def refuse_target(own: ModelFiles, target: LoadedModel) -> None:
    """Raise ConfigError for a target that can't compute a part of a prompt's tokens."""
    if (reason := target.packed.positions_refusal) is not None:
        raise refused("sparse_draft", f"{own.name} can't compute prompts in part: {reason}")


def refuse_draft(draft: DraftModel) -> None:
    """Raise ConfigError for a draft model without the attention that gives scores."""
    if not num_scoring_layers(draft.model.packed):
        what = f"{draft.name} can't tell what is important in a prompt: none of its layers attends to all of it"
        raise refused("sparse_draft", what)


class SparseDraft:
    """Scores prompts in chunks, in batches and with its own prefix cache. Belongs to the engine's thread."""

    def __init__(
        self, name: str, runner: Runner, scheduler: Scheduler, prefixes: PrefixCache, weights_bytes: int
    ) -> None:
        """runner: one that records queries. prefixes: the runner's."""
        self.name = name
        self.weights_bytes = weights_bytes
        self.runner = runner
        self._scheduler = scheduler
        self.prefixes = prefixes
        self._is_over = False
        self._lengths: dict[str, int] = {}
        """Of the prompts that are worked on."""

    @property
    def reserved_bytes(self) -> int:
        return 0 if self._is_over else self._scheduler.reserved_bytes

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

    def advance(self, limit_s: float | None) -> dict[str, Importance | None]:
        """One step with the time limit `limit_s` for prompt tokens, None for no limit.

        Returns the finished prompts' importance by request; None if scoring one failed.
        """
        plan = self._scheduler.schedule(limit_s)
        if plan.is_empty:
            return {}
        started = time.monotonic()
        result = self.runner.execute(plan, self._scheduler.planned_requests())
        now = time.monotonic()
        outcome = self._scheduler.update(result, now - started, now)
        scored: dict[str, Importance | None] = dict.fromkeys(outcome.errors)
        # before their states are freed
        scored |= {request_id: self._score(request_id) for request_id in outcome.finished}
        for request_id in scored:
            del self._lengths[request_id]
        self._free()
        return scored

    def _score(self, request_id: str) -> Importance | None:
        def fail(error: Exception) -> None:
            logger.error("the prompt of %s could not be scored", request_id, exc_info=error)

        with isolated(fail):
            found = importance(*self.runner.recorded(request_id), self._lengths[request_id])
            if not np.isfinite(found).all():
                raise GenerationFailed("the draft model's attention is NaN or infinite")
            return found
        return None

    def close(self) -> None:
        """Drop all prompts in progress; afterwards only the memory still held may be asked for."""
        self._is_over = True
        self._lengths.clear()
        self.runner.drop()

    def _free(self) -> None:
        self.runner.free(self._scheduler.take_released())
        self._scheduler.end_stages()
