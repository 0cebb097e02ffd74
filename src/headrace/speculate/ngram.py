"""Drafts copied from a sequence's own text: what followed the last time that it ended in the same tokens.

The text is indexed by chains as in the deflate format (RFC 1951, section 4): a table names the newest place of every
hash of three tokens, and each place the one before it. So a token is added in constant time, and text and index take
12 to 16 bytes for each token whatever they say.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from headrace.speculate.draft import Proposal, Source

MIN_MATCH = 3
"""Tokens that must agree before a copy is proposed."""

MAX_MATCH = 32
"""Agreement is not looked at beyond this."""

_MAX_PLACES = 16
"""Places that are compared for one proposal, newest first."""

_FIRST_SIZE = 4
_MAX_SIZE = 32
"""Tokens of a proposal, at first and at most."""

_LOSSES_BEFORE_PAUSE = 2
_FIRST_PAUSE = 8
_MAX_PAUSE = 256
"""Tokens for which a drafter that keeps losing is silent, at first and at most."""

_FACTORS = (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35)
_HASH_MASK = 0xFFFFFFFF


class NgramDrafter:
    """Proposes copies for one sequence. It is told committed tokens only, so a rejected draft leaves no trace in it.

    A place is a number of tokens, from MIN_MATCH: the text behind it was preceded by the tokens before it. So 0 is free
    to end a chain.
    """

    __slots__ = ("_earlier", "_losses", "_newest", "_pause", "_shift", "_silent_until", "_size", "_tokens")

    def __init__(self, token_ids: Sequence[int]) -> None:
        """token_ids: the sequence so far; 80,000 of them are indexed in about 20 ms."""
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

        None if the text does not end as it did before, or while the drafter is silent because its copies kept losing.
        """
        num_tokens = min(self._size, max_tokens)
        if num_tokens < 1 or len(self._tokens) < self._silent_until:
            return None
        place, length = self._longest_match()
        if length < MIN_MATCH:
            return None
        # Every right token makes the match one longer.
        return Proposal(Source.COPY, self._copy(place, num_tokens), _CONFIDENCES[length : length + num_tokens])

    def report(self, num_verified: int, num_accepted: int) -> None:
        """Tell how many tokens of a proposal were verified and how many of these were right; sizes the next one.

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
        """Index the whole text, in a table with room for it to grow up to twofold."""
        num_tokens = len(self._tokens)
        num_bits = max(num_tokens, 64).bit_length()
        self._shift = 32 - num_bits
        earlier = np.zeros(num_tokens + 1, dtype=np.int32)
        newest = np.zeros(1 << num_bits, dtype=np.int32)
        if num_tokens >= MIN_MATCH:
            tokens = np.array(self._tokens, dtype=np.uint32)
            totals = tokens[:-2] * _FACTORS[0] + tokens[1:-1] * _FACTORS[1] + tokens[2:] * _FACTORS[2]
            hashes = totals >> np.uint32(self._shift)
            order = np.argsort(hashes, kind="stable")
            hashes, places = hashes[order], order + MIN_MATCH
            earlier[places[1:]] = places[:-1] * (hashes[1:] == hashes[:-1])
            # of equal ones the last stays
            newest[hashes] = places
        self._earlier = array("i", earlier.tobytes())
        self._newest = array("i", newest.tobytes())

    def _longest_match(self) -> tuple[int, int]:
        """The place before which the text agrees longest with its end, of equals the newest, and for how many tokens.

        The length is 0 if there is none.
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
            # one token tells most of the places that can't be better
            if best_length < place and tokens[place - 1 - best_length] == end[best_length]:
                length = _agreement(end, tokens[max(0, place - MAX_MATCH) : place][::-1])
                if length > best_length:
                    best, best_length = place, length
            place = self._earlier[place]
        return best, best_length

    def _copy(self, place: int, num_tokens: int) -> tuple[int, ...]:
        """The tokens behind `place`; where they reach the end of the text, the copy goes on with itself."""
        copied = list(self._tokens[place : place + num_tokens])
        distance = len(self._tokens) - place
        while len(copied) < num_tokens:
            copied.append(copied[-distance])
        return tuple(copied)


def _agreement(end: array[int], others: array[int]) -> int:
    """How many tokens are the same, from the first on; `end` is as long or longer."""
    if end[: len(others)] == others:
        return len(others)
    return next(number for number, other in enumerate(others) if end[number] != other)


_CONFIDENCES = tuple(min(length, MAX_MATCH) / (min(length, MAX_MATCH) + 2) for length in range(MAX_MATCH + _MAX_SIZE))
"""A first guess of how likely a match of each length goes on, to be corrected: 0.6 for 3 tokens, 0.94 from 32 on."""
