"""The prefix cache with its states: what prompts leave for later ones.

A stage before the start of a request: `prepare` finds the cached prefix. The runner restores it, takes snapshots where
`begin_chunk` says, and hands over what a sequence has computed when its prompt is done and when its row is freed. All
of that happens between steps, on the engine's thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from headrace.common_prefix import common_length
from headrace.prefix.key import MediaKey, Namespace, cache_key
from headrace.prefix.node import Match, Piece
from headrace.prefix.radix import PrefixTree
from headrace.prefix.snapshots import plan_snapshots
from headrace.scheduler.stages import PromptPlan
from headrace.state.disk import DiskTier
from headrace.state.disk_records import Load
from headrace.state.records import SequenceRecord, SpanRecord
from headrace.state.sequence import SequenceState
from headrace.types.recent import LookupStatus
from headrace.types.request import IDLE_PRIORITY, GenerationRequest
from headrace.types.status import CacheStatus, WaitReason

WAIT_TOKENS = 64
"""A request waits for a running prompt that will save it at least this many tokens."""

NEAR_TOKENS = 16
"""No snapshot is taken within this many tokens after another one or after the prompt's start: computing them again is
cheaper than copying and restoring a snapshot (50 MB for Qwen3.5-4B)."""

MAX_LOOKUPS = 20
"""The status shows so many of the latest lookups."""


def _is_near(length: int, snapshots: Collection[int]) -> bool:
    return any(0 <= length - each <= NEAR_TOKENS for each in snapshots)


def _lookup_status(request_id: str, match: Match) -> LookupStatus:
    return LookupStatus(
        time=time.time(),
        request_id=request_id,
        num_prompt_tokens=match.num_prompt_tokens,
        num_hit_tokens=match.num_tokens,
        num_agreed_tokens=match.num_agreed_tokens,
        mismatch=match.mismatch.value,
    )


@dataclass(frozen=True, slots=True)
class Lookup:
    """A prompt in the cache's terms, and what was found of it."""

    namespace: Namespace
    key: tuple[int, ...]
    match: Match


@dataclass(slots=True, eq=False)
class _Prompt:
    """A request whose prompt is being computed.

    lookup: with the match locked.
    snapshot_points: lengths at which snapshots are still to be taken.
    num_computed: tokens given to the runner.
    counts: whether it counts as a lookup, once it begins.
    snapshots, spans: copies of what it has computed that are not in the tree yet.
    is_done: no request waits for it: it is stored, is not kept, or has ended.
    is_sparse: sparse prefill has changed what is computed.
    """

    lookup: Lookup
    snapshot_points: set[int]
    num_computed: int
    counts: bool
    snapshots: dict[int, SequenceRecord] = field(default_factory=dict)
    spans: list[SpanRecord] = field(default_factory=list)
    has_begun: bool = False
    is_done: bool = False
    is_sparse: bool = False

    def last_snapshot(self, length: int) -> int:
        """The last snapshot, taken or still to be taken, of at most that length; 0 for none."""
        return max((each for each in self.snapshots.keys() | self.snapshot_points if each <= length), default=0)


