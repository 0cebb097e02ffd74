"""The engine's status."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from headrace.types.events import SparseUsage
from headrace.types.media import Route


class Phase(StrEnum):
    """A request's state."""

    QUEUED = "queued"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"
    """Every unfinished choice is preempted."""


class WaitReason(StrEnum):
    """What a waiting request waits for."""

    ROWS = "rows"
    """As many sequences run as may (`max_num_seqs`)."""
    MEMORY = "memory"
    """The memory for states is reserved for others."""
    TURN = "turn"
    """Another request starts or resumes first, which waits for rows or memory itself."""
    PREFIX = "prefix"
    """A running request computes a prefix that both share."""
    DISK = "disk"
    """A part of the prompt's state is read from the disk cache."""
    MEDIA = "media"
    """The vision tower encodes images or videos."""
    SCORES = "scores"
    """Sparse prefill's draft model scores the prompt."""
    STEP = "step"
    """The step in progress: it has just arrived."""


@dataclass(frozen=True, slots=True)
class RequestStatus:
    """One request in progress.

    num_prompt_tokens: of the full prompt.
    num_computed_tokens: with sparse prefill, only kept tokens are ever computed.
    num_output_tokens: over all its choices.
    age_s: since submission.
    waits_for: as of the last step's plan; None unless it is queued or preempted.
    tokens_per_s: output tokens per second since the first one; 0 before the second.
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
    waits_for: WaitReason | None = None
    reuse: str = ""
    """What of the prompt came out of the prefix cache, and why no more; empty before it starts."""
    route: Route = Route.TEXT
    sparse: SparseUsage | None = None
    """What sparse prefill made of the prompt; None where it is off, and before it starts."""


@dataclass(frozen=True, slots=True)
class MemoryStatus:
    """Bytes. reserved: by admission for sequences. state: held by running sequences now.

    preempted: checkpoints of preempted sequences. records: the prefix cache.
    disk: in transit to or from the disk. features: embeddings of images and videos. device: in use according to MLX,
    everything included;
    buffers: cached by MLX for reuse.
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
    """Speculative decoding. num_windows: verifications of a sequence's drafts; num_drafted: drafts in them.

    accepted_at: accepted drafts by position in their window.
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

    routes: queued requests by the parts of the model they need.
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
    """The disk tier of the prefix cache: current content, and counts since the start.

    num_files, num_bytes: in the folder, of all models, at the last scan; quota_bytes limits these.
    num_pending_bytes: to be written.
    num_hits: prompts that reused what was read;
    num_hit_tokens: tokens that these skipped.
    num_reads, num_writes: files.
    num_dropped: files that were not written.
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
    """The prefix cache: current content, and lookups since the start.

    num_lookup_tokens: of all prompts looked up.
    num_hit_tokens: of these, reused.
    disk: None without a disk tier.
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
    """Speculative decoding. max_drafts: of a sequence at once. num_failures: sequences that lost their drafts.

    If drafting fails, the sequence goes on without drafts.
    """

    max_drafts: int
    num_failures: int


@dataclass(frozen=True, slots=True)
class SparseStatus:
    """Sparse prefill since the start. num_thinned: sparse prompts; num_kept_tokens, num_dropped_tokens: of these.

    bypassed: prompts computed in full, by reason.
    num_scoring: prompts that the draft model is scoring.
    weights_bytes, state_bytes, records_bytes: the draft model's share of memory.
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
class WarmUpStatus:
    """How far the steps are warmed up. num_done: of num_pieces, failed ones too. seconds: what these took together."""

    num_pieces: int = 0
    num_done: int = 0
    num_failed: int = 0
    seconds: float = 0.0

    @property
    def is_over(self) -> bool:
        """At once where there is nothing to warm up."""
        return self.num_done == self.num_pieces


@dataclass(frozen=True, slots=True)
class StepForms:
    """Forms of steps that had to be built: since the start, and since the warm-up was over."""

    num_built: int = 0
    num_built_since_ready: int = 0


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """A snapshot between two steps.

    cache: None if disabled;
    drafts: None without speculative decoding;
    sparse: None without sparse prefill.
    num_schema_violations: JSON answers that do not match their schema, and tool parameter values of a type that the
    schema does not allow.
    num_malformed_calls: tool calls that could not be parsed.
    """

    num_running: int
    num_waiting: int
    requests: tuple[RequestStatus, ...]
    memory: MemoryStatus
    counters: Counters
    cache: CacheStatus | None = None
    num_schema_violations: int = 0
    num_malformed_calls: int = 0
    drafts: DraftStatus | None = None
    sparse: SparseStatus | None = None
    warm_up: WarmUpStatus = WarmUpStatus()
    step_forms: StepForms = StepForms()


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """The server process. cpu_s: of all threads. peak_memory_bytes: the peak resident size."""

    uptime_s: float
    cpu_s: float
    peak_memory_bytes: int
