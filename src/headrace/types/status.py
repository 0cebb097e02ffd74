"""What the engine says about itself when it is asked."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from headrace.types.events import SparseUsage
from headrace.types.media import Route


class Phase(StrEnum):
    """How far a request has come."""

    QUEUED = "queued"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"
    """Every choice that hasn't ended has made room for others and waits to go on."""


@dataclass(frozen=True, slots=True)
class RequestStatus:
    """One request that is being worked on.

    num_prompt_tokens: of the whole prompt. num_computed_tokens: of a thinned prompt, only what is kept is ever
    computed. num_output_tokens: over all its choices. age_s: since it was submitted.
    tokens_per_s: output tokens since the first one, per second; 0 before the second.
    """

    request_id: str
    phase: Phase
    num_prompt_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    tokens_per_s: float
    age_s: float
    session: str
    priority: int
    reuse: str = ""
    """What of the prompt came out of the prefix cache, and why no more; empty before it starts."""
    route: Route = Route.TEXT
    sparse: SparseUsage | None = None
    """What sparse prefill made of the prompt; None where it is off, and before it starts."""


@dataclass(frozen=True, slots=True)
class MemoryStatus:
    """Bytes. reserved: what admission has promised to sequences. state: what states of running sequences hold now.

    preempted: checkpoints of sequences that have made room. records: what the prefix cache holds. disk: on its way to
    or from the disk. features: embeddings of images and videos. device: what MLX reports as in use, all counted;
    buffers: what it keeps for reuse besides.
    """

    budget_bytes: int
    weights_bytes: int
    reserved_bytes: int
    state_bytes: int
    preempted_bytes: int
    records_bytes: int
    disk_bytes: int
    device_bytes: int
    buffers_bytes: int
    features_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Histogram:
    """bounds: upper limits of the buckets, ascending, without infinity. counts: one more, not cumulative."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


@dataclass(frozen=True, slots=True)
class DraftCounters:
    """Of tokens guessed ahead. num_windows: times that a sequence had drafts verified; num_drafted: these drafts.

    accepted_at: of the right ones, how many were first in their window, second, and so on.
    """

    num_windows: int = 0
    num_drafted: int = 0
    accepted_at: tuple[int, ...] = ()

    @property
    def num_accepted(self) -> int:
        return sum(self.accepted_at)


@dataclass(frozen=True, slots=True)
class Counters:
    """Since the start. finished: number of choices by finish reason, and by `abort` and `error`.

    routes: number of requests that were queued, by what they need of the model.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    num_steps: int
    finished: tuple[tuple[str, int], ...]
    drafts: DraftCounters
    time_to_first_token_s: Histogram
    time_per_output_token_s: Histogram
    request_s: Histogram
    queue_s: Histogram
    routes: tuple[tuple[Route, int], ...] = ()


@dataclass(frozen=True, slots=True)
class DiskStatus:
    """The disk tier of the prefix cache now, and what it did since the start.

    num_files, num_bytes: in the folder, of all models, as last looked at; quota_bytes is for these. num_pending_bytes:
    to be written. num_hits: prompts that went on from what was read, num_hit_tokens: of those, what they were spared.
    num_reads, num_writes: files. num_dropped: files that were not written.
    """

    num_files: int
    num_bytes: int
    quota_bytes: int
    num_pending_bytes: int
    num_hits: int
    num_hit_tokens: int
    num_reads: int
    num_read_bytes: int
    num_writes: int
    num_written_bytes: int
    num_dropped: int


@dataclass(frozen=True, slots=True)
class CacheStatus:
    """What the prefix cache holds now, and how its lookups went since the start.

    num_lookup_tokens: of all prompts looked up. num_hit_tokens: of these, what needed no computing. disk: None without
    a disk tier.
    """

    num_bytes: int
    num_tokens: int
    num_nodes: int
    num_snapshots: int
    num_lookups: int
    num_hits: int
    num_lookup_tokens: int
    num_hit_tokens: int
    disk: DiskStatus | None = None


@dataclass(frozen=True, slots=True)
class DraftStatus:
    """How tokens are guessed ahead. max_drafts: of a sequence at once. num_failures: sequences that lost their drafts.

    A sequence loses its drafts to an error in the making of them, and goes on without.
    """

    max_drafts: int
    num_failures: int


@dataclass(frozen=True, slots=True)
class SparseStatus:
    """Sparse prefill since the start. num_thinned: prompts; num_kept_tokens, num_dropped_tokens: of these.

    bypassed: number of prompts that were computed whole, by reason. num_scoring: prompts that the draft model is at.
    weights_bytes, state_bytes, records_bytes: the draft model's part of the memory of that name.
    """

    draft: str
    num_thinned: int
    num_kept_tokens: int
    num_dropped_tokens: int
    bypassed: tuple[tuple[str, int], ...]
    num_scoring: int
    weights_bytes: int
    state_bytes: int
    records_bytes: int


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """A moment between two steps.

    cache: None if it is switched off; drafts: None if nothing is guessed ahead; sparse: None if no prompt is thinned.
    num_misfits: answers so far that were held to a JSON schema and don't fit it, and values between tags that are of no
    type that their tool's schema takes. num_broken_calls: what began as a tool
    call and could not be made one.
    """

    num_running: int
    num_waiting: int
    requests: tuple[RequestStatus, ...]
    memory: MemoryStatus
    counters: Counters
    cache: CacheStatus | None = None
    num_misfits: int = 0
    num_broken_calls: int = 0
    drafts: DraftStatus | None = None
    sparse: SparseStatus | None = None


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """The server's process. cpu_s: of all its threads. peak_memory_bytes: the most that it ever held."""

    uptime_s: float
    cpu_s: float
    peak_memory_bytes: int
