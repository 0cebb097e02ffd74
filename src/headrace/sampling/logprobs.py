"""Log-probabilities of tokens under the model's raw distribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from headrace.sampling.rows import in_blocks, row_sums
from headrace.types.events import TokenLogprobs


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Results of `token_logprobs`, still on the device.

    token_ids: [R].
    logprobs: [R] float32.
    ranks: [R]. top_ids, top_logprobs: [R, K], best first.
    """

    token_ids: mx.array
    logprobs: mx.array
    ranks: mx.array
    top_ids: mx.array
    top_logprobs: mx.array

    def arrays(self) -> list[mx.array]:
        return [self.token_ids, self.logprobs, self.ranks, self.top_ids, self.top_logprobs]


def token_logprobs(logits: mx.array, token_ids: mx.array, num_top: int) -> LogprobRows:
    """Log-probabilities of one given token per row and of the most likely ones; nothing is evaluated.

    logits: [R, V] in any float type, as the model gave them.
    token_ids: [R], each in the vocabulary.
    num_top: K, the number of most likely tokens, at most V. Tokens are ranked by falling logit, ties by rising id. In a
    row with a NaN, with +inf or with only -inf every log-probability is NaN. Values for a NO_TOKEN are meaningless.
    Raises ValueError if there is not one token per row.
    """
    if logits.ndim != 2 or token_ids.shape != logits.shape[:1]:
        raise ValueError(f"logits of shape {logits.shape} do not fit tokens of shape {token_ids.shape}")
    logits = logits.astype(mx.float32)
    ids = token_ids[:, None]
    highest = mx.max(logits, axis=-1, keepdims=True)
    # Normalised by the highest logit: beside large logits float32 would lose the digits of the result.
    log_mass = mx.log(row_sums(mx.exp(logits - highest)))
    own = mx.take_along_axis(logits, ids, axis=-1)
    is_before = (logits > own) | ((logits == own) & (mx.arange(logits.shape[-1]) < ids))
    top_ids = _most_likely(logits, min(num_top, logits.shape[-1]))
    return LogprobRows(
        token_ids=token_ids,
        logprobs=(own - highest - log_mass).squeeze(-1),
        ranks=mx.sum(is_before, axis=-1) + 1,
        top_ids=top_ids,
        top_logprobs=mx.take_along_axis(logits, top_ids, axis=-1) - highest - log_mass,
    )


def _most_likely(logits: mx.array, num_top: int) -> mx.array:
    """Ids of the `num_top` most likely tokens, [R, K] int32, by falling logit, ties by rising id.

    Searched in the K blocks with the highest maxima, ties by rising number. A token elsewhere has at least K tokens
    before it: these maxima, each higher or equal with a lower id.
    """
    num_rows, num_tokens = logits.shape
    if num_top == 0:
        return mx.zeros((num_rows, 0), dtype=mx.int32)
    blocks = in_blocks(logits, -mx.inf)
    _, num_blocks, block_size = blocks.shape
    chosen = _first(mx.max(blocks, axis=-1), mx.arange(num_blocks), min(num_top, num_blocks))[:, :, None]
    ids = (chosen * block_size + mx.arange(block_size)).flatten(1)
    candidates = mx.take_along_axis(blocks, chosen, axis=1).flatten(1)
    # A NaN may rank below the padding, whose ids are invalid.
    return mx.minimum(_first(candidates, ids, num_top), num_tokens - 1)


def _first(logits: mx.array, ids: mx.array, count: int) -> mx.array:
    """The ids of the `count` highest logits, [R, count] int32, by falling logit, ties by rising id.

    Both are packed into one integer per token, so no two are equal and every sort agrees.
    """
    bits = (logits + 0.0).view(mx.int32)  # the sum turns -0 into 0
    order = mx.where(bits < 0, bits ^ 0x7FFFFFFF, bits).astype(mx.int64)
    keys = order * (1 << 32) - ids
    first = -mx.sort(-mx.topk(keys, count, axis=-1), axis=-1)
    return (-first & 0xFFFFFFFF).astype(mx.int32)


def read_logprobs(found: LogprobRows, num_top: Sequence[int]) -> list[TokenLogprobs]:
    """The same as values, one per row; waits for the device unless the arrays are evaluated.

    num_top: the alternatives that each row's request asked for; no more are returned than were computed.
    """
    columns = [np.array(each).tolist() for each in found.arrays()]
    return [
        TokenLogprobs(token_id, logprob, rank, tuple(zip(ids[:count], logprobs[:count], strict=True)))
        for token_id, logprob, rank, ids, logprobs, count in zip(*columns, num_top, strict=True)
    ]