class PrefixCache:
    """The prefix cache of one engine. It ignores requests that it has not prepared."""

    def __init__(
        self,
        weights: str,
        *,
        has_spans: bool,
        needs_snapshots: bool,
        disk: DiskTier | None = None,
        shortest_prefix: int = NEAR_TOKENS + 1,
    ) -> None:
        """weights: fingerprint of the weights and their format. disk: where states are saved, too; None for nowhere.

        shortest_prefix: tokens of a prompt before the first snapshot inside it.
        """
        self.is_on = True
        self._weights = weights
        self._has_spans = has_spans
        self.needs_snapshots = needs_snapshots
        self._shortest_prefix = shortest_prefix
        self._tree = PrefixTree(has_spans=has_spans, needs_snapshots=needs_snapshots)
        self._prompts: dict[str, _Prompt] = {}
        self._awaited: dict[str, _Prompt] = {}
        """The prompt in progress that each waiting request waits for."""
        self._disk = disk
        self._lookups: deque[LookupStatus] = deque(maxlen=MAX_LOOKUPS)

    @classmethod
    def off(cls) -> PrefixCache:
        """A cache that prepares no requests, so that it stays empty."""
        cache = cls("", has_spans=True, needs_snapshots=False)
        cache.is_on = False
        return cache

    @property
    def num_bytes(self) -> int:
        return self._tree.num_bytes

    def status(self) -> CacheStatus | None:
        if not self.is_on:
            return None
        disk = None if self._disk is None else self._disk.status()
        return replace(self._tree.summary(), disk=disk, lookups=tuple(self._lookups))

    def prepare(self, request: GenerationRequest, plan: PromptPlan) -> PromptPlan | WaitReason:
        """Find and lock the cached part of the prompt; at least one token is left to compute."""
        lookup = self._look_up(request)
        if (awaited := next(self._worth_waiting_for(lookup), None)) is not None:
            other, num_shared = awaited
            if self.needs_snapshots and num_shared not in other.snapshots:
                other.snapshot_points.add(num_shared)
            self._awaited[request.request_id] = other
            return WaitReason.PREFIX
        self._awaited.pop(request.request_id, None)
        match = lookup.match
        restore = plan_snapshots(match, request.boundaries, needs_snapshots=self.needs_snapshots)
        self._tree.lock(match)
        counts = request.priority < IDLE_PRIORITY
        points = {length for length in restore.snapshot_points if length >= self._shortest_prefix}
        self._prompts[request.request_id] = _Prompt(lookup, points, match.num_tokens, counts)
        return replace(plan, num_cached=match.num_tokens, reuse=restore.report)

    def _look_up(self, request: GenerationRequest) -> Lookup:
        namespace = Namespace(self._weights, request.adapter or "", request.cache_salt)
        media = request.media.inputs if request.media is not None else ()
        key = cache_key(request.prompt, [MediaKey(each.start, each.end, each.digest) for each in media])
        # log-probabilities of prompt tokens need every token's logits
        limit = 0 if request.num_prompt_logprobs is not None else len(key) - 1
        return Lookup(namespace, key, self._tree.match(namespace, key, limit))

    def num_cached(self, request: GenerationRequest) -> int:
        """How many of a prompt's tokens a request would not compute if it came now; holds nothing.

        They are in memory, on disk, or in a prompt in progress.
        """
        lookup = self._look_up(request)
        num_cached = lookup.match.num_tokens
        for _, num_shared in self._worth_waiting_for(lookup):
            num_cached = max(num_cached, num_shared)
        if self._disk is not None:
            found = self._disk.match(lookup.namespace, lookup.key, lookup.match.limit)
            if found is not None and num_cached < found.num_tokens and self._disk.is_worth_reading(found, num_cached):
                num_cached = found.num_tokens
        return num_cached

    def still_waits(self, request_id: str) -> bool:
        """Whether the prompt that the request waits for is still being computed: before, another look finds no more."""
        other = self._awaited.get(request_id)
        return other is not None and not other.is_done

    def _worth_waiting_for(self, lookup: Lookup) -> Iterator[tuple[_Prompt, int]]:
        """The prompts in progress that share much more, with the length at which the prompt can continue from each.

        Where the model needs snapshots, that is the branch point or the last snapshot before it.
        """
        for other in self._prompts.values():
            if other.is_done or other.lookup.namespace != lookup.namespace:
                continue
            num_shared = min(common_length(other.lookup.key, lookup.key), lookup.match.limit)
            if self.needs_snapshots and not self._can_snapshot(other, num_shared):
                num_shared = other.last_snapshot(num_shared)
            if num_shared - lookup.match.num_tokens >= WAIT_TOKENS:
                yield other, num_shared

    def _can_snapshot(self, prompt: _Prompt, length: int) -> bool:
        return length > prompt.num_computed and length >= self._shortest_prefix

    def lookup_of(self, request_id: str) -> Lookup:
        return self._prompts[request_id].lookup

    def lock(self, lookup: Lookup) -> Lookup:
        """The same with another lock, which outlasts the request's own; to be given to `unlock`."""
        copy = replace(lookup, match=replace(lookup.match))
        self._tree.lock(copy.match)
        return copy

    def unlock(self, lookup: Lookup) -> None:
        self._tree.unlock(lookup.match)

    def insert_loaded(self, lookup: Lookup, load: Load) -> None:
        def make_span(start: int, end: int) -> SpanRecord:
            assert load.span is not None
            return load.span.part(start, end)

        snapshots: dict[int, Piece] = {} if load.snapshot is None else {load.num_tokens: load.snapshot}
        key = lookup.key[: load.num_tokens]
        self._tree.insert(lookup.namespace, key, make_span=make_span if self._has_spans else None, snapshots=snapshots)

    def restore(self, request_id: str, state: SequenceState) -> None:
        """Bring a fresh state to the length that `prepare` found."""
        held = self._tree.read(self._prompts[request_id].lookup.match)
        spans = []
        for span in held.spans:
            assert isinstance(span, SpanRecord)
            spans.append(span)
        snapshot = held.snapshot
        assert snapshot is None or isinstance(snapshot, SequenceRecord)
        state.restore_parts(held.num_tokens, spans, snapshot)

    def exclude(self, request_id: str) -> None:
        """The request's prompt is sparse: nothing of it is kept, and no request waits for it."""
        if (prompt := self._prompts.get(request_id)) is not None:
            prompt.is_done = prompt.is_sparse = True
            prompt.snapshot_points.clear()

    def begin_chunk(self, request_id: str, start: int, end: int) -> tuple[int, ...]:
        """Note that the prompt's tokens `start` to `end` are being computed, the first ones as a use of what was found.

        Returns the lengths after `start`, up to and with `end`, at which they leave snapshots.
        """
        if (prompt := self._prompts.get(request_id)) is None:
            return ()
        if not prompt.has_begun:  # not before: a waiting request may be looked up again and again
            prompt.has_begun = True
            self._tree.use(prompt.lookup.match, counts=prompt.counts)
            if prompt.counts:
                self._lookups.append(_lookup_status(request_id, prompt.lookup.match))
        prompt.num_computed = max(prompt.num_computed, end)
        return tuple(sorted(length for length in prompt.snapshot_points if start < length <= end))

    def add_snapshots(self, request_id: str, snapshots: Mapping[int, SequenceRecord]) -> None:
        """Take over snapshots from a chunk of the prompt."""
        if (prompt := self._prompts.get(request_id)) is not None:
            prompt.snapshots.update(snapshots)
            prompt.snapshot_points -= snapshots.keys()

    def copy(self, request_id: str, state: SequenceState) -> None:
        """Copy what the prompt has computed and the tree lacks; the next step may write the state.

        Nothing is in the tree until `store`, so a row that fails leaves nothing there.
        """
        prompt = self._prompts.get(request_id)
        if prompt is None or prompt.is_sparse:
            return
        if self.needs_snapshots and not _is_near(state.length, prompt.snapshots):
            prompt.snapshots[state.length] = state.snapshot()
        if self._has_spans:
            lookup, length = prompt.lookup, state.length
            held = lookup.match.num_tokens
            start = self._tree.match(lookup.namespace, lookup.key[:length], length, num_locked=held).num_agreed_tokens
            for end in sorted({*prompt.snapshots, state.length}):
                if start < end <= state.length:
                    prompt.spans.append(state.copy_span(start, end))
                    start = end

    def store(
        self, request_id: str, token_ids: Sequence[int], state: SequenceState, *, was_drawn_from: bool = True
    ) -> None:
        """Put what a sequence of the request has computed into the tree, up to its committed length.

        token_ids: at least that many. The first call that reaches the prompt's end releases waiting requests.
        was_drawn_from: tokens have been drawn, so the state is known to hold numbers; otherwise that is checked, which
        waits for the device.
        """
        prompt = self._prompts.get(request_id)
        if prompt is None or state.is_untouched:  # resumed, and ended before its next step
            return
        if prompt.is_sparse or not (was_drawn_from or state.is_finite()):
            return
        length = state.length
        snapshots: dict[int, SequenceRecord] = {}
        if self.needs_snapshots:
            snapshots = {at: record for at, record in prompt.snapshots.items() if at <= length}
            if not _is_near(length, snapshots):
                snapshots[length] = state.snapshot()
        spans, prompt.snapshots, prompt.spans = prompt.spans, {}, []
        namespace, prompt_key = prompt.lookup.namespace, prompt.lookup.key
        # a whole slice of a tuple is the tuple itself
        key = prompt_key[:length] if length <= len(prompt_key) else (*prompt_key, *token_ids[len(prompt_key) : length])

        def make_span(start: int, end: int) -> SpanRecord:
            for span in spans:
                if span.start <= start and end <= span.end:
                    return span.part(start, end)
            spans.append(state.copy_span(start, end))
            return spans[-1]

        held = prompt.lookup.match.num_tokens
        self._tree.insert(
            namespace, key, make_span=make_span if self._has_spans else None, snapshots=snapshots, num_locked=held
        )
        if self._disk is not None:
            self._save(self._disk, prompt, key, state, spans, snapshots)
        prompt.is_done |= length >= len(prompt_key)

    def _save(
        self,
        disk: DiskTier,
        prompt: _Prompt,
        key: tuple[int, ...],
        state: SequenceState,
        spans: Sequence[SpanRecord],
        snapshots: Mapping[int, SequenceRecord],
    ) -> None:
        """Hand over to the disk what a sequence has computed: at its prompt's end, and when it ends."""
        ends = sorted(snapshots) if self.needs_snapshots else [len(key)]
        if len(key) >= len(prompt.lookup.key) and not prompt.is_done:
            # the state after the generation prompt only serves this request, which will be further when it ends
            ends = [end for end in ends if end < len(key)]
        disk.save(prompt.lookup.namespace, key, ends, state, spans, snapshots)

    def end(self, request_id: str) -> None:
        self._awaited.pop(request_id, None)
        if (prompt := self._prompts.pop(request_id, None)) is not None:
            # a request that waits for it refers to it until it is looked up again
            prompt.is_done, prompt.snapshots, prompt.spans = True, {}, []
            self._tree.unlock(prompt.lookup.match)

    def evict(self, num_bytes: int) -> int:
        """Free at least `num_bytes`, or all that isn't in use. Returns the bytes freed."""
        return self._tree.evict(num_bytes)

    def clear(self) -> int:
        """Drop everything that isn't in use, on disk too. Returns the bytes of memory freed."""
        if self._disk is not None:
            self._disk.clear()
        return self._tree.clear()
