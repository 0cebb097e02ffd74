"""Estimates how long a request would wait for others, from how long recent requests and steps took.

A queue's wait is (place in the queue) * (the usual time that a request holds its row) / (requests that run). A prompt
that shares the steps with others waits for as much of each as it has tokens itself, because prompts take turns (see
PrefillTurns); the time per token is that of recent steps. Both leave out what makes them longer: tokens of streams in
the same steps, and requests that arrive later and go first.
"""

from __future__ import annotations

from collections.abc import Iterable

from headrace.recent_times import RecentTimes
from headrace.scheduler.live_request import LiveRequest
from headrace.scheduler.rows import CAPACITY_REASONS, Rows
from headrace.scheduler.step_time_model import StepTimeModel
from headrace.scheduler.waiting import WaitingQueue
from headrace.types.request import IDLE_PRIORITY
from headrace.types.status import WaitReason

_FOR_OTHERS = {*CAPACITY_REASONS, WaitReason.TURN}
"""Reasons of requests that wait for others to end."""


class WaitEstimate:
    """Nothing is known before two requests have ended."""

    def __init__(self) -> None:
        self._row_s = RecentTimes[None]()
        """How long requests held their rows."""

    def observe(self, live: LiveRequest, now: float) -> None:
        """Record a request that has finished at `now`, in monotonic seconds."""
        if live.request.priority < IDLE_PRIORITY:
            self._row_s.add(None, now - live.began_s)

    def queue_s(self, live: LiveRequest, waiting: WaitingQueue, rows: Rows) -> float | None:
        """Seconds until a request that is not queued could start; None if unknown."""
        ahead = waiting.before(live.request)
        reasons = {each.id: rows.waits_for(each) for each in ahead}
        blocked = [each for each in ahead if reasons[each.id] in _FOR_OTHERS]
        arrived = [each for each in ahead if reasons[each.id] is WaitReason.STEP]
        num_rows = sum(len(each.sequences) for each in (*arrived, live))
        if not blocked and rows.has_room(live) and (not arrived or rows.num_free >= num_rows):
            return 0.0
        row_s = self._row_s.usual(None)
        if row_s is None:
            return None
        place = len(blocked) + max(1, num_rows - rows.num_free)
        return place * row_s / max(1, len({sequence.request.request_id for sequence in rows.running()}))

    def prefill_s(self, running: Iterable[LiveRequest], num_tokens: int, times: StepTimeModel) -> float | None:
        """Seconds of other prompts beside one with `num_tokens` to compute; None if unknown."""
        num_others = sum(min(live.num_prompt_left, num_tokens) for live in running)
        token_s = times.prompt_token_s()
        if num_others and not token_s:
            return None
        return num_others * token_s
