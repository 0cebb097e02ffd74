"""A lower bound on a text's number of tokens from its length, to refuse texts without encoding them.

A token covers at most as many bytes as the longest one of the vocabulary. That only holds if no text is dropped, so
tokenizers are inspected, and one with a part that may drop text has no bound.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.text.detokenize import BYTE_OF, parts_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_UNICODE_FORMS = frozenset({"NFC", "NFD", "NFKC", "NFKD"})

# The most bytes that Unicode normalisation maps to one: a mathematical letter of four bytes becomes a Latin one.
_MAX_SHRINK = 4

_KEEPS_ALL = frozenset({"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split", "UnicodeScripts"})

_WHITE_SPACE = b" \t\n\r\x0b\x0c\x1c\x1d\x1e\x1f"
_BEYOND_ASCII = bytes(range(0x80, 0x100))


@dataclass(frozen=True, slots=True)
class TokenBound:
    """max_bytes: of text per token. vanishing: bytes that may produce no token.

    max_shrink: bytes of non-ASCII text that normalisation may turn into one.
    """

    max_bytes: int
    vanishing: bytes
    max_shrink: int

    def least_num_tokens(self, texts: Iterable[str]) -> int:
        """A lower bound on the tokens of these texts, wherever they stand in a prompt."""
        return -(-sum(map(self._num_certain_bytes, texts)) // self.max_bytes)

    def _num_certain_bytes(self, text: str) -> int:
        is_ascii = text.isascii()
        if is_ascii and not self.vanishing:
            return len(text)
        num_bytes = len(text.encode(errors="replace").translate(None, self.vanishing))
        return num_bytes if is_ascii else num_bytes // self.max_shrink


def find_token_bound(backend: Backend) -> TokenBound | None:
    if type(backend.model).__name__ != "BPE":
        return None
    normalizers = parts_of(backend.normalizer, "normalizers")
    pre_tokenizers = parts_of(backend.pre_tokenizer, "pretokenizers")
    max_shrink, missing = _max_shrink(normalizers), _missing_bytes(backend, pre_tokenizers)
    if max_shrink is None or missing is None or not _keeps_all(pre_tokenizers):
        return None
    added = backend.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):
        # These absorb adjacent white space, some of it beyond ASCII.
        missing += _WHITE_SPACE + _BEYOND_ASCII
    # In byte-level pieces a character is a byte; in others a space may be spelled longer.
    spells_bytes = _spells_bytes(pre_tokenizers)
    longest = max(len(piece if spells_bytes else piece.encode()) for piece in backend.get_vocab())
    return TokenBound(max([longest, *(len(token.content.encode()) for token in added)]), missing, max_shrink)


def _max_shrink(normalizers: list[dict[str, Any]]) -> int | None:
    """How much shorter normalisation makes text; None if unknown."""
    shrink = 1
    for part in normalizers:
        if part["type"] in _UNICODE_FORMS:
            shrink = _MAX_SHRINK
        elif part["type"] == "Replace":
            old, new = part["pattern"].get("String"), part["content"]
            if old is None or len(old.encode()) > len(new.encode()):
                return None
        elif part["type"] != "Prepend":
            return None
    return shrink


def _keeps_all(pre_tokenizers: list[dict[str, Any]]) -> bool:
    return all(part["type"] in _KEEPS_ALL and part.get("behavior") != "Removed" for part in pre_tokenizers)


def _spells_bytes(pre_tokenizers: list[dict[str, Any]]) -> bool:
    return any(part["type"] == "ByteLevel" for part in pre_tokenizers)


def _missing_bytes(backend: Backend, pre_tokenizers: list[dict[str, Any]]) -> bytes | None:
    """Bytes without a token, which are dropped from prompts; None if whole characters may be."""
    if _spells_bytes(pre_tokenizers):
        return bytes(byte for character, byte in BYTE_OF.items() if backend.token_to_id(character) is None)
    falls_back = backend.model.byte_fallback and all(
        backend.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256)
    )
    return b"" if falls_back else None
