"""The disk part of the prefix cache: opens it, loads states for waiting requests, and writes between steps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headrace.backend.device import Device
from headrace.common_prefix import common_length
from headrace.config import Config
from headrace.engine.prefix_cache import WAIT_TOKENS, Lookup, PrefixCache
from headrace.errors import ConfigError
from headrace.models.fingerprint import fingerprint
from headrace.models.load import LoadedModel
from headrace.models.quantized import kept_bytes
from headrace.models.vlm import Tower
from headrace.scheduler.stages import PromptPlan
from headrace.state.disk import DiskTier
from headrace.state.disk_records import Load
from headrace.state.sequence import SequenceState
from headrace.state.stored_state import StateLayout
from headrace.types.request import GenerationRequest
from headrace.types.status import WaitReason

PREFILL_TOKENS_PER_S = {"cpu": 200.0, "cuda": 10_000.0, "metal": 1_000.0}
"""Assumed until measured, by device: a small model's speed."""

PENDING_SHARE = 0.25
"""Share of the memory for states that may wait to be written."""
LOAD_SHARE = 0.5
"""Share of the memory for states that one state from the disk may take."""

SLICE_S = 0.01
"""Limit on delaying a step by making arrays from what was read, or by handing over what is to be written."""


class DiskCache:
    """The interface of the disk cache, and one that has no disk."""

    @property
    def is_waiting(self) -> bool:
        return False

    @property
    def num_bytes(self) -> int:
        return 0

    def limit(self, num_bytes: int) -> None:
        """Limit the bytes in transit to and from the disk."""

    def observe_prefill(self, num_tokens: int, duration_s: float) -> None:
        """Record a step with this many prompt tokens: reads from disk must be faster."""

    def advance(self) -> bool:
        """Copy a slice of what is to be written off the device. Returns whether there is more."""
        return False

    def close(self) -> None:
        """Write to disk what is still to be written."""


@dataclass(frozen=True, slots=True)
class _Read:
    """A pending read. lookup: what the request needs besides, locked for it."""

    lookup: Lookup
    load: Load


class DiskLoader(DiskCache):
    """A stage: loads what the disk has beyond a request's match in memory.

    At most one read for each request, and none after it.
    """

    def __init__(self, disk: DiskTier, prefixes: PrefixCache) -> None:
        self._disk = disk
        self._prefixes = prefixes
        self._reads: dict[str, _Read] = {}
        self._asked: set[str] = set()

    def prepare(self, request: GenerationRequest, plan: PromptPlan) -> PromptPlan | WaitReason:
        """Wait for a read from disk, begun now or before for another request, that will soon provide more."""
        request_id = request.request_id
        lookup = self._prefixes.lookup_of(request_id)
        if not self._helps(lookup):
            load = self._begin(request_id, lookup)
            if load is None:
                return plan
            self._reads[request_id] = _Read(self._prefixes.lock(lookup), load)
        return WaitReason.DISK

    def _begin(self, request_id: str, lookup: Lookup) -> Load | None:
        if request_id in self._asked:
            return None
        self._asked.add(request_id)
        found = self._disk.match(lookup.namespace, lookup.key, lookup.match.limit)
        if found is None or found.num_tokens <= lookup.match.num_tokens:
            return None
        return self._disk.load(found, lookup.match.num_tokens)

    def _helps(self, lookup: Lookup) -> bool:
        """Whether a read in progress for another request will provide much more than the match."""
        for read in self._reads.values():
            if read.lookup.namespace != lookup.namespace:
                continue
            num_tokens = min(common_length(read.lookup.key, lookup.key), read.load.num_tokens, lookup.match.limit)
            if self._prefixes.needs_snapshots and num_tokens < read.load.num_tokens:
                continue
            if num_tokens - lookup.match.num_tokens >= WAIT_TOKENS:
                return True
        return False

    def still_waits(self, request_id: str) -> bool:
        """Whether the request's read needs more time; does a slice of its work, and caches what it has read."""
        read = self._reads.get(request_id)
        if read is not None and read.load.advance(SLICE_S):
            return True
        self._drop(request_id)
        if read is not None and read.load.is_loaded:  # it may also have failed, or taken too long
            self._disk.count_hit(read.load.num_tokens - read.lookup.match.num_tokens)
            self._prefixes.insert_loaded(read.lookup, read.load)
        return False

    def _drop(self, request_id: str) -> None:
        if (read := self._reads.pop(request_id, None)) is not None:
            read.load.is_abandoned = True
            self._prefixes.unlock(read.lookup)

    def end(self, request_id: str) -> None:
        self._asked.discard(request_id)
        self._drop(request_id)

    @property
    def is_waiting(self) -> bool:
        return any(not read.load.is_over.is_set() for read in self._reads.values())

    @property
    def _reading_bytes(self) -> int:
        return sum(read.load.num_bytes for read in self._reads.values())

    @property
    def num_bytes(self) -> int:
        return self._disk.pending_bytes + self._reading_bytes

    def limit(self, num_bytes: int) -> None:
        self._disk.memory_bytes = num_bytes - self._reading_bytes

    def observe_prefill(self, num_tokens: int, duration_s: float) -> None:
        self._disk.observe_prefill(num_tokens, duration_s)

    def advance(self) -> bool:
        return self._disk.advance(SLICE_S)

    def close(self) -> None:
        self._disk.close()


def open_disk_tier(
    config: Config,
    directory: Path,
    loaded: LoadedModel,
    head: str,
    tower: Tower | None,
    sample: SequenceState,
    budget_bytes: int,
    here: Device,
) -> DiskTier | None:
    """The disk tier of a loaded model; None if not configured.

    directory: the model's. head, tower: see `fingerprint`.
    sample: a state of few tokens.
    budget_bytes: the memory for states. Raises ConfigError if the folder can't be used.
    """
    knobs = config.engine
    if knobs.cache_dir is None:
        return None
    if knobs.prefix_cache == "off":
        raise ConfigError("cache_dir keeps the prefix cache on disk, but prefix_cache is off", param="cache_dir")
    folder = Path(knobs.cache_dir).expanduser()
    weights = fingerprint(
        directory,
        loaded.packed.model,
        config.models.numerics,
        loaded.packed.layer_lines,
        head,
        None if tower is None else tower.module,
        kv_bits=knobs.kv_bits,
    )
    try:
        return DiskTier(
            folder,
            max(1, knobs.cache_disk_quota - kept_bytes(folder)),
            weights,
            layout=StateLayout.of(sample),
            prefill_tokens_per_s=PREFILL_TOKENS_PER_S[here.kind],
            max_pending_bytes=int(PENDING_SHARE * budget_bytes),
            max_load_bytes=int(LOAD_SHARE * budget_bytes),
        )
    except OSError as error:
        raise ConfigError(f"cache_dir {folder} can't be used: {error.strerror}", param="cache_dir") from error
