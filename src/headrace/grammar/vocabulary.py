"""The model's tokens in llguidance's form."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Protocol

from llguidance import LLTokenizer, TokenizerWrapper

from headrace.grammar.spelling import Spelling
from headrace.types.model import TokenIds

_END_NAME = b"<end of the answer>"


class TokenText(Protocol):
    """What grammars need of a tokenizer."""

    @property
    def token_ids(self) -> TokenIds:
        """All token ids."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Special tokens, which are no text."""

    @property
    def added_tokens(self) -> Mapping[str, int]:
        """Tokens that are matched in text as a whole, special or not, by their texts."""

    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes that a token adds to a text; None if it adds none."""

    def token_text(self, token_id: int) -> str:
        """A token's text, or a special token's name."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""


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
        """Nothing: Spelling then takes the longest token at each position."""
        return []

    @cached_property
    def digest(self) -> str:
        """Identifies the table."""
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
    def spelling(self) -> Spelling:
        return Spelling(self._token_bytes, self.tokenizer.special_ids, self.tokenizer.encode)

    @cached_property
    def _token_bytes(self) -> list[bytes]:
        return list(map(self.bytes_of, range(self.size)))

    @cached_property
    def table(self) -> TokenTable:
        """The tokens without the tokenizer, to send to another process."""
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
