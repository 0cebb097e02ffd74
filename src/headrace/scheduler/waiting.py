"""The queue: priorities, a fair turn for every session, and an end to waiting for all."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from headrace.scheduler.live_request import LiveRequest
from headrace.types.request import GenerationRequest

OLDEST_EVERY = 4
"""One in this many requests that start is the one that has waited longest, whatever its priority and session.

So a request that finds m others in the queue is among the next OLDEST_EVERY * (m + 1) that start, whoever comes
later. Three turns in four go by priority and fair share.
"""


@dataclass(slots=True)
class _Session:
    """virtual_time: tokens served, counted from the clock at its arrival. num_live: requests, waiting or running.

    last_turn: number of the latest turn that was its own, over all sessions; 0 if it had none.
    """

    virtual_time: float
    num_live: int = 0
    last_turn: int = 0


class SessionShares:
    """How much each session has been served, as virtual time of fair queueing: the least goes first.

    Between equals it is the one whose last turn is longest ago, so that one that was alone before a newcomer came
    yields to it. The clock, where a newcomer's count begins, runs at the pace of an even share between the sessions
    that have requests. A session that has had more than that is remembered until the clock has caught up or all is
    idle.
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
            past = [each for each, it in self._sessions.items() if it.num_live == 0 and it.virtual_time <= self._clock]
            for each in past:
                del self._sessions[each]

    def take_turn(self, name: str, num_tokens: int) -> None:
        """A request of the session starts; its prompt of `num_tokens` counts as served."""
        self._num_turns += 1
        self._sessions[name].last_turn = self._num_turns
        self.serve(name, num_tokens)

    def serve(self, name: str, num_tokens: int) -> None:
        """Tokens have been computed for a session that has requests."""
        self._sessions[name].virtual_time += num_tokens
        self._clock += num_tokens / self._num_active

    def lead(self, name: str, other: str) -> float:
        """How much more one session has been served than another; both have requests."""
        return self._sessions[name].virtual_time - self._sessions[other].virtual_time

    def rank(self, name: str) -> tuple[float, int]:
        """Of a session that has requests: virtual time, then its last turn. The lowest goes first."""
        session = self._sessions[name]
        return session.virtual_time, session.last_turn


class WaitingQueue:
    """Requests that have not started, and which is next.

    Lower priority numbers go first, then the session that was served least, then whoever came first. A prompt
    counts as served when it starts, so that one session does not take several free places in a row. Who is next
    waits until it fits: nobody slips past, or a large request would never start.
    """

    def __init__(self, shares: SessionShares) -> None:
        self._shares = shares
        self._waiting: dict[str, LiveRequest] = {}
        self._num_started = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, live: LiveRequest) -> None:
        """Queue a request; its session has joined the shares."""
        self._waiting[live.id] = live

    def remove(self, live: LiveRequest) -> None:
        """Take a request out that will not start."""
        del self._waiting[live.id]

    def next(self, held_back: Container[str] = (), *, has_row: bool = True) -> LiveRequest | None:
        """Who starts next, if anybody waits who isn't held back.

        has_row: whether there is a place; without one, somebody who runs would have to make room, and nobody does for
        the one that has waited longest as such.
        """
        waiting = [live for live in self._waiting.values() if live.id not in held_back]
        if not waiting:
            return None
        if has_row and self._is_oldest_turn:
            return waiting[0]
        # equal keys: min keeps the first, and the list has the order of arrival
        return min(waiting, key=lambda live: self.turn(live.request))

    def start(self, live: LiveRequest, *, has_row: bool = True) -> None:
        """Take a request out that starts now. has_row: as it was for `next`."""
        del self._waiting[live.id]
        self._take_turn(live.request, len(live.request.prompt), has_row)

    def resume(self, request: GenerationRequest, *, has_row: bool) -> None:
        """A preempted sequence of the request goes on: that is a turn too."""
        self._take_turn(request, 0, has_row)

    def goes_first(self, preempted: GenerationRequest, waiting: GenerationRequest, *, has_row: bool) -> bool:
        """Whether a preempted sequence of one request goes on before another request starts.

        It has waited longer, for it has begun already.
        """
        return (has_row and self._is_oldest_turn) or self.turn(preempted) <= self.turn(waiting)

    def turn(self, request: GenerationRequest) -> tuple[int, tuple[float, int]]:
        """Of a request that is worked on: the lowest goes first."""
        return request.priority, self._shares.rank(request.session)

    @property
    def _is_oldest_turn(self) -> bool:
        return self._num_started % OLDEST_EVERY == OLDEST_EVERY - 1

    def _take_turn(self, request: GenerationRequest, num_tokens: int, has_row: bool) -> None:
        # a place that somebody has made for a turn is none of those that the oldest gets its share of
        self._num_started += has_row
        self._shares.take_turn(request.session, num_tokens)
