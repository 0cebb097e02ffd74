"""Reserves memory so that every sequence can finish, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """The memory for all sequences, and the cost of one.

    cost: bytes of a sequence by its number of tokens; non-decreasing, possibly in leaps.
    record_cost: bytes of its checkpoint, never more than cost; None if equal.
    """

    budget_bytes: int
    cost: Callable[[int], int]
    record_cost: Callable[[int], int] | None = None

    def checkpoint_bytes(self, num_tokens: int) -> int:
        return (self.cost if self.record_cost is None else self.record_cost)(num_tokens)


@dataclass(frozen=True, slots=True)
class Reservation:
    """num_tokens, num_bytes: what the sequence may grow to for now. most_bytes: what it may need in the end."""

    num_tokens: int
    num_bytes: int
    most_bytes: int


class Reservations:
    """Bytes reserved for sequences, oldest first.

    Reserving less than a sequence may need lets more of them run, but not all may then be able to grow to their end,
    and a stuck one releases nothing. So a reservation is made only if the oldest could still grow to its end in the
    free bytes, the next one once that has ended, and so on (Dijkstra's banker's algorithm, ordered by age). So the
    oldest is never refused, and no sequence waits forever.
    """

    def __init__(self, memory: MemoryBudget) -> None:
        self._memory = memory
        self._reservations_by_id: dict[str, Reservation] = {}
        self._reserved_bytes = 0

    @property
    def reserved_bytes(self) -> int:
        """Sum of all reservations; never over the budget."""
        return self._reserved_bytes

    def needed_bytes(self, num_sequences: int, num_tokens: int, most_tokens: int) -> int:
        """The smallest budget with which `take` would accept such sequences alone."""
        cost = self._memory.cost
        return (num_sequences - 1) * cost(num_tokens) + cost(most_tokens)

    def take(self, sequence_ids: Sequence[str], num_tokens: int, most_tokens: int) -> bool:
        """Reserve `num_tokens` for each of some new sequences. Returns False and reserves nothing if that is unsafe.

        most_tokens: what each may grow to, at least `num_tokens`. The caller has checked `needed_bytes` against the
        budget.
        """
        num_bytes = self._memory.cost(num_tokens)
        if len(sequence_ids) * num_bytes > self._room(None):
            return False
        for sequence_id in sequence_ids:
            self._reservations_by_id[sequence_id] = Reservation(num_tokens, num_bytes, self._memory.cost(most_tokens))
            self._reserved_bytes += num_bytes
        return True

    def extend(self, sequence_id: str, num_tokens: int) -> bool:
        """Let a sequence grow to `num_tokens`, at most its `most_tokens`. Returns False and changes nothing if that
        is unsafe."""
        reservation = self._reservations_by_id[sequence_id]
        num_bytes = self._memory.cost(num_tokens)
        added = num_bytes - reservation.num_bytes
        if added > 0 and added > self._room(sequence_id):
            return False
        self._reservations_by_id[sequence_id] = replace(reservation, num_tokens=num_tokens, num_bytes=num_bytes)
        self._reserved_bytes += added
        return True

    def shrink(self, sequence_id: str, num_bytes: int) -> Reservation:
        """Reduce a reservation to `num_bytes`, for a checkpoint, until `extend` succeeds. Returns the old one.

        Always safe: the bytes become free, and the sequence needs no more in the end than before.
        """
        before = self._reservations_by_id[sequence_id]
        self.put_back(sequence_id, replace(before, num_tokens=0, num_bytes=min(num_bytes, before.num_bytes)))
        return before

    def put_back(self, sequence_id: str, reservation: Reservation) -> None:
        """Undo `shrink`, if nothing else has been reserved since."""
        self._reserved_bytes += reservation.num_bytes - self._reservations_by_id[sequence_id].num_bytes
        self._reservations_by_id[sequence_id] = reservation

    def num_tokens(self, sequence_id: str) -> int:
        """What the sequence may grow to for now."""
        return self._reservations_by_id[sequence_id].num_tokens

    def release(self, sequence_id: str) -> None:
        self._reserved_bytes -= self._reservations_by_id.pop(sequence_id).num_bytes

    def _room(self, sequence_id: str | None) -> int:
        """Bytes that can be reserved for a sequence, or a new one, without taking what older ones need."""
        room = free = self._memory.budget_bytes - self._reserved_bytes
        given_back = 0
        for older_id, older in self._reservations_by_id.items():
            if older_id == sequence_id:
                break
            room = min(room, free + given_back - (older.most_bytes - older.num_bytes))
            given_back += older.num_bytes
        return room
