"""Counters and histograms over all requests since the start, for one thread."""

from __future__ import annotations

import re
import resource
import sys
from bisect import bisect_left
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from headrace.metrics.history import Seconds
from headrace.types.events import TokenOutput
from headrace.types.media import Route
from headrace.types.recent import StepHistory
from headrace.types.status import UNFINISHED, Counters, DraftCounters, Histogram
from headrace.types.step import StepPlan

# Seconds. Wide enough for a 135M model on a CPU and for an hour in the queue.
_FIRST_TOKEN_BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
_REQUEST_BOUNDS = (
    *(0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


class _Buckets:
    """A growing histogram."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._total += value * times

    def snapshot(self) -> Histogram:
        return Histogram(self._bounds, tuple(self._counts), self._total)


@dataclass(slots=True)
class _Timing:
    """A request's timestamps, in seconds of the caller's clock."""

    submitted: float
    num_prompt_tokens: int
    num_open_choices: int
    is_scheduled: bool = False
    is_computed: bool = False
    last_token: dict[int, float] = field(default_factory=dict)
    """When each choice got its last token."""


class Stats:
    """Fed by the engine's thread; times are monotonic seconds.

    A request is dropped when its last choice has finished or it ended otherwise. Events of an unknown request are
    counted as far as possible.
    """

    def __init__(self) -> None:
        self._requests: dict[str, _Timing] = {}
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0
        self._num_cached_tokens = 0
        self._num_steps = 0
        self._finished: Counter[str] = Counter()
        self._routes = Counter({Route.TEXT: 0, Route.MEDIA: 0})
        self._num_windows = 0
        self._num_drafted = 0
        self._accepted_at: list[int] = []
        self._first_token = _Buckets(_FIRST_TOKEN_BOUNDS)
        self._token = _Buckets(_TOKEN_BOUNDS)
        self._request = _Buckets(_REQUEST_BOUNDS)
        self._queue = _Buckets(_REQUEST_BOUNDS)
        self._seconds = Seconds()

    def submitted(
        self, request_id: str, num_prompt_tokens: int, now: float, num_choices: int = 1, route: Route = Route.TEXT
    ) -> None:
        self._routes[route] += 1
        self._requests[request_id] = _Timing(now, num_prompt_tokens, num_choices)

    def scheduled(self, request_id: str, now: float) -> None:
        """A request takes part in a step; only the first time matters."""
        timing = self._requests.get(request_id)
        if timing is not None and not timing.is_scheduled:
            timing.is_scheduled = True
            self._queue.observe(now - timing.submitted)

    def output(self, output: TokenOutput, now: float) -> None:
        """A step gave tokens of one choice, or its end; ignored for a request that was not submitted here.

        The prompt counts with the first output. Several tokens at once share the time since the choice's last one.
        """
        timing = self._requests.get(output.request_id)
        if timing is None or output.num_processed is not None:
            return
        num_tokens = output.num_tokens
        second = self._seconds.at(now)
        self._num_output_tokens += num_tokens
        second.num_output_tokens += num_tokens
        self._verified(output.num_drafted, output.num_accepted)
        if output.finish_reason is not None:
            self._finished[output.finish_reason.value] += 1
        if not timing.is_computed:
            timing.is_computed = True
            self._num_prompt_tokens += timing.num_prompt_tokens
            self._num_cached_tokens += output.num_cached_tokens
            second.num_lookup_tokens += timing.num_prompt_tokens
            second.num_hit_tokens += output.num_cached_tokens
            self._first_token.observe(now - timing.submitted)
        if num_tokens:
            last = timing.last_token.get(output.choice)
            if last is not None:
                self._token.observe((now - last) / num_tokens, num_tokens)
            elif num_tokens > 1:
                self._token.observe(0.0, num_tokens - 1)
            timing.last_token[output.choice] = now
        if output.finish_reason is not None:
            timing.num_open_choices -= 1
            if timing.num_open_choices == 0:
                self._close(output.request_id, now)

    def ended(self, request_id: str, reason: str, now: float) -> None:
        """A request ended with unfinished choices, which are counted under the reason.

        reason: of UNFINISHED, or a finish reason detected outside of the engine (a stop string). Only with the latter
        the request counts for request durations. An unknown request is no error: it may just have finished.
        """
        timing = self._requests.get(request_id)
        if timing is None:
            return
        self._finished[reason] += timing.num_open_choices
        if reason in UNFINISHED:
            del self._requests[request_id]
        else:
            self._close(request_id, now)

    def stepped(self, plan: StepPlan, duration_s: float, now: float) -> None:
        """A step has ended `now` and took `duration_s` seconds."""
        self._num_steps += 1
        second = self._seconds.at(now)
        second.num_steps += 1
        second.step_s += duration_s
        second.num_rows += len(plan.chunks)
        second.num_prompt_tokens += plan.num_prompt_tokens

    def history(self, now: float) -> StepHistory:
        return self._seconds.snapshot(now)

    def _verified(self, num_drafted: int, num_accepted: int) -> None:
        self._num_windows += num_drafted > 0
        self._num_drafted += num_drafted
        self._accepted_at += [0] * (num_drafted - len(self._accepted_at))
        for place in range(num_accepted):
            self._accepted_at[place] += 1

    def counters(self) -> Counters:
        """Everything so far except preemptions, which the scheduler counts and the caller adds."""
        return Counters(
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=self._num_output_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_preemptions=0,
            num_steps=self._num_steps,
            finished=tuple(sorted(self._finished.items())),
            drafts=DraftCounters(self._num_windows, self._num_drafted, tuple(self._accepted_at)),
            time_to_first_token_s=self._first_token.snapshot(),
            time_per_output_token_s=self._token.snapshot(),
            request_s=self._request.snapshot(),
            queue_s=self._queue.snapshot(),
            routes=tuple(self._routes.items()),
        )

    def _close(self, request_id: str, now: float) -> None:
        self._request.observe(now - self._requests.pop(request_id).submitted)


def process_use() -> tuple[float, int]:
    """Of this process: seconds of processor time of all threads, and bytes of peak resident memory."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    peak_bytes = used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    # on Linux that includes what the parent had before it started this process
    with suppress(OSError):
        peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text("ascii"))
        peak_bytes = peak_bytes if peak is None else int(peak[1]) * 1024
    return used.ru_utime + used.ru_stime, peak_bytes
