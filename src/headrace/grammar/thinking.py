"""An end to thinking: after so many tokens its closer is the only thing that may come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from headrace.errors import GenerationFailed
from headrace.grammar.constraint import Mask, Window, mask_of
from headrace.grammar.vocabulary import Vocabulary
from headrace.types.request import ThinkingLimit


class _Phase(Enum):
    BEFORE = "nothing but white space has come; thinking may begin"
    THINKING = "inside a block"
    CLOSING = "the closer is being forced"
    ANSWER = "whatever comes is not thinking"


@dataclass(frozen=True, slots=True)
class _Place:
    """How far a sequence has come.

    num_tokens: of thinking, over all blocks. tail: last bytes, those that may be the beginning of a marker.
    num_closed: tokens of the forced closing that have come.
    """

    phase: _Phase
    num_tokens: int = 0
    tail: bytes = b""
    num_closed: int = 0


class ThinkingBudget:
    """A Constraint: counts tokens of thinking before the answer, in one block or in several with nothing between them.

    A token that opens or closes a block does not count. A block that begins where all is used up is closed at once.
    """

    def __init__(self, limit: ThinkingLimit, vocabulary: Vocabulary) -> None:
        self._limit = limit
        self._vocabulary = vocabulary
        self._opener, self._closer = limit.opener.encode(), limit.closer.encode()
        self._place = self._settled(_Place(_Phase.THINKING if limit.is_open else _Phase.BEFORE))

    @property
    def is_over(self) -> bool:
        """Never: an answer may be anything."""
        return False

    def num_legal(self, drafts: Sequence[int]) -> int:
        return self.window(drafts).num_legal

    def window(self, drafts: Sequence[int]) -> Window:
        masks: list[Mask | None] = []
        place = self._place
        for num_legal, draft in enumerate(drafts):
            wanted = self._wanted(place)
            masks.append(self._only(wanted))
            if wanted is not None and draft != wanted:
                masks += [None] * (len(drafts) + 1 - len(masks))
                return Window(tuple(masks), num_legal)
            place = self._after(place, draft)
        masks.append(self._only(self._wanted(place)))
        return Window(tuple(masks), len(drafts))

    def accept(self, token_ids: Sequence[int]) -> None:
        """See Constraint. Raises GenerationFailed for a token that may not come."""
        for token_id in token_ids:
            if self._wanted(self._place) not in (None, token_id):
                raise GenerationFailed("thinking went on where it had to end")
            self._place = self._after(self._place, token_id)

    def forced_tokens(self, limit: int) -> tuple[int, ...]:
        if self._place.phase is not _Phase.CLOSING:
            return ()
        return self._limit.closing[self._place.num_closed :][:limit]

    def copy(self) -> ThinkingBudget:
        copy = ThinkingBudget(self._limit, self._vocabulary)
        copy._place = self._place
        return copy

    def _wanted(self, place: _Place) -> int | None:
        """The only token that may come; None if any may."""
        return self._limit.closing[place.num_closed] if place.phase is _Phase.CLOSING else None

    def _only(self, token_id: int | None) -> Mask | None:
        return None if token_id is None else mask_of((token_id,), self._vocabulary.size)

    def _after(self, place: _Place, token_id: int) -> _Place:
        if place.phase is _Phase.ANSWER:
            return place
        if place.phase is _Phase.CLOSING:
            if place.num_closed + 1 < len(self._limit.closing):
                return replace(place, num_closed=place.num_closed + 1)
            return replace(place, phase=_Phase.BEFORE, num_closed=0)
        after = self._read(replace(place, tail=place.tail + self._vocabulary.bytes_of(token_id)))
        if place.phase is after.phase is _Phase.THINKING:
            after = replace(after, num_tokens=after.num_tokens + 1)
        return self._settled(after)

    def _read(self, place: _Place) -> _Place:
        """The place behind the markers in its tail."""
        if place.phase is _Phase.THINKING:
            _, found, rest = place.tail.partition(self._closer)
            if found:
                return self._read(replace(place, phase=_Phase.BEFORE, tail=rest))
            return replace(place, tail=place.tail[max(0, len(place.tail) - len(self._closer) + 1) :])
        begun = place.tail.lstrip()
        if begun.startswith(self._opener):
            return self._read(replace(place, phase=_Phase.THINKING, tail=begun[len(self._opener) :]))
        if self._opener.startswith(begun):
            return replace(place, tail=begun)
        return replace(place, phase=_Phase.ANSWER, tail=b"")

    def _settled(self, place: _Place) -> _Place:
        """Closing, if thinking has used up what it may."""
        if place.phase is _Phase.THINKING and place.num_tokens >= self._limit.num_tokens:
            return replace(place, phase=_Phase.CLOSING, tail=b"")
        return place
