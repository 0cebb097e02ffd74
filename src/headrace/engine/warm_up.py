"""Steps of made-up requests before the first real one: they build what steps of each size need."""

from __future__ import annotations

import logging
import time

from headrace.engine.runner import Runner
from headrace.errors import EngineDead
from headrace.models.mixers.fused import padded_rows
from headrace.models.packed import PackedModel
from headrace.scheduler.reservations import MemoryBudget
from headrace.scheduler.scheduler import Scheduler
from headrace.state.slabs import StatePool
from headrace.types.request import GenerationRequest, SamplingParams

_MOST_ROWS = 64
_PROMPT_TOKENS = 16
"""More than rows of a compiled step have, so that what prompts need is built too."""
_MAX_TOKENS = 6
_GREEDY = SamplingParams(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=0)

logger = logging.getLogger(__name__)


def warm_up(
    model: PackedModel,
    num_tokens: int,
    states: StatePool,
    memory: MemoryBudget,
    max_num_seqs: int,
    chunk_tokens: int,
) -> str:
    """Answer made-up requests, as many at once as a compiled step may have rows, for each such number.

    num_tokens: in the vocabulary. Returns a line for the report. A failure is logged and left to the first request that
    meets it. Raises EngineDead where the device can compute nothing any more.
    """
    started = time.monotonic()
    sizes = sorted({padded_rows(number) for number in range(1, min(max_num_seqs, _MOST_ROWS) + 1)})
    logger.info("warming up steps of up to %d rows; the first time on a machine kernels are built", sizes[-1])
    reached = 0
    for size in sizes:
        try:
            num_rows = _answer(model, num_tokens, states, memory, min(size, max_num_seqs), chunk_tokens)
        except EngineDead:
            raise
        except Exception:  # the exception boundary of work that no request has asked for
            logger.exception("steps of %d rows could not be warmed up", size)
            break
        reached = max(reached, num_rows)
    return f"warm-up: steps of up to {reached} rows in {time.monotonic() - started:.1f} s"


def _answer(
    model: PackedModel,
    num_tokens: int,
    states: StatePool,
    memory: MemoryBudget,
    num_requests: int,
    chunk_tokens: int,
) -> int:
    """Gives the most rows that a step had. Raises the error of the first row that fails."""
    scheduler = Scheduler(num_requests, chunk_tokens, _PROMPT_TOKENS + _MAX_TOKENS, memory=memory)
    runner = Runner(model, num_tokens, pool=states, ahead=model.is_compiled)
    for number in range(num_requests):
        prompt = tuple((number + place) % num_tokens for place in range(_PROMPT_TOKENS))
        scheduler.add(GenerationRequest(str(number), prompt, _GREEDY, _MAX_TOKENS), time.monotonic())
    most_rows = 0
    try:
        while scheduler.num_running + scheduler.num_waiting:
            before, plan = time.monotonic(), scheduler.schedule()
            if plan.is_empty:  # no memory for another request
                break
            result = runner.execute(plan, scheduler.planned_requests())
            if result.failures:
                raise result.failures[0].error
            most_rows = max(most_rows, len(plan.chunks))
            now = time.monotonic()
            scheduler.update(result, now - before, now)
            runner.free(scheduler.released())
            scheduler.forget_ended()
    finally:
        runner.drop()
    return most_rows
