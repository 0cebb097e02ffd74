"""Drafts by copying from the sequence's own text: what followed the last time it ended in the same tokens.

The text is indexed by hash chains as in deflate (RFC 1951, section 4): a table has the newest position of every hash of
three tokens, and each position links to the previous one. So a token is added in constant time, and text and index take
12 to 16 bytes per token.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from headrace.speculate.proposal import Proposal, Source

MIN_MATCH = 3
"""Matching tokens required for a proposal."""

MAX_MATCH = 32
"""Matches are not extended beyond this."""

_MAX_PLACES = 16
"""Positions compared for one proposal, newest first."""

_FIRST_SIZE = 4
_MAX_SIZE = 32
"""Tokens of a proposal, at first and at most."""

_LOSSES_BEFORE_PAUSE = 2
_FIRST_PAUSE = 8
_MAX_PAUSE = 256
"""Tokens for which a drafter with rejected copies pauses, at first and at most."""

_FACTORS = (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35)
_HASH_MASK = 0xFFFFFFFF


class NgramDrafter:
    """Proposes copies for one sequence. It only gets committed tokens, so a rejected draft leaves no trace.

    A place is a number of tokens, at least MIN_MATCH: the text after it was preceded by the tokens before it. So 0 can
    end a chain.
    """

    __slots__ = ("_earlier", "_losses", "_newest", "_pause", "_shift", "_silent_until", "_size", "_tokens")

    def __init__(self, token_ids: Sequence[int]) -> None:
        """token_ids: the sequence so far; 80,000 of them are indexed in 2 to 5 ms."""
        self._tokens = array("i", token_ids)
        self._earlier = array("i")
        self._newest = array("i")
        self._index()
        self._size = _FIRST_SIZE
        self._losses = 0
        self._pause = _FIRST_PAUSE
        self._silent_until = 0

    def __len__(self) -> int:
        """Tokens of the text."""
        return len(self._tokens)

    def append(self, token_ids: Sequence[int]) -> None:
        """Add committed tokens to the text."""
        tokens, earlier, newest = self._tokens, self._earlier, self._newest
        for token_id in token_ids:
            tokens.append(token_id)
            place = len(tokens)
            if place < MIN_MATCH:
                earlier.append(0)
                continue
            total = tokens[-3] * _FACTORS[0] + tokens[-2] * _FACTORS[1] + token_id * _FACTORS[2]
            hashed = (total & _HASH_MASK) >> self._shift
            earlier.append(newest[hashed])
            newest[hashed] = place
        if len(tokens) > len(newest):
            self._index()

    def propose(self, max_tokens: int) -> Proposal | None:
        """Up to `max_tokens` tokens that may come next.

        None if the text does not end as it did before, or while the drafter pauses because its copies were rejected.
        """
        num_tokens = min(self._size, max_tokens)
        if num_tokens < 1 or len(self._tokens) < self._silent_until:
            return None
        place, length = self._longest_match()
        if length < MIN_MATCH:
            return None
        # Every accepted token extends the match by one.
        return Proposal(Source.COPY, self._copy(place, num_tokens), _CONFIDENCES[length : length + num_tokens])

    def report(self, num_verified: int, num_accepted: int) -> None:
        """Record how many tokens of a proposal were verified and accepted; sizes the next one.

        Call it for each proposal of which a token was verified, in any order with `append`.
        """
        if num_accepted == num_verified:
            self._size = max(self._size, min(2 * num_verified, _MAX_SIZE))
        else:
            self._size = max(num_accepted, 1) + 1
        if num_accepted:
            self._losses, self._pause = 0, _FIRST_PAUSE
            return
        self._losses += 1
        if self._losses >= _LOSSES_BEFORE_PAUSE:
            self._silent_until = len(self._tokens) + self._pause
            self._pause = min(2 * self._pause, _MAX_PAUSE)

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
            # Sorting numbers of hash and place is faster than sorting places by hash.
            ordered = (totals >> np.uint32(self._shift)).astype(np.int64) << 32
            ordered += np.arange(MIN_MATCH, num_tokens + 1)
            ordered.sort()
            hashes, places = ordered >> 32, ordered & _HASH_MASK
            earlier[places[1:]] = places[:-1] * (hashes[1:] == hashes[:-1])
            # of equal ones the last remains
            newest[hashes] = places
        self._earlier = array("i", earlier.tobytes())
        self._newest = array("i", newest.tobytes())

    def _longest_match(self) -> tuple[int, int]:
        """The place before which the text matches its end longest, and the match length; ties: the newest.

        The length is 0 if there is no match.
        """
        tokens = self._tokens
        best, best_length = 0, 0
        place = self._earlier[-1]
        if not place:
            return best, best_length
        end = tokens[: -MAX_MATCH - 1 : -1]
        for _ in range(_MAX_PLACES):
            if not place or best_length == MAX_MATCH:
                break
            # one token rules out most places that can't be better
            if best_length < place and tokens[place - 1 - best_length] == end[best_length]:
                length = _agreement(end, tokens[max(0, place - MAX_MATCH) : place][::-1])
                if length > best_length:
                    best, best_length = place, length
            place = self._earlier[place]
        return best, best_length

    def _copy(self, place: int, num_tokens: int) -> tuple[int, ...]:
        """The tokens after `place`; at the end of the text, the copy continues with itself."""
        copied = list(self._tokens[place : place + num_tokens])
        distance = len(self._tokens) - place
        while len(copied) < num_tokens:
            copied.append(copied[-distance])
        return tuple(copied)


def _agreement(end: array[int], others: array[int]) -> int:
    """Length of the common prefix; `end` is as long or longer."""
    if end[: len(others)] == others:
        return len(others)
    return next(number for number, other in enumerate(others) if end[number] != other)


_CONFIDENCES = tuple(min(length, MAX_MATCH) / (min(length, MAX_MATCH) + 2) for length in range(MAX_MATCH + _MAX_SIZE))
"""Initial estimate that a match of each length continues: 0.6 for 3 tokens, 0.94 from 32 on."""
