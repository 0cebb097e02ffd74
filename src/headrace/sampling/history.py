"""The text of a sequence, for penalties and bad words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headrace.types.request import SamplingParams

Ids = npt.NDArray[np.int32]
Counts = npt.NDArray[np.int32]

_FIRST_CAPACITY = 64


def needs_history(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or counts_output(params) or bool(params.banned_sequences)


def counts_output(params: SamplingParams) -> bool:
    return params.frequency_penalty != 0 or params.presence_penalty != 0


class History:
    """The tokens of one sequence, and the count of each in its output.

    On the host, by token id: a step costs by the different tokens of the text, not by the vocabulary. Ids outside the
    vocabulary are part of the text but are never counted.
    """

    __slots__ = ("_counts", "_ids", "_output", "_positions", "_prompt", "_vocab_size", "prompt_ids")

    def __init__(self, prompt: Sequence[int], vocab_size: int) -> None:
        self._prompt = tuple(prompt)
        self._vocab_size = vocab_size
        ids = set(filter(self._has_id, prompt))
        self.prompt_ids: Ids = np.fromiter(ids, dtype=np.int32, count=len(ids))
        """The different ids of the prompt, in any order."""
        self._output: list[int] = []
        # The index of each output id in the two arrays, which have room to grow.
        self._positions: dict[int, int] = {}
        self._ids: Ids = np.zeros(_FIRST_CAPACITY, dtype=np.int32)
        self._counts: Counts = np.zeros(_FIRST_CAPACITY, dtype=np.int32)

    def append(self, token_ids: Sequence[int]) -> None:
        self._output += token_ids
        for token_id in filter(self._has_id, token_ids):
            index = self._positions.setdefault(token_id, len(self._positions))
            if index == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[index] = token_id
            self._counts[index] += 1

    def output_counts(self, drafts: Sequence[int] = ()) -> tuple[Ids, Counts]:
        """The different ids of the output and of drafts after it, in order of first occurrence, and the count of each.

        Views that the next `append` may change.
        """
        ids, counts = self._ids[: len(self._positions)], self._counts[: len(self._positions)]
        if not drafts:
            return ids, counts
        counts, new = counts.copy(), Counter[int]()
        for token_id in filter(self._has_id, drafts):
            if (index := self._positions.get(token_id)) is None:
                new[token_id] += 1
            else:
                counts[index] += 1
        more_ids, more_counts = (np.fromiter(each, dtype=np.int32, count=len(new)) for each in (new, new.values()))
        return np.concatenate([ids, more_ids]), np.concatenate([counts, more_counts])

    def ends_with(self, token_ids: Sequence[int], drafts: Sequence[int] = ()) -> bool:
        """Whether the text, with drafts after it, ends with these tokens."""
        tail: list[int] = []
        for part in (drafts, self._output, self._prompt):
            num_missing = len(token_ids) - len(tail)
            tail = [*part[max(0, len(part) - num_missing) :], *tail]
        return tail == list(token_ids)

    def _has_id(self, token_id: int) -> bool:
        return 0 <= token_id < self._vocab_size
