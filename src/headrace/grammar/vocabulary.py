"""The model's tokens in llguidance's form, and texts spelled in them."""

from __future__ import annotations

import pickle
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Protocol

from llguidance import LLTokenizer, TokenizerWrapper

from headrace.types.model import TokenIds

_END_NAME = b"<end of the answer>"


class TokenText(Protocol):
    """What grammars need of a tokenizer."""

    @property
    def token_ids(self) -> TokenIds: ...

    @property
    def special_ids(self) -> frozenset[int]: ...

    @property
    def added_tokens(self) -> Mapping[str, int]:
        """Tokens that are matched in text as a whole, special or not, by their texts."""

    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes that a token adds to a text; None if it adds none."""

    def token_text(self, token_id: int) -> str: ...

    def encode(self, text: str) -> list[int]: ...


@dataclass(frozen=True)
class TokenTable:
    """A TokenText with all tokens but without the tokenizer's algorithm.

    texts: the bytes of each id, of a special token its name, empty for an invalid id.
    """

    texts: tuple[bytes, ...]
    special_ids: frozenset[int]
    added_tokens: Mapping[str, int]

    @cached_property
    def token_ids(self) -> TokenIds:
        return TokenIds(len(self.texts), frozenset(each for each, text in enumerate(self.texts) if not text))

    def token_bytes(self, token_id: int) -> bytes | None:
        return self.texts[token_id]

    def token_text(self, token_id: int) -> str:
        return self.texts[token_id].decode(errors="replace")

    def encode(self, text: str) -> list[int]:
        """Nothing: Speller then takes the longest token at each position."""
        return []

    @cached_property
    def digest(self) -> str:
        return sha256(pickle.dumps((self.texts, sorted(self.special_ids), sorted(self.added_tokens)))).hexdigest()


class Vocabulary:
    """A tokenizer with everything derived from it on demand: half a second for 250,000 tokens."""

    def __init__(self, tokenizer: TokenText) -> None:
        self.tokenizer = tokenizer
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """Number of ids up to the last token's, which is the number of bits in a mask."""
        return self.tokenizer.token_ids.end

    @property
    def end_id(self) -> int:
        """An extra token after all others, by which llguidance signals that a text may end.

        The request decides which real tokens end an answer.
        """
        return self.size

    def bytes_of(self, token_id: int) -> bytes:
        """A token's text, or a special token's name; empty for an invalid id."""
        if not 0 <= token_id < self.size:
            return b""
        data = self.tokenizer.token_bytes(token_id)
        return self.tokenizer.token_text(token_id).encode() if data is None else data

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        special = self.tokenizer.special_ids
        return {text: token_id for text, token_id in self.tokenizer.added_tokens.items() if token_id in special}

    @cached_property
    def spelling(self) -> Speller:
        return Speller(self._token_bytes, self.tokenizer.special_ids, self.tokenizer.encode)

    @cached_property
    def _token_bytes(self) -> list[bytes]:
        return list(map(self.bytes_of, range(self.size)))

    @cached_property
    def table(self) -> TokenTable:
        return TokenTable(tuple(self._token_bytes), self.tokenizer.special_ids, self.special_tokens)

    @property
    def compiled(self) -> LLTokenizer:
        """The tokenizer in llguidance's form. Thread-safe."""
        with self._lock:
            return self._compiled

    @cached_property
    def _compiled(self) -> LLTokenizer:
        return LLTokenizer(_Tokens(self))


class _Tokens(TokenizerWrapper):
    """llguidance's interface of a tokenizer."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.is_tokenizer_wrapper = True
        self.bos_token_id = None
        self.tokens = [*vocabulary._token_bytes, _END_NAME]
        self.eos_token_id = vocabulary.end_id
        self.special_token_ids = [*sorted(vocabulary.tokenizer.special_ids), vocabulary.end_id]
        self._spelling = vocabulary.spelling

    def __call__(self, text: str | bytes) -> list[int]:
        return self._spelling(text if isinstance(text, str) else text.decode())


_ANCHORS = ("", "\n", ".")
"""Put before a text so that the tokenizer treats it as a continuation and adds no space."""

_WORD = re.compile(r"\s*\S+|\s+")

_MAX_CHARACTERS = 512
"""Characters spelled at once: llguidance asks again at each step with all that must come."""

_NUM_UNSURE_BYTES = 64
"""At the end of an unfinished text, whose tokens could change with what follows."""


class Speller:
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
