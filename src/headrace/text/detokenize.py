"""Token ids of one answer to text, as they come."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from headrace.text.decoding import TokenPieces


class Detokenizer:
    """Decodes one stream. What comes out, joined, is the same however the ids were split over pushes.

    It equals the tokenizer library's decoding of all ids at once, special tokens skipped. Only the bytes of a
    character that isn't finished are held back, and a run of byte tokens up to a fixed length.
    """

    def __init__(self, pieces: TokenPieces, *, skipped_ids: AbstractSet[int]) -> None:
        self._pieces = pieces
        self._skipped_ids = skipped_ids
        self._decoder = pieces.new_decoder()

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that these ids add. Ids beyond the vocabulary (a padded head can draw them) add nothing."""
        texts = []
        for token_id in token_ids:
            if token_id in self._skipped_ids:
                continue
            piece = self._pieces.piece(token_id)
            if piece is not None:
                texts.append(self._decoder.push(token_id, piece))
        return "".join(texts)

    def finish(self) -> str:
        """Text that was held back, once there are no more ids."""
        return self._decoder.finish()
