"""Decodes an answer's token ids incrementally, with one decoder for each kind in tokenizer files.

A decoder takes tokens one at a time and returns the text that no later token can change. Joined, that is what the
tokenizer library decodes from all tokens at once.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

# Byte-fallback bytes are valid only as a whole run, so a run is held until it ends. Longer ones than this are decoded
# as they come: text of a script without tokens must not wait for its end.
MAX_HELD_BYTES = 64

# Tokens whose text ends in half a character are held, at most this many: four are enough for any character.
_MAX_HELD_TOKENS = 8

# A token that every vocabulary has.
_ANY_TOKEN = 0

_SPACE_MARK = "\N{LOWER ONE EIGHTH BLOCK}"
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

# The end of a prompt that the following text may depend on: an unfinished character, and whether the next token begins
# the text. More than the longest run of tokens that is held.
_NUM_CONTEXT_TOKENS = 16


class PieceDecoder(Protocol):
    """State of one stream."""

    def bytes_of(self, token_id: int, piece: str) -> bytes:
        """The bytes of a token alone, in mid-text. Changes nothing."""

    def push(self, token_id: int, piece: str) -> str: ...

    def finish(self) -> str: ...


class TokenPieces:
    """A vocabulary's pieces and their decoder."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._pieces: dict[int, str | None] = {}
        self.new_decoder: Callable[[], PieceDecoder] = _decoder_factory(backend)
        self.bytes_of = self.new_decoder().bytes_of
        """`bytes_of(token_id, piece)`: the bytes that a token alone stands for."""

    def piece(self, token_id: int) -> str | None:
        try:
            return self._pieces[token_id]
        except KeyError:
            piece = self._backend.id_to_token(token_id) if token_id >= 0 else None
            self._pieces[token_id] = piece
            return piece


def _decoder_factory(backend: Backend) -> Callable[[], PieceDecoder]:
    steps = parts_of(backend.decoder, "decoders")
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        texts: dict[str, str | None] = {}
        return lambda: ByteLevelDecoder(texts)
    if kinds == ["Metaspace"] and steps[0]["replacement"] == _SPACE_MARK:
        drops_first = steps[0].get("prepend_scheme", "always") != "never"
        return lambda: MetaspaceDecoder(drops_first_mark=drops_first)
    if (rule := _byte_fallback_rule(steps)) is not None:
        return lambda: ByteFallbackDecoder(rule)
    return lambda: WindowDecoder(backend)


def parts_of(component: Any, name: str) -> list[dict[str, Any]]:
    """The steps of a tokenizer's component, in order, as in its file.

    From the component's own description: the tokenizer's would copy the whole vocabulary. name: of a sequence's list.
    """
    return [] if component is None else _flat(json.loads(component.__getstate__()), name)


