"""What finished and unfinished prompts leave for later ones: the prefix tree, with states in it.

The scheduler asks `find` when a request is to start; the runner restores what was found, takes snapshots where
`marks` says, and hands over what a sequence has computed when its prompt is done and when its row is freed. All of
that happens between steps, on the engine's thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headrace.prefix.key import Namespace, cache_key, common_length
from headrace.prefix.match import Match
from headrace.prefix.pieces import Piece
from headrace.prefix.radix import PrefixTree
from headrace.prefix.restore import plan_restore
from headrace.scheduler.prefixes import CachedPrefix
from headrace.state.sequence import SequenceRecord, SequenceState, SpanRecord
from headrace.types.request import GenerationRequest
from headrace.types.status import CacheStatus

WAIT_TOKENS = 64
"""A request waits for a running prompt that will save it so many tokens or more."""


class RecordStore:
    """Splits and drops the tree's pieces, which are records of states."""

    def split(self, span: Piece, num_tokens: int) -> tuple[Piece, Piece]:
        """Two copies in place of one record."""
        assert isinstance(span, SpanRecord)
        return span.split(num_tokens)

    def drop(self, piece: Piece) -> None:
        """Nothing to do: arrays go with the last reference."""


@dataclass(slots=True, eq=False)
class _Prompt:
    """A request whose prompt is being computed.

    marks: lengths at which snapshots are still to be taken. num_computed: tokens that have been handed to the runner.
    """

    namespace: Namespace
    key: tuple[int, ...]
    match: Match
    marks: set[int]
    num_computed: int
    snapshots: dict[int, SequenceRecord] = field(default_factory=dict)
    is_done: bool = False


class PrefixPool:
    """The prefix cache of one engine."""

    def __init__(self, weights: str, *, has_spans: bool, needs_snapshots: bool, grid: int) -> None:
        """weights: fingerprint of what is loaded and how it is held. grid: see `plan_restore`."""
        self._weights = weights
        self._has_spans = has_spans
        self._needs_snapshots = needs_snapshots
        self._grid = grid
        self._tree = PrefixTree(RecordStore(), has_spans=has_spans, needs_snapshots=needs_snapshots)
        self._prompts: dict[str, _Prompt] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all records."""
        return self._tree.num_bytes

    def status(self) -> CacheStatus:
        """What is held and how often it helped."""
        summary = self._tree.summary()
        return CacheStatus(
            num_bytes=self._tree.num_bytes,
            num_tokens=summary.num_tokens,
            num_nodes=summary.num_nodes,
            num_snapshots=summary.num_snapshots,
            num_lookups=summary.num_lookups,
            num_hits=summary.num_hits,
            num_lookup_tokens=summary.num_lookup_tokens,
            num_hit_tokens=summary.num_hit_tokens,
        )

    def find(self, request: GenerationRequest) -> CachedPrefix | None:
        """What of the prompt needs no computing; at least one token is left.

        None if a prompt that is being computed will soon be of more help: the request had better wait for it.
        """
        namespace = Namespace(self._weights, salt=request.cache_salt)
        key = cache_key(request.prompt)
        # log-probabilities of prompt tokens need every token's logits
        limit = 0 if request.num_prompt_logprobs is not None else len(key) - 1
        match = self._tree.match(namespace, key, limit)
        if self._is_worth_waiting(namespace, key, match):
            return None
        plan = plan_restore(match, request.boundaries, needs_snapshots=self._needs_snapshots, grid=self._grid)
        self._tree.lock(match)
        self._prompts[request.request_id] = _Prompt(namespace, key, match, set(plan.marks), match.num_tokens)
        return CachedPrefix(match.num_tokens, plan.divergence.text)

    def _is_worth_waiting(self, namespace: Namespace, key: tuple[int, ...], match: Match) -> bool:
        """Whether a prompt in progress shares much more; a snapshot is then asked of it where the two part."""
        for other in self._prompts.values():
            if other.is_done or other.namespace != namespace:
                continue
            common = min(common_length(other.key, key), match.limit)
            if self._needs_snapshots:
                junction = common - common % self._grid
                if junction > other.num_computed:
                    other.marks.add(junction)
                taken = {length for length in other.snapshots.keys() | other.marks if length <= common}
                common = max(taken, default=0)
            if common - match.num_tokens >= WAIT_TOKENS:
                return True
        return False

    def restore(self, request_id: str, state: SequenceState) -> None:
        """Bring a fresh state to the length that `find` gave."""
        prompt = self._prompts[request_id]
        held = self._tree.read(prompt.match)
        spans = []
        for part in held.spans:
            assert isinstance(part.piece, SpanRecord)
            spans.append(part.piece)
        snapshot = held.snapshot
        assert snapshot is None or isinstance(snapshot, SequenceRecord)
        state.restore_parts(held.num_tokens, spans, snapshot)

    def marks(self, request_id: str, start: int, end: int) -> tuple[int, ...]:
        """Lengths after `start`, up to and with `end`, at which the request's prompt leaves snapshots."""
        prompt = self._prompts[request_id]
        prompt.num_computed = max(prompt.num_computed, end)
        return tuple(sorted(mark for mark in prompt.marks if start < mark <= end))

    def keep(self, request_id: str, snapshots: Mapping[int, SequenceRecord]) -> None:
        """Take over snapshots that a chunk of the prompt has left."""
        prompt = self._prompts[request_id]
        prompt.snapshots.update(snapshots)
        prompt.marks -= snapshots.keys()

    def store(self, request_id: str, token_ids: Sequence[int], state: SequenceState) -> None:
        """Put what a sequence of the request has computed into the tree, up to its committed length.

        token_ids: at least so many. The first call that reaches the prompt's end lets waiting requests go.
        """
        prompt = self._prompts[request_id]
        length = state.length
        snapshots: dict[int, Piece] = {}
        if self._needs_snapshots:
            snapshots = {at: record for at, record in prompt.snapshots.items() if at <= length}
            snapshots.setdefault(length, state.snapshot())
            prompt.snapshots = {}
        key = (*prompt.key, *token_ids[len(prompt.key) :])[:length]
        self._tree.insert(prompt.namespace, key, cut=state.copy_span if self._has_spans else None, snapshots=snapshots)
        prompt.is_done |= length >= len(prompt.key)

    def end(self, request_id: str) -> None:
        """Forget a request; whatever waits for its prompt waits no longer."""
        prompt = self._prompts.pop(request_id, None)
        if prompt is not None:
            self._tree.unlock(prompt.match)

    def evict(self, num_bytes: int) -> int:
        """Free at least `num_bytes`, or all that isn't in use; gives the bytes freed."""
        return self._tree.evict(num_bytes)

    def clear(self) -> int:
        """Drop everything that isn't in use; gives the bytes freed."""
        return self._tree.clear()
