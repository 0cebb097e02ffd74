"""The interface of drafting by a model for many sequences at once, and sampling of drafts.

The models are the prediction head (`head.py`) and draft models (`model.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import mlx.core as mx

from headrace.backend.cuda.row_kernels import most_likely
from headrace.models.media import RowMedia
from headrace.sampling.rows import GREEDY_ROW, SamplingRow
from headrace.sampling.sampler import sample
from headrace.speculate.drafts import DraftBatch
from headrace.state.sequence import SequenceState
from headrace.state.slabs import StatePool

EntryMedia = Callable[[int, int], RowMedia]
"""A sequence's media as the head needs them for a range of tokens; see `MtpHead.read`."""


@dataclass(slots=True, eq=False)  # not frozen: that takes several times as long to make, for each row of each step
class DraftRow:
    """A sequence between two steps.

    token_ids: all known ones, at least one more than the state has computed.
    num_drafts: wanted, from 1. settings: for sampling the token after the known ones. Both only matter to `draft`.
    media: see EntryMedia.
    """

    state: SequenceState
    token_ids: Sequence[int]
    num_drafts: int = 0
    settings: SamplingRow = GREEDY_ROW
    media: EntryMedia | None = None


class Drafter:
    """Keeps what it has computed of a sequence with the sequence's state. Defaults: without a separate model."""

    draft_model: str | None = None
    """The name of a separate model; None for a prediction head."""

    weights_bytes = 0
    """Of a separate model."""

    pool: StatePool | None = None
    """Of a separate model's states."""

    @property
    def num_new_variants(self) -> int:
        """Steps so far, of the served model too, of a new compiled variant, see `CompiledSteps`."""
        raise NotImplementedError

    def num_pending(self, state: SequenceState) -> int:
        """Tokens that must be processed even if nothing is drafted, because what they need takes memory."""
        return 0

    def catch_up(self, rows: Sequence[DraftRow]) -> None:
        """Process the pending tokens, as before states are stored. The last known token is left for `draft`."""

    def stop(self, state: SequenceState) -> None:
        """Drop what is kept of a sequence that is not drafted for any more."""
        raise NotImplementedError

    def prefill_s(self, state: SequenceState, num_known: int) -> float:
        """Seconds that `prefill` will take before the sequence can be drafted for; 0 if it can be now."""
        return 0.0

    def prefill(self, rows: Sequence[tuple[SequenceState, Sequence[int]]]) -> float:
        """Process known tokens of the rows, the first ones first and as many as a step may wait for.

        Waits for the device. Returns the seconds taken.
        """
        return 0.0

    def draft(self, rows: Sequence[DraftRow]) -> DraftBatch:
        """Drafts of the tokens after the known ones, for rows sorted by falling number; launched, not waited for."""
        raise NotImplementedError


def check_order(rows: Sequence[DraftRow]) -> None:
    assert all(one.num_drafts >= other.num_drafts > 0 for one, other in pairwise(rows)), "rows are not in order"


def draw_drafts(logits: mx.array, rows: Sequence[SamplingRow], depth: int = 0) -> mx.array:
    """One draft per row, `[R]` int32, not evaluated.

    logits: the drafter's, `[R, V]` in any float type, after `depth` earlier drafts of these rows. rows: how the token
    after the known ones is sampled. A row with invalid logits gets any token.

    The draft is sampled as its position will be verified, but for penalties of earlier drafts: as if the logits were
    the served model's, with the random number of the verification. Where the distributions are similar, both land on
    the same token more often than with an independent number, or than the drafter's most likely token: by as much as
    the tokens' intervals overlap.
    """
    if all(row.is_greedy and not row.is_adjusted for row in rows):
        return most_likely(logits, 0)
    return mx.maximum(sample(logits, [replace(row, output_index=row.output_index + depth) for row in rows]), 0)
