"""A vocabulary small enough to check every token by hand."""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType

from headrace.grammar.constraint import DraftMasks
from headrace.grammar.factory import ConstraintFactory
from headrace.grammar.matcher import Matcher
from headrace.grammar.vocabulary import Vocabulary
from headrace.types.model import TokenIds
from headrace.types.request import ConstraintSpec

TEXTS = ("a", "b", "ab", "ba", "aab", "c", "\n", "\n\n", "</think>", "</th", "ink>", "x</think>\n", "<", ">", "1", " ")
END, MARK, UNUSED = len(TEXTS), len(TEXTS) + 1, len(TEXTS) + 2
NAMES = {"<end>": END, "[MARK]": MARK, "<unused>": UNUSED}


class SmallTokenizer:
    """TEXTS are the tokens, and three special ones are behind them; a text is encoded by the longest first."""

    token_ids = TokenIds(len(TEXTS) + len(NAMES))
    special_ids = frozenset(NAMES.values())
    added_tokens = MappingProxyType(NAMES)

    def token_bytes(self, token_id: int) -> bytes | None:
        return TEXTS[token_id].encode() if token_id < len(TEXTS) else None

    def token_text(self, token_id: int) -> str:
        return (*TEXTS, *NAMES)[token_id]

    def encode(self, text: str) -> list[int]:
        ids = []
        while text:
            token = max((each for each in TEXTS if text.startswith(each)), key=len)
            ids.append(TEXTS.index(token))
            text = text[len(token) :]
        return ids


def factory() -> ConstraintFactory:
    return ConstraintFactory(Vocabulary(SmallTokenizer()))


def matcher(grammar: str, stops: Iterable[int] = (END,)) -> Matcher:
    constraint = factory().begin(ConstraintSpec(grammar), frozenset(stops))
    assert isinstance(constraint, Matcher)
    return constraint


def allowed(window: DraftMasks, place: int = 0) -> set[int]:
    """Ids that may come at a place."""
    mask = window.masks[place]
    assert mask is not None
    return {token_id for token_id in range(32 * len(mask)) if int(mask[token_id // 32]) >> token_id % 32 & 1}


def ids(*texts: str) -> set[int]:
    return {TEXTS.index(text) for text in texts}
