"""Answers of a model that knows nothing: every token that may come has a random logit, and one is drawn at T = 1."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.grammar.constraint import Constraint, Mask
from headrace.text.tokenizer import Tokenizer

PATIENCE = 60
"""Tokens after which the answer is led to its end: by an end marker where one may come, else by single characters."""

ENDS = (b'"', b"}", b"]", b"]}", b'"}')
CHARACTERS = tuple(bytes([byte]) for byte in range(0x21, 0x7F))

MOST_TOKENS = 3000


def legal_ids(mask: Mask) -> list[int]:
    """Ids whose bits are set."""
    return [int(token_id) for token_id in np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))]


def random_answer(constraint: Constraint, tokenizer: Tokenizer, stop: int, seed: int) -> list[int]:
    """Token ids of an answer, without the stop token, which always comes."""
    rng = np.random.default_rng(seed)
    end_markers, characters = _ids_of(tokenizer, ENDS), _ids_of(tokenizer, CHARACTERS)
    answer: list[int] = []
    while len(answer) < MOST_TOKENS:
        (mask,) = constraint.window(()).masks
        assert mask is not None
        legal = legal_ids(mask)
        assert legal, "nothing may come"
        token = legal[int(np.argmax(rng.normal(size=len(legal)) + rng.gumbel(size=len(legal))))]
        if len(answer) > PATIENCE:
            allowed = set(legal)
            ways_out = end_markers if rng.random() < 0.5 else rng.permutation(characters).tolist()
            token = next((each for each in (stop, *ways_out) if each in allowed), token)
        constraint.accept((token,))
        if token == stop:
            return answer
        answer.append(token)
    raise AssertionError(f"no end after {MOST_TOKENS} tokens: {tokenizer.decode(answer)[-200:]!r}")


def _ids_of(tokenizer: Tokenizer, texts: Sequence[bytes]) -> list[int]:
    by_bytes = {tokenizer.token_bytes(token_id): token_id for token_id in range(tokenizer.token_ids.end)}
    return [by_bytes[text] for text in texts if text in by_bytes]
