"""A tokenizer's post-processor: the special tokens that it adds to a text, or to the two texts of a pair."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PostProcessor:
    """Token ids before and after a text; and before, between and after the texts of a pair.

    has_types: whether the second text of a pair has another type than the first.
    """

    before: Ids
    after: Ids
    pair_before: Ids
    between: Ids
    pair_after: Ids
    has_types: bool

    def single(self, token_ids: Ids) -> Ids:
        return (*self.before, *token_ids, *self.after)

    def pair(self, first: Ids, second: Ids) -> tuple[Ids, int | None]:
        """The ids of a pair, and the index of the second text's first one if it has another type."""
        head = (*self.pair_before, *first, *self.between)
        return (*head, *second, *self.pair_after), len(head) if self.has_types else None

    @property
    def num_added(self) -> int:
        return len(self.before) + len(self.after)

    @property
    def num_added_to_pair(self) -> int:
        return len(self.pair_before) + len(self.between) + len(self.pair_after)


def find_post_processor(backend: Backend, *, has_types: bool) -> PostProcessor:
    single, pair = backend.encode("a"), backend.encode("a", "a")
    own = [index for index, each in enumerate(single.sequence_ids) if each == 0]
    first = [index for index, each in enumerate(pair.sequence_ids) if each == 0]
    second = [index for index, each in enumerate(pair.sequence_ids) if each == 1]
    return PostProcessor(
        before=tuple(single.ids[: own[0]]),
        after=tuple(single.ids[own[-1] + 1 :]),
        pair_before=tuple(pair.ids[: first[0]]),
        between=tuple(pair.ids[first[-1] + 1 : second[0]]),
        pair_after=tuple(pair.ids[second[-1] + 1 :]),
        has_types=has_types,
    )
