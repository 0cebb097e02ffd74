"""Runners of models that write no text: a prompt gives a vector or a score instead of a token.

The scheduler plans them like prompts without output. A decoder computes its prompts in packed steps, chunk by chunk,
with the prefix cache; an encoder computes a text as a whole once its last chunk is planned.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from headrace.backend import device
from headrace.engine.adapters import AdapterPool
from headrace.engine.forward import logits_of
from headrace.engine.runner import Runner
from headrace.engine.windows import Window, failures_of
from headrace.errors import EngineDead, GenerationFailed
from headrace.isolation import isolate_each
from headrace.models.lora import Loras
from headrace.models.pooling.encoder import Encoder, EncoderInput
from headrace.types.request import GenerationRequest
from headrace.types.status import DraftStatus
from headrace.types.step import Chunk, ChunkFailure, ChunkResult, StepPlan, StepResult

logger = logging.getLogger(__name__)

Numbers = npt.NDArray[np.float32]

BATCH_TOKENS = 8192
"""Of an encoder's batch at most, with its padding, unless a single text is longer: more would not be faster."""

PADDING_SHARE = 0.2
"""Of a text in an encoder's batch at most, beside the longest one."""

_NO_TOKEN = 0
"""Stands for a sampled token in results; without output tokens it is dropped."""


class PoolingRunner(Runner):
    """Computes vectors with a decoder, whose model gives them instead of logits."""

    def _compute(self, windows: Sequence[Window]) -> None:
        rows = [one.row for one in windows]
        numbers = logits_of(self._model, windows, rows)
        states = self._model.launch(numbers, rows)
        self._close_prompts(windows)
        mx.eval(numbers, states)
        found = _on_host(numbers)
        ended = [one for one in windows if one.chunk.samples and one.error is None]
        isolate_each(ended, lambda one: _take(one, found[one.lo]), Window.fail)


def _take(window: Window, row: Numbers) -> None:
    window.vector, window.gained = _checked(row), (_NO_TOKEN,)


class EncoderRunner:
    """Computes vectors with an encoder, which keeps no state between steps."""

    state_bytes = permanent_bytes = preempted_bytes = 0

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self.adapters = AdapterPool(Loras(encoder.body))

    def execute(self, plan: StepPlan, requests: Mapping[str, GenerationRequest]) -> StepResult:
        """As `Runner.execute`. A text in several chunks is computed with the last one."""
        ends: dict[str, tuple[Chunk, EncoderInput]] = {}
        for chunk in plan.chunks:
            if chunk.samples:
                request = requests[chunk.request_id]
                ends[chunk.sequence_id] = chunk, EncoderInput(request.prompt, request.second_text)
        failures: list[ChunkFailure] = []
        results = [ChunkResult(chunk.sequence_id, len(chunk.token_ids)) for chunk in plan.chunks if not chunk.samples]

        def compute(batch: Sequence[str]) -> None:
            found = _on_host(self._encoder([ends[name][1] for name in batch]))
            isolate_each([(ends[name][0], row) for name, row in zip(batch, found, strict=True)], finish, fail_one)

        def finish(ended: tuple[Chunk, Numbers]) -> None:
            chunk, row = ended
            results.append(ChunkResult(chunk.sequence_id, len(chunk.token_ids), (_NO_TOKEN,), vector=_checked(row)))

        def fail_one(ended: tuple[Chunk, Numbers], error: Exception) -> None:
            failures.extend(failures_of(ended[0], error))

        def fail(batch: Sequence[str], error: Exception) -> None:
            logger.error("a batch of %d texts failed", len(batch), exc_info=error)
            if device.is_lost():
                raise EngineDead("the device has failed at every call since a batch failed") from error
            for name in batch:
                failures.extend(failures_of(ends[name][0], error))

        isolate_each(batches({name: len(each.token_ids) for name, (_, each) in ends.items()}), compute, fail)
        return StepResult(tuple(results), tuple(failures))

    def draft(self) -> dict[str, int]:
        return {}

    def draft_status(self) -> DraftStatus | None:
        return None

    def free(self, sequence_ids: Iterable[str]) -> None:
        pass


def batches(lengths: Mapping[str, int]) -> Iterator[list[str]]:
    """Names of texts in batches of similar length, by their numbers of tokens."""
    batch: list[str] = []
    for name in sorted(lengths, key=lengths.__getitem__, reverse=True):
        longest = lengths[batch[0]] if batch else lengths[name]
        is_similar = lengths[name] >= (1 - PADDING_SHARE) * longest
        if batch and (not is_similar or (len(batch) + 1) * longest > BATCH_TOKENS):
            yield batch
            batch = []
        batch.append(name)
    if batch:
        yield batch


def _on_host(numbers: mx.array) -> Numbers:
    return np.array(numbers.astype(mx.float32))


def _checked(row: Numbers) -> bytes:
    """Raises GenerationFailed for a vector that holds NaN or an infinity."""
    if not np.isfinite(row).all():
        raise GenerationFailed("the model's result holds numbers that are NaN or infinite")
    return row.tobytes()
