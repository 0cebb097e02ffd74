"""Decodes an answer's token ids incrementally."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from headrace.text.decoding import TokenPieces

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

# The end of a prompt that the following text may depend on: an unfinished character, and whether the next token begins
# the text. More than the longest run of tokens that is held.
_NUM_CONTEXT_TOKENS = 16


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

    def follow(self, token_ids: Sequence[int]) -> None:
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
        texts = []
        for token_id in token_ids:
            if token_id in self._skipped_ids:
                continue
            piece = self._pieces.piece(token_id)
            if piece is not None:
                texts.append(self._decoder.push(token_id, piece))
        return self._without_prompt("".join(texts))

    def finish(self) -> str:
        """The held-back text, after the last id."""
        return self._without_prompt(self._decoder.finish())

    def _without_prompt(self, text: str) -> str:
        dropped = min(self._num_to_drop, len(text))
        self._num_to_drop -= dropped
        return text[dropped:]
