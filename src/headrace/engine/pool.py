"""The prefix cache with its states: what prompts leave for later ones.

The scheduler asks `find` when a request is to start; the runner restores what was found, takes snapshots where `marks`
says, and hands over what a sequence has computed when its prompt is done and when its row is freed. All of that happens
between steps, on the engine's thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from headrace.engine.disk_reads import SLICE_S, DiskRead, DiskReads
from headrace.prefix.key import MediaSpan, Namespace, cache_key, common_length
from headrace.prefix.node import Match, Piece
from headrace.prefix.radix import PrefixTree
from headrace.prefix.restore import plan_restore
from headrace.scheduler.prefixes import CachedPrefix
from headrace.state.disk import DiskTier
from headrace.state.sequence import SequenceRecord, SequenceState, SpanRecord
from headrace.types.request import IDLE_PRIORITY, GenerationRequest
from headrace.types.status import CacheStatus

WAIT_TOKENS = 64
"""A request waits for a running prompt that will save it at least this many tokens."""


class RecordStore:
    """Splits and drops the tree's pieces, which are records of states."""

    def split(self, span: Piece, num_tokens: int) -> tuple[Piece, Piece]:
        """Two copies instead of one record."""
        assert isinstance(span, SpanRecord)
        return span.split(num_tokens)

    def drop(self, piece: Piece) -> None:
        """Nothing to do: arrays go with the last reference."""


@dataclass(slots=True, eq=False)
class _Prompt:
    """A request whose prompt is being computed.

    marks: lengths at which snapshots are still to be taken.
    num_computed: tokens given to the runner.
    counts: whether it counts as a lookup, once it begins.
    snapshots, spans: copies of what it has computed that are not in the tree yet.
    is_sparse: sparse prefill has changed what is computed.
    """

    namespace: Namespace
    key: tuple[int, ...]
    match: Match
    marks: set[int]
    num_computed: int
    counts: bool
    snapshots: dict[int, SequenceRecord] = field(default_factory=dict)
    spans: list[SpanRecord] = field(default_factory=list)
    has_begun: bool = False
    is_done: bool = False
    is_sparse: bool = False


