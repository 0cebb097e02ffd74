"""Who has been promised how many bytes, so that everybody can finish one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """What sequences may take together, and what one takes.

    cost: bytes of a sequence by its number of tokens; never falls as the number rises, and may rise in leaps.
    record_cost: bytes of a checkpoint of it, which never takes more; None if it takes as much.
    """

    budget_bytes: int
    cost: Callable[[int], int]
    record_cost: Callable[[int], int] | None = None

    def checkpoint_bytes(self, num_tokens: int) -> int:
        """Bytes of a checkpoint at a length of `num_tokens`."""
        return (self.cost if self.record_cost is None else self.record_cost)(num_tokens)


@dataclass(frozen=True, slots=True)
class Promise:
    """num_tokens, num_bytes: what the sequence may grow to for now. most_bytes: what it may need by its end."""

    num_tokens: int
    num_bytes: int
    most_bytes: int


class Reservations:
    """Bytes promised to sequences, in the order of their age.

    Promises for less than a sequence may need let more of them run at once, but not all may be able to grow to
    their end at once, and one that can't grow gives nothing back. So a promise is made only if the oldest could
    still grow to its end in what is free, the next in what is free once that one has ended, and so on (Dijkstra's
    banker, with age as the order). Then the oldest is never refused, and nobody waits for ever.
    """

    def __init__(self, memory: MemoryBudget) -> None:
        self._memory = memory
        self._promises: dict[str, Promise] = {}
        self._reserved_bytes = 0

    @property
    def reserved_bytes(self) -> int:
        """Sum of all promises; never over the budget."""
        return self._reserved_bytes

    def needed_bytes(self, num_sequences: int, num_tokens: int, most_tokens: int) -> int:
        """Bytes without which `take` would refuse such sequences even if nothing else were promised."""
        cost = self._memory.cost
        return (num_sequences - 1) * cost(num_tokens) + cost(most_tokens)

    def take(self, sequence_ids: Sequence[str], num_tokens: int, most_tokens: int) -> bool:
        """Promise `num_tokens` to each of some new sequences, the youngest of all; False, and nothing done, if not.

        most_tokens: what each of them may grow to, at least `num_tokens`. The caller has seen to it that
        `needed_bytes` of them is within the budget.
        """
        num_bytes = self._memory.cost(num_tokens)
        if len(sequence_ids) * num_bytes > self._room(None):
            return False
        for sequence_id in sequence_ids:
            self._promises[sequence_id] = Promise(num_tokens, num_bytes, self._memory.cost(most_tokens))
            self._reserved_bytes += num_bytes
        return True

    def extend(self, sequence_id: str, num_tokens: int) -> bool:
        """Let a sequence grow to `num_tokens`, at most what `take` was told; False, and nothing done, if not."""
        promise = self._promises[sequence_id]
        num_bytes = self._memory.cost(num_tokens)
        added = num_bytes - promise.num_bytes
        if added > 0 and added > self._room(sequence_id):
            return False
        self._promises[sequence_id] = replace(promise, num_tokens=num_tokens, num_bytes=num_bytes)
        self._reserved_bytes += added
        return True

    def shrink(self, sequence_id: str, num_bytes: int) -> Promise:
        """Leave a sequence `num_bytes`, for a checkpoint; it can't grow before `extend` says so. Gives what it had.

        Never keeps anybody from its end: what it gives up is free, and it needs no more by its end than before.
        """
        before = self._promises[sequence_id]
        self.put_back(sequence_id, replace(before, num_tokens=0, num_bytes=min(num_bytes, before.num_bytes)))
        return before

    def put_back(self, sequence_id: str, promise: Promise) -> None:
        """Undo `shrink`; nothing else may have been promised meanwhile."""
        self._reserved_bytes += promise.num_bytes - self._promises[sequence_id].num_bytes
        self._promises[sequence_id] = promise

    def num_tokens(self, sequence_id: str) -> int:
        """What the sequence may grow to for now."""
        return self._promises[sequence_id].num_tokens

    def give_back(self, sequence_id: str) -> None:
        self._reserved_bytes -= self._promises.pop(sequence_id).num_bytes

    def _room(self, sequence_id: str | None) -> int:
        """Bytes that can be promised to a sequence, or to a new one, without taking what older ones need."""
        room = free = self._memory.budget_bytes - self._reserved_bytes
        given_back = 0
        for older_id, older in self._promises.items():
            if older_id == sequence_id:
                break
            room = min(room, free + given_back - (older.most_bytes - older.num_bytes))
            given_back += older.num_bytes
        return room
