"""The text of a sequence, for penalties and bad words."""

from __future__ import annotations

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

    __slots__ = ("_counts", "_ids", "_output", "_positions", "_prompt", "_prompt_ids", "_vocab_size")

    def __init__(self, prompt: Sequence[int], vocab_size: int) -> None:
        self._prompt = tuple(prompt)
        ids = {token_id for token_id in prompt if 0 <= token_id < vocab_size}
        self._prompt_ids: Ids = np.fromiter(ids, dtype=np.int32, count=len(ids))
        self._vocab_size = vocab_size
        self._output: list[int] = []
        # The index of each output id in the two arrays, which have room to grow.
        self._positions: dict[int, int] = {}
        self._ids: Ids = np.zeros(_FIRST_CAPACITY, dtype=np.int32)
        self._counts: Counts = np.zeros(_FIRST_CAPACITY, dtype=np.int32)

    @property
    def prompt_ids(self) -> Ids:
        """The different ids of the prompt, in any order."""
        return self._prompt_ids

    @property
    def output_ids(self) -> Ids:
        """The different ids of the output, in order of first occurrence."""
        return self._ids[: len(self._positions)]

    @property
    def output_counts(self) -> Counts:
        """The count of each of `output_ids`; a view that the next `append` may change."""
        return self._counts[: len(self._positions)]

    def append(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self._output.append(token_id)
            if self.has_id(token_id):
                self._count(token_id)

    def _count(self, token_id: int) -> None:
        index = self._positions.setdefault(token_id, len(self._positions))
        if index == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[index] = token_id
        self._counts[index] += 1

    def ends_with(self, token_ids: Sequence[int]) -> bool:
        num_tokens = len(token_ids)
        num_output = min(num_tokens, len(self._output))
        num_prompt = num_tokens - num_output
        if num_prompt > len(self._prompt):
            return False
        tail = self._prompt[len(self._prompt) - num_prompt :] + tuple(self._output[len(self._output) - num_output :])
        return tail == tuple(token_ids)

    def followed_by(self, token_ids: Sequence[int]) -> Text:
        """This text followed by tokens that may be rejected later, such as drafts. Valid until the next `append`."""
        return Continuation(self, token_ids) if token_ids else self

    def index_of(self, token_id: int) -> int | None:
        return self._positions.get(token_id)

    def has_id(self, token_id: int) -> bool:
        return 0 <= token_id < self._vocab_size


class Continuation:
    """A History with some more output, without copying the text."""

    __slots__ = ("_history", "_token_ids", "output_counts", "output_ids")

    def __init__(self, history: History, token_ids: Sequence[int]) -> None:
        self._history = history
        self._token_ids = tuple(token_ids)
        known, new = history.output_counts.copy(), dict[int, int]()
        for token_id in filter(history.has_id, token_ids):
            index = history.index_of(token_id)
            if index is None:
                new[token_id] = new.get(token_id, 0) + 1
            else:
                known[index] += 1
        self.output_ids: Ids = np.concatenate([history.output_ids, np.array(list(new), dtype=np.int32)])
        self.output_counts: Counts = np.concatenate([known, np.array(list(new.values()), dtype=np.int32)])

    @property
    def prompt_ids(self) -> Ids:
        return self._history.prompt_ids

    def followed_by(self, token_ids: Sequence[int]) -> Text:
        return self._history.followed_by((*self._token_ids, *token_ids))

    def ends_with(self, token_ids: Sequence[int]) -> bool:
        num_own = min(len(token_ids), len(self._token_ids))
        num_before = len(token_ids) - num_own
        own = self._token_ids[len(self._token_ids) - num_own :]
        return own == tuple(token_ids[num_before:]) and self._history.ends_with(token_ids[:num_before])


Text = History | Continuation
"""The text before a sampled row."""
