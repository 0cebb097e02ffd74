"""Finds where a text may be cut so that its segments have the same tokens as the whole.

A tokenizer splits a text at added tokens first. It normalises, splits and merges what is between two of them
separately, so a text may be cut behind such a token, and only there for tokenizers of all kinds. What comes right after
the token may depend on it: some tokens take white space on their right, and some tokenizers put a space before a
text. So every segment but the first begins with the token that the segment before ends with.

Not every added token will do. Its spelling must be that token everywhere:

- It is matched before the text is normalised, and not only as a whole word.
- No other token contains its spelling, and none ends as it begins, or else the other one could be found in its place.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from tokenizers.models import BPE, Model, Unigram

from headrace.text.control_text import any_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from tokenizers import Tokenizer as Backend

MIN_SEGMENT = 1024
"""Least characters of a segment, except the last: a cut costs as much time as some hundred characters."""


class Cuts:
    """Cuts texts after some added tokens, given by spellings and ids; never if there are none."""

    def __init__(self, token_ids: Mapping[str, int]) -> None:
        self.token_ids = token_ids
        self._ids = frozenset(token_ids.values())
        self._token = re.compile(any_of(token_ids))

    def segments(self, text: str) -> list[str]:
        """The text's segments; each but the first begins with the token that it was cut after."""
        segments, start, opening = [], 0, ""
        for match in self._token.finditer(text, MIN_SEGMENT):
            end = match.end()
            if end - start >= MIN_SEGMENT and end < len(text):
                segments.append(opening + text[start:end])
                start, opening = end, match[0]
        segments.append(opening + text[start:])
        return segments

    def fit(self, parts: Sequence[npt.NDArray[np.uint32]]) -> bool:
        return all(
            len(first) and len(second) and first[-1] == second[0] and int(second[0]) in self._ids
            for first, second in pairwise(parts)
        )


NO_CUTS = Cuts({})


def find_cuts(backend: Backend) -> Cuts:
    if backend.encode_special_tokens or _draws(backend.model):
        return NO_CUTS
    return Cuts(_safe_tokens(backend))


def _safe_tokens(backend: Backend) -> dict[str, int]:
    added = backend.get_added_tokens_decoder()
    raw = {token.content: token_id for token_id, token in added.items() if not token.normalized}
    texts = [text for text in _apart(raw) if not added[raw[text]].single_word]
    alone = backend.encode_batch_fast(texts, add_special_tokens=False)
    return {text: raw[text] for text, encoding in zip(texts, alone, strict=True) if encoding.ids == [raw[text]]}


def _draws(model: Model) -> bool:
    """Whether a model samples how it splits a text, as in training."""
    if isinstance(model, BPE):
        return bool(model.dropout)
    return isinstance(model, Unigram) and (model.alpha is not None or model.nbest_size is not None)


def _apart(spellings: Collection[str]) -> list[str]:
    joined = "\0".join(spellings)
    ends = {each[start:] for each in spellings for start in range(1, len(each))}
    return [
        each
        for each in spellings
        if joined.count(each) == 1 and not any(each[:end] in ends for end in range(1, len(each)))
    ]
