"""The queue: priorities, fair share between sessions, and no starvation."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from itertools import count

from headrace.scheduler.live_request import LiveRequest
from headrace.types.request import GenerationRequest

OLDEST_EVERY = 4
"""One in this many starts goes to the request that has waited longest, whatever its priority and session.

So a request that finds m others in the queue is among the next OLDEST_EVERY * (m + 1) starts, whatever arrives later.
"""

_Class = tuple[int, str]
"""Priority and session: requests that are ranked alike, and start in the order of their arrival."""

_Rank = tuple[int, tuple[float, int]]
"""Priority, and the session's rank. The lowest starts first."""


@dataclass(slots=True)
class _Session:
    """virtual_time: tokens served, counted from the clock at its arrival. num_live: requests, waiting or running.

    last_turn: the number of its latest turn over all sessions; 0 for none.
    """

    virtual_time: float
    num_live: int = 0
    last_turn: int = 0


class FairShares:
    """Virtual-time fair queueing between sessions: the one served least goes first.

    Ties: the one whose last turn is longest ago, so a session that was alone yields to a newcomer. New sessions start
    at the clock, which advances at an even share between sessions that have requests. A session that had more is
    remembered until the clock catches up or everything is idle.
    """

    def __init__(self) -> None:
        self._sessions: dict[str, _Session] = {}
        self._clock = 0.0
        self._num_active = 0
        self._num_turns = 0

    def join(self, name: str) -> None:
        session = self._sessions.setdefault(name, _Session(self._clock))
        if session.num_live == 0:
            session.virtual_time = max(session.virtual_time, self._clock)
            self._num_active += 1
        session.num_live += 1

    def leave(self, name: str) -> None:
        session = self._sessions[name]
        session.num_live -= 1
        if session.num_live > 0:
            return
        self._num_active -= 1
        if self._num_active == 0:
            self._sessions.clear()
        else:
            for other, each in list(self._sessions.items()):
                if each.num_live == 0 and each.virtual_time <= self._clock:
                    del self._sessions[other]

    def take_turn(self, name: str, num_tokens: int) -> None:
        """A request of the session starts; its prompt of `num_tokens` counts as served."""
        self._num_turns += 1
        self._sessions[name].last_turn = self._num_turns
        self.serve(name, num_tokens)

    def serve(self, name: str, num_tokens: int) -> None:
        self._sessions[name].virtual_time += num_tokens
        self._clock += num_tokens / self._num_active

    def lead(self, name: str, other: str) -> float:
        """How much more one session has been served than another; both have requests."""
        return self._sessions[name].virtual_time - self._sessions[other].virtual_time

    def rank(self, name: str) -> tuple[float, int]:
        """Sort key of a session that has requests: virtual time, then its last turn. The lowest goes first."""
        session = self._sessions[name]
        return session.virtual_time, session.last_turn


class WaitingQueue:
    """Requests that have not started, and which is next.

    Lower priority numbers go first, then the session served least, then arrival. A prompt counts as served when it
    starts, so one session does not take several free rows in a row. The next one waits until it fits; none overtakes
    it, or a large request would never start.
    """

    def __init__(self, shares: FairShares) -> None:
        self._shares = shares
        self._waiting: dict[str, LiveRequest] = {}
        """In the order of arrival."""
        self._classes: dict[_Class, dict[str, LiveRequest]] = {}
        """The same, by what ranks them."""
        self._heap: list[tuple[_Rank, int, _Class]] = []
        """The rank and first arrival of each class, now or at some time before: both only grow. See `_lowest`."""
        self._arrivals: dict[str, int] = {}
        self._next_arrival = count()
        self._num_started = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def before(self, request: GenerationRequest) -> list[LiveRequest]:
        """Requests that start before this one, which is not queued; its session has joined the shares."""
        rank = self.rank(request)
        return [live for live in self._waiting.values() if self.rank(live.request) <= rank]

    def push(self, live: LiveRequest) -> None:
        if not self._waiting:
            self._heap.clear()  # an idle session may have come back with a lower rank
            self._classes.clear()
        self._waiting[live.id] = live
        self._arrivals[live.id] = arrival = next(self._next_arrival)
        if (key := _class_of(live)) not in self._classes:
            heappush(self._heap, (self.rank(live.request), arrival, key))
        self._classes.setdefault(key, {})[live.id] = live

    def remove(self, live: LiveRequest) -> None:
        del self._waiting[live.id], self._arrivals[live.id]
        del self._classes[_class_of(live)][live.id]

    def next(self, held_back: Container[str] = (), *, has_row: bool = True) -> LiveRequest | None:
        """The request to start next, unless all are held back.

        has_row: whether a row is free. If not, a sequence would have to be preempted, which is never done merely for
        the longest wait.
        """
        if has_row and self._is_oldest_turn:
            return _first(self._waiting.values(), held_back)
        return self._lowest(held_back)

    def _lowest(self, held_back: Container[str]) -> LiveRequest | None:
        passed, found = [], None
        while self._heap and found is None:
            *_, key = known = self._heap[0]
            alike = self._classes[key]
            if not alike:
                heappop(self._heap)
                del self._classes[key]
                continue
            first = next(iter(alike.values()))
            current = self.rank(first.request), self._arrivals[first.id], key
            if current != known:
                heapreplace(self._heap, current)
            elif (found := _first(alike.values(), held_back)) is None:
                passed.append(heappop(self._heap))
        for each in passed:
            heappush(self._heap, each)
        return found

    def start(self, live: LiveRequest, *, has_row: bool = True) -> None:
        """Remove a request that starts now. has_row: as for `next`."""
        self.remove(live)
        self._take_turn(live.request, len(live.request.prompt), has_row)

    def resume(self, request: GenerationRequest, *, has_row: bool) -> None:
        """A preempted sequence of the request resumes: that counts as a turn."""
        self._take_turn(request, 0, has_row)

    def resumes_first(self, preempted: GenerationRequest, waiting: GenerationRequest, *, has_row: bool) -> bool:
        """Whether a preempted sequence resumes before another request starts.

        It counts as having waited longer.
        """
        return (has_row and self._is_oldest_turn) or self.rank(preempted) <= self.rank(waiting)

    def rank(self, request: GenerationRequest) -> _Rank:
        return request.priority, self._shares.rank(request.session)

    @property
    def _is_oldest_turn(self) -> bool:
        return self._num_started % OLDEST_EVERY == OLDEST_EVERY - 1

    def _take_turn(self, request: GenerationRequest, num_tokens: int, has_row: bool) -> None:
        # a row freed by a preemption doesn't count: the oldest request gets its share of the free ones
        self._num_started += has_row
        self._shares.take_turn(request.session, num_tokens)


def _class_of(live: LiveRequest) -> _Class:
    return live.request.priority, live.request.session


def _first(waiting: Iterable[LiveRequest], held_back: Container[str]) -> LiveRequest | None:
    return next((live for live in waiting if live.id not in held_back), None)