def _flat(part: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [inner for each in part[name] for inner in _flat(each, name)] if part["type"] == "Sequence" else [part]


def _byte_table() -> dict[str, int]:
    """The characters for bytes in byte-level vocabularies.

    A byte that is a visible Latin-1 character is itself; the others are numbered from U+0100 on.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(visible)]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


BYTE_OF = _byte_table()
"""The byte of each character of a byte-level piece."""


class ByteLevelDecoder:
    """Pieces spell bytes, one character each; all tokens' bytes together are UTF-8.

    texts: a cache that streams share: the text of pieces; None for a piece with a part of a character.
    """

    def __init__(self, texts: dict[str, str | None]) -> None:
        self._texts = texts
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._holds_bytes = False

    def bytes_of(self, token_id: int, piece: str) -> bytes:
        try:
            return bytes([BYTE_OF[character] for character in piece])
        except KeyError:  # an added token with other characters is literal text
            return piece.encode()

    def push(self, token_id: int, piece: str) -> str:
        """Take a token; at most three bytes of an unfinished character are held."""
        if piece not in self._texts:
            try:
                self._texts[piece] = self.bytes_of(token_id, piece).decode()
            except UnicodeDecodeError:
                self._texts[piece] = None
        text = self._texts[piece]
        if text is None or self._holds_bytes:
            text = self._utf8.decode(self.bytes_of(token_id, piece))
            self._holds_bytes = bool(self._utf8.getstate()[0])
        return text

    def finish(self) -> str:
        """Half a character at the end becomes a replacement character."""
        return self._utf8.decode(b"", final=True)


class MetaspaceDecoder:
    """Pieces spell text with a mark for each space; the first token's marks may be an artefact."""

    def __init__(self, *, drops_first_mark: bool) -> None:
        self._drops_marks = drops_first_mark

    def bytes_of(self, token_id: int, piece: str) -> bytes:
        return piece.replace(_SPACE_MARK, " ").encode()

    def push(self, token_id: int, piece: str) -> str:
        text = piece.replace(_SPACE_MARK, "" if self._drops_marks else " ")
        self._drops_marks = False
        return text

    def finish(self) -> str:
        return ""


@dataclass(frozen=True, slots=True)
class ByteFallbackRule:
    """replacements: of text in each piece. num_stripped: spaces removed at the very front."""

    replacements: tuple[tuple[str, str], ...]
    num_stripped: int

    def replaced(self, piece: str) -> str:
        for old, new in self.replacements:
            piece = piece.replace(old, new)
        return piece


def _byte_fallback_rule(steps: list[dict[str, Any]]) -> ByteFallbackRule | None:
    """Read `Replace… ByteFallback Fuse? Strip?`; None for other steps."""
    steps = list(steps)
    replacements = []
    while steps and steps[0]["type"] == "Replace" and "String" in steps[0]["pattern"]:
        step = steps.pop(0)
        replacements.append((str(step["pattern"]["String"]), str(step["content"])))
    if not steps or steps.pop(0)["type"] != "ByteFallback":
        return None
    if not steps:
        return ByteFallbackRule(tuple(replacements), 0)
    if steps.pop(0)["type"] != "Fuse":
        return None
    if not steps:
        return ByteFallbackRule(tuple(replacements), 0)
    strip = steps.pop(0)
    if steps or strip["type"] != "Strip" or strip["content"] != " " or strip["stop"] != 0:
        return None
    return ByteFallbackRule(tuple(replacements), int(strip["start"]))


class ByteFallbackDecoder:
    """Pieces spell text, and `<0xNN>` a byte of a character without a piece.

    A run of bytes that is not UTF-8 becomes one replacement character per byte.
    """

    def __init__(self, rule: ByteFallbackRule) -> None:
        self._rule = rule
        self._num_to_strip = rule.num_stripped
        self._run = bytearray()
        self._long_run: codecs.IncrementalDecoder | None = None

    def bytes_of(self, token_id: int, piece: str) -> bytes:
        piece = self._rule.replaced(piece)
        byte = _byte_of_fallback(piece)
        return piece.encode() if byte is None else bytes([byte])

    def push(self, token_id: int, piece: str) -> str:
        """Take a token; at most MAX_HELD_BYTES bytes are held."""
        piece = self._rule.replaced(piece)
        byte = _byte_of_fallback(piece)
        if byte is None:
            return self._strip(self._end_run() + piece)
        if self._long_run is not None:
            return self._strip(self._long_run.decode(bytes([byte])))
        self._run.append(byte)
        if len(self._run) <= MAX_HELD_BYTES:
            return ""
        self._long_run = codecs.getincrementaldecoder("utf-8")("replace")
        held, self._run = bytes(self._run), bytearray()
        return self._strip(self._long_run.decode(held))

    def finish(self) -> str:
        return self._strip(self._end_run())

    def _end_run(self) -> str:
        if self._long_run is not None:
            text, self._long_run = self._long_run.decode(b"", final=True), None
            return text
        run, self._run = bytes(self._run), bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return _REPLACEMENT * len(run)

    def _strip(self, text: str) -> str:
        while self._num_to_strip and text:
            if not text.startswith(" "):
                self._num_to_strip = 0
                break
            text = text[1:]
            self._num_to_strip -= 1
        return text


def _byte_of_fallback(piece: str) -> int | None:
    if len(piece) != 6 or not piece.startswith("<0x") or not piece.endswith(">"):
        return None
    try:
        return int(piece[3:5], 16)
    except ValueError:
        return None


class WindowDecoder:
    """Any other decoder: the library decodes a few tokens with and without the new one.

    Correct for decoders that only depend on neighbours, as all known ones do.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._context: list[int] = []
        self._pending: list[int] = []

    def bytes_of(self, token_id: int, piece: str) -> bytes:
        """The text that the library adds for it after another token; half a character becomes a replacement
        character."""
        before = str(self._backend.decode([_ANY_TOKEN], skip_special_tokens=False))
        return str(self._backend.decode([_ANY_TOKEN, token_id], skip_special_tokens=False))[len(before) :].encode()

    def push(self, token_id: int, piece: str) -> str:
        """Take a token; held while the text ends in half a character, for a few tokens at most."""
        self._pending.append(token_id)
        text = self._new_text()
        if text.endswith(_REPLACEMENT) and len(self._pending) < _MAX_HELD_TOKENS:
            return ""
        self._context, self._pending = (self._context + self._pending)[-_MAX_HELD_TOKENS:], []
        return text

    def finish(self) -> str:
        text, self._pending = self._new_text(), []
        return text

    def _new_text(self) -> str:
        before = self._backend.decode(self._context, skip_special_tokens=False)
        return str(self._backend.decode(self._context + self._pending, skip_special_tokens=False))[len(before) :]


class Detokenizer:
    """Decodes one stream; the joined output does not depend on how the ids were split.

    It equals the tokenizer library's decoding of all ids at once, special tokens skipped. Only an unfinished
    character's bytes are held back, and a run of byte tokens up to a fixed length.
    """

    def __init__(self, pieces: TokenPieces, *, skipped_ids: AbstractSet[int]) -> None:
        self._pieces = pieces
        self._skipped_ids = skipped_ids
        self._decoder = pieces.new_decoder()
        self._num_to_drop = 0

    def follow_prompt(self, token_ids: Sequence[int]) -> None:
        """Continue a prompt's text, of which only an unfinished last character comes out.

        A space that the tokenizer drops at the beginning of a text is then kept.
        """
        token_ids = token_ids[-_NUM_CONTEXT_TOKENS:]
        whole = Detokenizer(self._pieces, skipped_ids=self._skipped_ids)
        text = whole.push(token_ids) + whole.finish()
        held = text[len(self.push(token_ids)) :]
        self._num_to_drop = 0 if _REPLACEMENT in held else len(held)

    def push(self, token_ids: Sequence[int]) -> str:
        """The text of these ids. Ids beyond the vocabulary (a padded head can draw them) add nothing."""
        return "".join([self.push_token(token_id) for token_id in token_ids])

    def push_token(self, token_id: int) -> str:
        piece = None if token_id in self._skipped_ids else self._pieces.piece(token_id)
        return "" if piece is None else self._without_prompt(self._decoder.push(token_id, piece))

    def finish(self) -> str:
        return self._without_prompt(self._decoder.finish())

    def _without_prompt(self, text: str) -> str:
        if not self._num_to_drop:
            return text
        dropped = min(self._num_to_drop, len(text))
        self._num_to_drop -= dropped
        return text[dropped:]
