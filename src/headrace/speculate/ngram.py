"""Drafts by copying from the sequence's own text: what followed the last time it ended in the same tokens.

The text is indexed by hash chains as in deflate (RFC 1951, section 4): a table has the newest position of every hash of
three tokens, and each position links to the previous one. So a token is added in constant time, and text and index take
12 to 16 bytes per token.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from headrace.speculate.ranking import Proposal

MIN_MATCH = 3
"""Matching tokens required for a proposal."""

MAX_MATCH = 32
"""Matches are not extended beyond this, nor proposals."""

_MAX_COMPARED = 16
"""Positions compared for one proposal, newest first."""

_FACTORS = (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35)


class NgramDrafter:
    """Proposes copies for one sequence. It only gets committed tokens, so a rejected draft leaves no trace.

    A position is a number of tokens, at least MIN_MATCH: the text after it was preceded by the tokens before it. So 0
    can end a chain.
    """

    __slots__ = ("_earlier", "_newest", "_shift", "_tokens")

    def __init__(self, token_ids: Sequence[int]) -> None:
        """token_ids: the sequence so far; 80,000 of them are indexed in 2 to 5 ms."""
        self._tokens = array("i", token_ids)
        self._earlier = array("i")
        self._newest = array("i")
        self._index()

    def __len__(self) -> int:
        return len(self._tokens)

    def append(self, token_ids: Sequence[int]) -> None:
        tokens, earlier, newest = self._tokens, self._earlier, self._newest
        for token_id in token_ids:
            tokens.append(token_id)
            position = len(tokens)
            if position < MIN_MATCH:
                earlier.append(0)
                continue
            total = tokens[-3] * _FACTORS[0] + tokens[-2] * _FACTORS[1] + token_id * _FACTORS[2]
            hashed = (total & 0xFFFFFFFF) >> self._shift
            earlier.append(newest[hashed])
            newest[hashed] = position
        if len(tokens) > len(newest):
            self._index()

    def propose(self, max_tokens: int) -> Proposal | None:
        """Up to `max_tokens` tokens that may come next.

        None if the text does not end as it did before.
        """
        num_tokens = min(max_tokens, MAX_MATCH)
        if num_tokens < 1:
            return None
        position, length = self._longest_match()
        if length < MIN_MATCH:
            return None
        # Every accepted token extends the match by one.
        return Proposal(self._copy(position, num_tokens), _CONFIDENCES[length : length + num_tokens])

    def _index(self) -> None:
        """Index the whole text, in a table with room for it to double."""
        num_tokens = len(self._tokens)
        num_bits = max(num_tokens, 64).bit_length()
        self._shift = 32 - num_bits
        earlier = np.zeros(num_tokens + 1, dtype=np.int32)
        newest = np.zeros(1 << num_bits, dtype=np.int32)
        if num_tokens >= MIN_MATCH:
            tokens = np.array(self._tokens, dtype=np.uint32)
            totals = tokens[:-2] * _FACTORS[0] + tokens[1:-1] * _FACTORS[1] + tokens[2:] * _FACTORS[2]
            # Sorting numbers of hash and position is faster than sorting positions by hash.
            ordered = (totals >> np.uint32(self._shift)).astype(np.int64) << 32
            ordered += np.arange(MIN_MATCH, num_tokens + 1)
            ordered.sort()
            hashes, positions = ordered >> 32, ordered & 0xFFFFFFFF
            earlier[positions[1:]] = positions[:-1] * (hashes[1:] == hashes[:-1])
            # of equal ones the last remains
            newest[hashes] = positions
        self._earlier = array("i", earlier.tobytes())
        self._newest = array("i", newest.tobytes())

    def _longest_match(self) -> tuple[int, int]:
        """The position before which the text matches its end longest, and the match length; ties: the newest.

        The length is 0 if there is no match.
        """
        tokens = self._tokens
        best, best_length = 0, 0
        position = self._earlier[-1]
        if not position:
            return best, best_length
        end = tokens[: -MAX_MATCH - 1 : -1]
        for _ in range(_MAX_COMPARED):
            if not position or best_length == MAX_MATCH:
                break
            # one token rules out most positions that can't be better
            if best_length < position and tokens[position - 1 - best_length] == end[best_length]:
                length = _agreement(end, tokens[max(0, position - MAX_MATCH) : position][::-1])
                if length > best_length:
                    best, best_length = position, length
            position = self._earlier[position]
        return best, best_length

    def _copy(self, position: int, num_tokens: int) -> tuple[int, ...]:
        """The tokens after `position`; at the end of the text, the copy continues with itself."""
        copied = list(self._tokens[position : position + num_tokens])
        distance = len(self._tokens) - position
        while len(copied) < num_tokens:
            copied.append(copied[-distance])
        return tuple(copied)


def _agreement(end: array[int], others: array[int]) -> int:
    """Length of the common prefix; `end` is as long or longer."""
    if end[: len(others)] == others:
        return len(others)
    return next(number for number, other in enumerate(others) if end[number] != other)


_CONFIDENCES = tuple(min(length, MAX_MATCH) / (min(length, MAX_MATCH) + 2) for length in range(2 * MAX_MATCH))
"""Initial estimate that a match of each length continues: 0.6 for 3 tokens, 0.94 from 32 on."""