class PrefixPool:
    """The prefix cache of one engine."""

    def __init__(self, weights: str, *, has_spans: bool, needs_snapshots: bool, disk: DiskTier | None = None) -> None:
        """weights: fingerprint of the weights and their format. disk: None for none."""
        self._weights = weights
        self._has_spans = has_spans
        self._needs_snapshots = needs_snapshots
        self._tree = PrefixTree(RecordStore(), has_spans=has_spans, needs_snapshots=needs_snapshots)
        self._prompts: dict[str, _Prompt] = {}
        self._disk = disk
        self._reads = None if disk is None else DiskReads(disk, needs_snapshots=needs_snapshots)

    @property
    def num_bytes(self) -> int:
        """Bytes of all records."""
        return self._tree.num_bytes

    @property
    def disk_bytes(self) -> int:
        """Bytes in transit to or from the disk."""
        pending = 0 if self._disk is None else self._disk.pending_bytes
        return pending + (0 if self._reads is None else self._reads.num_bytes)

    def limit_disk(self, num_bytes: int) -> None:
        """Limit the bytes in transit to and from the disk."""
        if self._disk is not None and self._reads is not None:
            self._disk.memory_bytes = num_bytes - self._reads.num_bytes

    def status(self) -> CacheStatus:
        """What is held, and the lookups' results."""
        return replace(self._tree.summary(), disk=None if self._disk is None else self._disk.status())

    def find(self, request: GenerationRequest) -> CachedPrefix | None:
        """The cached part of the prompt; at least one token is left to compute.

        None: wait, a longer prefix is being computed or loaded.
        """
        if self._reads is not None:
            if self._reads.is_pending(request.request_id):
                return None
            self._take_over(self._reads.take(request.request_id))
        namespace = Namespace(self._weights, salt=request.cache_salt)
        media = request.media.inputs if request.media is not None else ()
        key = cache_key(request.prompt, [MediaSpan(each.start, each.end, each.digest) for each in media])
        # log-probabilities of prompt tokens need every token's logits
        limit = 0 if request.num_prompt_logprobs is not None else len(key) - 1
        match = self._tree.match(namespace, key, limit)
        if self._is_worth_waiting(namespace, key, match):
            return None
        if self._reads is not None and self._is_worth_reading(self._reads, request.request_id, namespace, key, match):
            return None
        plan = plan_restore(match, request.boundaries, needs_snapshots=self._needs_snapshots)
        self._tree.lock(match)
        counts = request.priority < IDLE_PRIORITY
        self._prompts[request.request_id] = _Prompt(namespace, key, match, set(plan.marks), match.num_tokens, counts)
        return CachedPrefix(match.num_tokens, plan.report)

    def _is_worth_waiting(self, namespace: Namespace, key: tuple[int, ...], match: Match) -> bool:
        """Whether a prompt in progress shares much more; it is then asked for a snapshot at the branch point."""
        for other in self._prompts.values():
            if other.is_done or other.namespace != namespace:
                continue
            common = min(common_length(other.key, key), match.limit)
            if self._needs_snapshots:
                if common > other.num_computed:
                    other.marks.add(common)
                taken = {length for length in other.snapshots.keys() | other.marks if length <= common}
                common = max(taken, default=0)
            if common - match.num_tokens >= WAIT_TOKENS:
                return True
        return False

    def _is_worth_reading(
        self, reads: DiskReads, request_id: str, namespace: Namespace, key: tuple[int, ...], match: Match
    ) -> bool:
        """Whether a read from disk, begun now or before for another request, will soon provide more."""
        if reads.helps(namespace, key, match, WAIT_TOKENS):
            return True
        if not reads.begin(request_id, namespace, key, match):
            return False
        self._tree.lock(match)
        return True

    def _take_over(self, read: DiskRead | None) -> None:
        """Put what a request has waited for into the tree; nothing if the read has failed or taken too long."""
        if read is None:
            return
        self._tree.unlock(read.match)
        if not read.load.is_loaded:
            return
        assert self._disk is not None
        span, snapshot, length = read.load.span, read.load.snapshot, read.load.num_tokens
        self._disk.count_hit(length - read.match.num_tokens)

        def cut(start: int, end: int) -> Piece:
            assert span is not None
            return span if (start, end) == (span.start, span.end) else span.part(start, end)

        snapshots: dict[int, Piece] = {} if snapshot is None else {length: snapshot}
        self._tree.insert(read.namespace, read.key[:length], cut=cut if self._has_spans else None, snapshots=snapshots)

    def restore(self, request_id: str, state: SequenceState) -> None:
        """Bring a fresh state to the length that `find` returned."""
        prompt = self._prompts[request_id]
        held = self._tree.read(prompt.match)
        spans = []
        for span in held.spans:
            assert isinstance(span, SpanRecord)
            spans.append(span)
        snapshot = held.snapshot
        assert snapshot is None or isinstance(snapshot, SequenceRecord)
        state.restore_parts(held.num_tokens, spans, snapshot)

    def leave_out(self, request_id: str) -> None:
        """The request's prompt is sparse: nothing of it is kept, and no request waits for it."""
        prompt = self._prompts[request_id]
        prompt.is_done = prompt.is_sparse = True
        prompt.marks.clear()

    def marks(self, request_id: str, start: int, end: int) -> tuple[int, ...]:
        """Lengths after `start`, up to and with `end`, at which the request's prompt leaves snapshots."""
        prompt = self._prompts[request_id]
        if not prompt.has_begun:  # not before: a waiting request may be looked up again and again
            prompt.has_begun = True
            self._tree.use(prompt.match, counts=prompt.counts)
        prompt.num_computed = max(prompt.num_computed, end)
        return tuple(sorted(mark for mark in prompt.marks if start < mark <= end))

    def keep(self, request_id: str, snapshots: Mapping[int, SequenceRecord]) -> None:
        """Take over snapshots from a chunk of the prompt."""
        prompt = self._prompts[request_id]
        prompt.snapshots.update(snapshots)
        prompt.marks -= snapshots.keys()

    def copy(self, request_id: str, state: SequenceState) -> None:
        """Copy what the prompt has computed and the tree lacks; the next step may write the state.

        Nothing is in the tree until `store`, so a row that fails leaves nothing there.
        """
        prompt = self._prompts[request_id]
        if prompt.is_sparse:
            return
        if self._needs_snapshots and state.length not in prompt.snapshots:
            prompt.snapshots[state.length] = state.snapshot()
        if self._has_spans:
            start = self._tree.match(prompt.namespace, prompt.key[: state.length], state.length).num_agreed_tokens
            for end in sorted({*prompt.snapshots, state.length}):
                if start < end <= state.length:
                    prompt.spans.append(state.copy_span(start, end))
                    start = end

    def store(
        self, request_id: str, token_ids: Sequence[int], state: SequenceState, *, was_drawn_from: bool = True
    ) -> None:
        """Put what a sequence of the request has computed into the tree, up to its committed length.

        token_ids: at least that many. The first call that reaches the prompt's end releases waiting requests. A sparse
        prompt is ignored.
        was_drawn_from: tokens have been drawn, so the state is known to hold numbers; otherwise that is checked, which
        waits for the device.
        """
        if state.is_untouched:  # it was resumed and ended before its next step
            return
        prompt = self._prompts[request_id]
        if prompt.is_sparse or not (was_drawn_from or state.is_finite()):
            return
        length = state.length
        snapshots: dict[int, SequenceRecord] = {}
        if self._needs_snapshots:
            snapshots = {at: record for at, record in prompt.snapshots.items() if at <= length}
            if length not in snapshots:
                snapshots[length] = state.snapshot()
        spans, prompt.snapshots, prompt.spans = prompt.spans, {}, []
        key = (*prompt.key, *token_ids[len(prompt.key) :])[:length]

        def cut(start: int, end: int) -> Piece:
            for span in spans:
                if span.start <= start and end <= span.end:
                    return span if (start, end) == (span.start, span.end) else span.part(start, end)
            spans.append(state.copy_span(start, end))
            return spans[-1]

        self._tree.insert(prompt.namespace, key, cut=cut if self._has_spans else None, snapshots=snapshots)
        if self._disk is not None:
            self._save(self._disk, prompt, key, state, spans, snapshots)
        prompt.is_done |= length >= len(prompt.key)

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
        ends = sorted(snapshots) if self._needs_snapshots else [len(key)]
        if len(key) >= len(prompt.key) and not prompt.is_done:
            # the state after the generation prompt only serves this request, which will be further when it ends
            ends = [end for end in ends if end < len(key)]
        disk.save(prompt.namespace, key, ends, state, spans, snapshots)

    @property
    def num_preparing(self) -> int:
        """0: requests here wait for other requests."""
        return 0

    def end(self, request_id: str) -> None:
        """Forget a request; whatever waits for its prompt waits no longer."""
        prompt = self._prompts.pop(request_id, None)
        if prompt is not None:
            self._tree.unlock(prompt.match)
        read = None if self._reads is None else self._reads.end(request_id)
        if read is not None:
            self._tree.unlock(read.match)

    def evict(self, num_bytes: int) -> int:
        """Free at least `num_bytes`, or all that isn't in use. Returns the bytes freed."""
        return self._tree.evict(num_bytes)

    def clear(self) -> int:
        """Drop everything that isn't in use, on disk too. Returns the bytes of memory freed."""
        if self._disk is not None:
            self._disk.clear()
        return self._tree.clear()

    def observe_prefill(self, num_tokens: int, duration_s: float) -> None:
        """Record a step with this many prompt tokens: reads from disk must be faster."""
        if self._disk is not None:
            self._disk.observe_prefill(num_tokens, duration_s)

    @property
    def is_waiting_for_disk(self) -> bool:
        """Whether a request waits for a read."""
        return self._reads is not None and self._reads.is_waiting

    def hand_over(self) -> bool:
        """Copy a slice of what is to be written off the device. Returns whether there is more."""
        return self._disk is not None and self._disk.advance(SLICE_S)

    def close(self) -> None:
        """Write to disk what is still to be written."""
        if self._disk is not None:
            self._disk.close()
