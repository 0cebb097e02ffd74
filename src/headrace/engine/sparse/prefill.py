"""Sparse prefill: computes only the important tokens of long prompts, as scored by a draft model (arXiv 2502.02789).

The last stage before the start of a request: a long prompt waits until it is scored. What is computed of a sparse
prompt never gets into the prefix cache.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace

from headrace.config import Config
from headrace.engine.draft_model import DraftModel
from headrace.engine.memory import fitting_context
from headrace.engine.prefix_cache import PrefixCache
from headrace.engine.runner import Runner
from headrace.engine.sparse.draft import LOOKAHEAD, Importance, SparseDraft
from headrace.engine.sparse.select import CHUNK, select
from headrace.errors import ContextTooLong
from headrace.isolation import isolated
from headrace.lru_cache import LruCache
from headrace.scheduler.admission import MemoryBudget
from headrace.scheduler.scheduler import Scheduler
from headrace.scheduler.stages import PromptPlan
from headrace.types.events import SparseUsage
from headrace.types.request import Bypass, GenerationRequest, SparseOptions
from headrace.types.status import SparseStatus, WaitReason

logger = logging.getLogger(__name__)

NUM_REMEMBERED = 8
"""Prompts whose importance is cached, so that a repeated one selects exactly the same tokens: after its prefix
cache, the draft model would compute it in other chunks, with other rounding."""


class Sparse:
    """The interface of sparse prefill, and one that is off."""

    @property
    def is_scoring(self) -> bool:
        return False

    @property
    def reserved_bytes(self) -> int:
        return 0

    @property
    def state_bytes(self) -> int:
        return 0

    @property
    def records_bytes(self) -> int:
        return 0

    def advance(self, limit_s: float | None) -> None:
        """A step of the draft model with this time limit for prompt tokens; None for no limit."""

    def evict(self, num_bytes: int) -> int:
        """Evict this much of the draft model's prefix cache, or all that isn't in use. Returns the bytes freed."""
        return 0

    def clear(self) -> int:
        return 0

    def status(self) -> SparseStatus | None:
        return None


class SparsePrefill(Sparse):
    """A stage: decides for each request whether and how its prompt is made sparse; counts why others are not."""

    def __init__(self, draft: SparseDraft, prefixes: PrefixCache, *, threshold: int, keep: float, window: int) -> None:
        """prefixes: the served model's. threshold: uncached tokens of a long prompt.

        keep: share of these to compute, unless a request sets it.
        window: the served model's largest; this many tokens at a prompt's end are kept, so that decoding sees what it
        would see in the full prompt.
        """
        self.draft = draft
        self._prefixes = prefixes
        self._threshold = threshold
        self._keep = keep
        self._window = window
        self._scoring: dict[str, tuple[str, tuple[int, ...]]] = {}
        """Cache salt and prompt of the requests that wait for their scores."""
        self._scored: dict[str, Importance | Bypass] = {}
        """Of requests that have not started: what the draft model found, or why it found nothing."""
        self._remembered: LruCache[tuple[str, tuple[int, ...]], Importance] = LruCache(NUM_REMEMBERED)
        """By cache salt and prompt."""
        self._is_broken = False
        self._bypassed: Counter[Bypass] = Counter()
        self._num_thinned = self._num_kept = self._num_dropped = 0

    def prepare(self, request: GenerationRequest, plan: PromptPlan) -> PromptPlan | WaitReason:
        if request.sparse_options is None:
            return plan
        reason = self._own_reason(request, request.sparse_options, len(request.prompt) - plan.num_cached)
        if reason is None and request.request_id not in self._scored and self._begin(request):
            return WaitReason.SCORES
        scored = reason or self._scored.pop(request.request_id)
        if isinstance(scored, Bypass):
            return self._whole(request, plan, scored)
        return self._selected(request, request.sparse_options, plan, scored)

    def still_waits(self, request_id: str) -> bool:
        return request_id in self._scoring

    def _own_reason(
        self, request: GenerationRequest, sparse_options: SparseOptions, num_uncached: int
    ) -> Bypass | None:
        if sparse_options.bypass is not None:
            return sparse_options.bypass
        if request.constraint is not None and request.constraint.grammar is not None:
            return Bypass.GRAMMAR
        if request.num_prompt_logprobs is not None:
            return Bypass.PROMPT_LOGPROBS
        if request.media is not None:
            return Bypass.MEDIA
        return Bypass.SHORT if num_uncached < self._threshold else None

    def _begin(self, request: GenerationRequest) -> bool:
        """Start scoring the prompt, unless it is cached. Returns whether it did.

        If it can't, the reason is recorded instead of a score.
        """
        known = self._remembered.get((request.cache_salt, request.prompt))
        if known is not None:
            self._scored[request.request_id] = known
            return False
        with isolated(self._break):
            try:
                if not self._is_broken:
                    self.draft.begin(request)
                    self._scoring[request.request_id] = (request.cache_salt, request.prompt)
                    return True
            except ContextTooLong:
                self._scored[request.request_id] = Bypass.DRAFT_CONTEXT
                return False
        self._scored[request.request_id] = Bypass.DRAFT_FAILED
        return False

    def _whole(self, request: GenerationRequest, plan: PromptPlan, reason: Bypass) -> PromptPlan:
        self._bypassed[reason] += 1
        return replace(plan, sparse=SparseUsage(len(request.prompt) - plan.num_cached, 0, (reason,)))

    def _selected(
        self, request: GenerationRequest, sparse_options: SparseOptions, plan: PromptPlan, found: Importance
    ) -> PromptPlan:
        start, end = plan.num_cached, len(request.prompt)
        protected = (*sparse_options.protected, range(max(0, end - max(self._window, CHUNK)), end))
        share = self._keep if sparse_options.keep is None else sparse_options.keep
        kept = select(found[start:], start, share, protected)
        num_dropped = end - start - len(kept)
        if not num_dropped:
            return self._whole(request, plan, Bypass.ALL_KEPT)
        self._prefixes.exclude(request.request_id)
        self._num_thinned += 1
        self._num_kept += len(kept)
        self._num_dropped += num_dropped
        return replace(plan, kept=kept, sparse=SparseUsage(len(kept), num_dropped))

    def end(self, request_id: str) -> None:
        self._scored.pop(request_id, None)
        if request_id in self._scoring:
            del self._scoring[request_id]
            if not self._is_broken:
                self.draft.abort(request_id)

    @property
    def is_scoring(self) -> bool:
        return bool(self._scoring)

    @property
    def reserved_bytes(self) -> int:
        return self.draft.reserved_bytes

    @property
    def state_bytes(self) -> int:
        return self.draft.runner.state_bytes

    @property
    def records_bytes(self) -> int:
        return self.draft.prefixes.num_bytes

    def advance(self, limit_s: float | None) -> None:
        with isolated(self._break):
            for request_id, importance in self.draft.advance(limit_s).items():
                key = self._scoring.pop(request_id)
                if importance is None:
                    self._scored[request_id] = Bypass.DRAFT_FAILED
                else:
                    self._scored[request_id] = importance
                    self._remembered.put(key, importance)

    def evict(self, num_bytes: int) -> int:
        return self.draft.prefixes.evict(num_bytes)

    def clear(self) -> int:
        self._remembered.clear()
        return self.draft.prefixes.clear()

    def _break(self, error: Exception) -> None:
        """The draft model's engine is in an unknown state and is not used again; no request fails for it."""
        logger.error("sparse prefill has failed; prompts are computed in full from now on", exc_info=error)
        self._is_broken = True
        self.draft.close()
        self._scored.update(dict.fromkeys(self._scoring, Bypass.DRAFT_FAILED))
        self._scoring.clear()

    def status(self) -> SparseStatus:
        return SparseStatus(
            draft=self.draft.name,
            num_thinned=self._num_thinned,
            num_kept_tokens=self._num_kept,
            num_dropped_tokens=self._num_dropped,
            bypassed=tuple((reason.value, self._bypassed[reason]) for reason in Bypass),
            num_scoring=len(self._scoring),
            weights_bytes=self.draft.weights_bytes,
            state_bytes=self.state_bytes,
            records_bytes=self.records_bytes,
        )


