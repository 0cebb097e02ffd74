"""Token ids of one answer to text, as they come."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from headrace.text.decoding import TokenPieces

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

# The end of a prompt that the text behind it may depend on: a character that it leaves unfinished, and whether the next
# token begins the text. More than the longest run of tokens that is held.
_NUM_CONTEXT_TOKENS = 16


class Detokenizer:
    """Decodes one stream. What comes out, joined, is the same however the ids were split over pushes.

    It equals the tokenizer library's decoding of all ids at once, special tokens skipped. Only the bytes of a
    character that isn't finished are held back, and a run of byte tokens up to a fixed length.
    """

    def __init__(self, pieces: TokenPieces, *, skipped_ids: AbstractSet[int]) -> None:
        self._pieces = pieces
        self._skipped_ids = skipped_ids
        self._decoder = pieces.new_decoder()
        self._num_to_drop = 0

    def follow(self, token_ids: Sequence[int]) -> None:
        """Go on from the text of a prompt: nothing of it comes out but a character that it leaves unfinished.

        A space that the tokenizer drops from the beginning of a text is kept then.
        """
        token_ids = token_ids[-_NUM_CONTEXT_TOKENS:]
        whole = Detokenizer(self._pieces, skipped_ids=self._skipped_ids)
        text = whole.push(token_ids) + whole.finish()
        held = text[len(self.push(token_ids)) :]
        self._num_to_drop = 0 if _REPLACEMENT in held else len(held)

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that these ids add. Ids beyond the vocabulary (a padded head can draw them) add nothing."""
        texts = []
        for token_id in token_ids:
            if token_id in self._skipped_ids:
                continue
            piece = self._pieces.piece(token_id)
            if piece is not None:
                texts.append(self._decoder.push(token_id, piece))
        return self._without_prompt("".join(texts))

    def finish(self) -> str:
        """Text that was held back, once there are no more ids."""
        return self._without_prompt(self._decoder.finish())

    def _without_prompt(self, text: str) -> str:
        dropped = min(self._num_to_drop, len(text))
        self._num_to_drop -= dropped
        return text[dropped:]
