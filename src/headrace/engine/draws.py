"""Samples a step's tokens and computes their log-probabilities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from headrace.backend.transfer import Fetched, to_device
from headrace.sampling.logprobs import LogprobRows, read_logprobs, token_logprobs
from headrace.sampling.rows import SamplingRow, pick
from headrace.sampling.sampler import sample
from headrace.types.events import TokenLogprobs


@dataclass(slots=True)  # not frozen, like Drawn: that takes five times as long to make, for each row of each step
class LogitPosition:
    """A token to sample: its row in the step's logits, and how. num_top: see GenerationRequest."""

    row: int
    settings: SamplingRow
    num_top: int | None


@dataclass(slots=True)
class Drawn:
    """A sampled token, NO_TOKEN if the logits were invalid, and its log-probabilities if requested."""

    token_id: int
    logprobs: TokenLogprobs | None


class Draws:
    """All samples of one step, to be evaluated together and read afterwards."""

    def __init__(self, logits: mx.array, positions: Sequence[LogitPosition]) -> None:
        """logits: `[n, vocab_size]`."""
        self._positions = positions
        own = pick(logits, [position.row for position in positions])
        self.tokens = sample(own, [position.settings for position in positions])
        """Ids `[n]`, on the device."""
        self._fetched = Fetched(self.tokens)
        self._scored = [index for index, position in enumerate(positions) if position.num_top is not None]
        self._scores: LogprobRows | None = None
        if self._scored:
            rows = to_device(self._scored, mx.int32)
            # a row without a token has no log-probability, but the lookup needs an id
            ids = mx.maximum(self.tokens[rows], 0)
            self._scores = token_logprobs(own[rows], ids, max(positions[index].num_top or 0 for index in self._scored))

    def arrays(self) -> list[object]:
        return [self._fetched.arrays, [] if self._scores is None else self._scores.arrays()]

    def read(self) -> list[Drawn]:
        scores: Mapping[int, TokenLogprobs] = {}
        if self._scores is not None:
            counts = [self._positions[index].num_top or 0 for index in self._scored]
            scores = dict(zip(self._scored, read_logprobs(self._scores, counts), strict=True))
        return [Drawn(token_id, scores.get(index)) for index, token_id in enumerate(self._fetched.read())]


class PromptLogprobs:
    """Log-probabilities of prompt tokens that a chunk's tokens predicted."""

    def __init__(self, logits: mx.array, following: Sequence[int], num_top: int) -> None:
        """logits: `[n, vocab_size]` of the tokens before the prompt's `following` ones."""
        self._num_top = num_top
        self._scores = token_logprobs(logits[: len(following)], to_device(following, mx.int32), num_top)

    def arrays(self) -> object:
        return self._scores.arrays()

    def read(self) -> tuple[TokenLogprobs, ...]:
        return tuple(read_logprobs(self._scores, [self._num_top] * self._scores.token_ids.shape[0]))
