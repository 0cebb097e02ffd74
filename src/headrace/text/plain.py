"""Encodes text in which the spelling of a special token is just text.

Tokenizers match added tokens before anything else, wherever the text came from, so a user who types `<|im_end|>` could
end a turn. This is a second tokenizer in which every added token has a name that can't be typed. The template's tokens
are given under that name; the usual spelling is text. One encoding sees everything, so merges and white space at the
seams come out as usual.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer as Backend

from headrace.text.encoder import EncodedIds, TextEncoder
from headrace.text.spellings import any_of

if TYPE_CHECKING:
    from collections.abc import Mapping

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class PlainTextEncoder:
    """The second tokenizer, with the same ids."""

    def __init__(self, backend: Backend) -> None:
        specification = json.loads(backend.to_str())
        original_ids = {token.content: token_id for token_id, token in backend.get_added_tokens_decoder().items()}
        # Byte tokens keep their spelling: the model looks them up by it.
        texts = [text for text in original_ids if not _BYTE_TOKEN.fullmatch(text)]
        # A noncharacter and a random number: text from outside could only contain it by guessing 64 bits.
        nonce = secrets.token_hex(8)
        self._names = {text: f"\ufdd3{nonce}:{index}\ufdd4" for index, text in enumerate(texts)}
        self._added_text = re.compile(any_of(texts))
        _rename(specification, self._names)
        renamed = Backend.from_str(json.dumps(specification))
        self._encoder = TextEncoder(renamed)
        vocabulary = renamed.get_vocab()
        self._original_ids = np.arange(max(vocabulary.values(), default=-1) + 1, dtype=np.uint32)
        for text, name in self._names.items():
            self._original_ids[vocabulary[name]] = original_ids[text]

    def encode(self, runs: Iterable[tuple[str, bool]]) -> EncodedIds:
        """Token ids of the runs as one text; in runs marked true the spelling of an added token is text."""
        text = "".join(run if is_plain else self._with_names(run) for run, is_plain in runs)
        return self._original_ids[self._encoder.encode(text, frames=False)]

    def _with_names(self, text: str) -> str:
        return self._added_text.sub(lambda match: self._names[match[0]], text)


def _rename(specification: dict[str, Any], names: Mapping[str, str]) -> None:
    """Rename the added tokens of a tokenizer file, so that no text matches them."""
    for token in specification["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = specification["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(piece, piece): token_id for piece, token_id in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        model["merges"] = [merge for merge in map(_pair, model["merges"]) if not _touches(merge, names)]


def _pair(merge: str | list[str]) -> list[str]:
    return merge.split(" ") if isinstance(merge, str) else merge


def _touches(merge: list[str], names: Mapping[str, str]) -> bool:
    left, right = merge
    return left in names or right in names or left + right in names
