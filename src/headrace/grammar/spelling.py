"""Token ids that spell a text byte for byte, even if the tokenizer would normalise it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from functools import cached_property

_ANCHORS = ("", "\n", ".")
"""Put before a text so that the tokenizer treats it as a continuation and adds no space."""

_WORD = re.compile(r"\s*\S+|\s+")

_MAX_CHARACTERS = 512
"""Characters spelled at once: llguidance asks again at each step with all that must come."""

_NUM_UNSURE_BYTES = 64
"""At the end of an unfinished text, whose tokens could change with what follows."""


class Spelling:
    """Spells texts in a vocabulary's tokens, the tokenizer's own where their bytes match."""

    def __init__(
        self, tokens: Sequence[bytes], special_ids: AbstractSet[int], encode: Callable[[str], Sequence[int]]
    ) -> None:
        """tokens: the bytes of each id. special_ids: tokens that are no text. encode: the tokenizer's."""
        self._tokens = tokens
        self._special_ids = special_ids
        self._encode = encode

    def __call__(self, text: str) -> list[int]:
        """Ids whose bytes, joined, are the text's, or a beginning of them if the text is long or can't be spelled."""
        if len(text) <= _MAX_CHARACTERS:
            return self._whole(text)
        ids = self._whole(text[:_MAX_CHARACTERS])
        num_bytes = 0
        while len(ids) > 1 and num_bytes < _NUM_UNSURE_BYTES:
            num_bytes += len(self._tokens[ids.pop()])
        return ids

    def _whole(self, text: str) -> list[int]:
        data = text.encode()
        if (usual := self._usual(text, data)) is not None:
            return usual
        ids: list[int] = []
        for word in _WORD.findall(text):
            data = word.encode()
            spelled = self._usual(word, data) or self._greedy(data)
            ids += spelled
            if sum(len(self._tokens[each]) for each in spelled) < len(data):
                break
        return ids

    def _usual(self, text: str, data: bytes) -> list[int] | None:
        """The tokenizer's tokens for the text; None if they spell another one."""
        for anchor in _ANCHORS:
            ids = list(self._encode(anchor + text))
            first, num_bytes = len(ids), 0
            while first and num_bytes < len(data):
                first -= 1
                num_bytes += len(self._bytes_of(ids[first]))
            if b"".join(map(self._bytes_of, ids[first:])) == data:
                return ids[first:]
        return None

    def _bytes_of(self, token_id: int) -> bytes:
        return b"" if token_id in self._special_ids else self._tokens[token_id]

    def _greedy(self, data: bytes) -> list[int]:
        """The longest token at each position, as far as possible."""
        ids: list[int] = []
        start = 0
        while start < len(data):
            ends = range(min(len(data), start + self._max_token_bytes), start, -1)
            end = next((end for end in ends if data[start:end] in self._ids), None)
            if end is None:
                break
            ids.append(self._ids[data[start:end]])
            start = end
        return ids

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        return {self._bytes_of(token_id): token_id for token_id in reversed(range(len(self._tokens)))}

    @cached_property
    def _max_token_bytes(self) -> int:
        return max(map(len, self._ids))