def start_sparse(
    config: Config,
    draft: DraftModel,
    budget_bytes: int,
    chunk_tokens: int,
    max_model_len: int,
    prefixes: PrefixCache,
    window: int,
) -> SparsePrefill:
    """The stage with the draft model's engine, which has `budget_bytes` for its states.

    max_model_len: the served model's. The rest as for SparsePrefill.
    """
    cost, knobs = draft.cost, config.engine
    own, stages = PrefixCache.off(), []
    if prefixes.is_on:
        own = PrefixCache(draft.name, has_spans=cost.has_spans, needs_snapshots=cost.needs_snapshots)
        stages.append(own)
    longest = max_model_len + LOOKAHEAD
    if draft.model.context_length is not None:
        longest = min(longest, draft.model.context_length)
    scheduler = Scheduler(
        knobs.max_num_seqs,
        chunk_tokens,
        fitting_context(budget_bytes, cost.num_bytes, longest),
        memory=MemoryBudget(budget_bytes, cost.num_bytes, cost.record_bytes),
        stages=stages,
    )
    runner = Runner(draft.model.packed, draft.model.tokens.end, own, records_queries=True)
    return SparsePrefill(
        SparseDraft(draft.name, runner, scheduler, own, draft.weights_bytes),
        prefixes,
        threshold=knobs.sparse_threshold,
        keep=knobs.sparse_keep,
        window=window,
    )
