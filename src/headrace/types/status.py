"""The engine's status, as /v1/status shows it. A field annotated with a Metric is shown by /metrics as well."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from headrace.types.events import FinishReason, SparseUsage
from headrace.types.media import Route
from headrace.types.metric import Metric
from headrace.types.ranks import RanksStatus
from headrace.types.recent import LookupStatus, StepHistory

UNFINISHED = ("abort", "error")
"""Reasons of choices that did not finish."""


class Phase(StrEnum):
    """A request's state."""

    QUEUED = "queued"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"
    """Every unfinished choice is preempted."""
    HANDED_OVER = "handed_over"
    """Another server answers it."""


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
    MODEL = "model"
    """Its model is loaded, or other models serve and leave it no memory."""
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
    adapter: str | None = None
    """The fingerprint of its adapter."""


BLOCK_TOKENS = 16
"""Tokens of a block, in which vLLM's metrics and gateways count. Memory here has no blocks."""


@dataclass(frozen=True, slots=True)
class MemoryStatus:
    """capacity_tokens: how many tokens fit the budget, in sequences of the longest context."""

    budget_bytes: Annotated[int, Metric("headrace:memory_budget_bytes", "Limit for all sequences.", "gauge")]
    weights_bytes: Annotated[int, Metric("headrace:memory_weights_bytes", "The model's weights.", "gauge")]
    reserved_bytes: Annotated[int, Metric("headrace:memory_reserved_bytes", "Reserved for sequences.", "gauge")]
    state_bytes: Annotated[
        int, Metric("headrace:memory_state_bytes", "Held by the states of running sequences.", "gauge")
    ]
    preempted_bytes: Annotated[
        int, Metric("headrace:memory_preempted_bytes", "Held by checkpoints of preempted sequences.", "gauge")
    ]
    records_bytes: Annotated[int, Metric("headrace:memory_records_bytes", "Held by the prefix cache.", "gauge")]
    disk_bytes: Annotated[int, Metric("headrace:memory_disk_bytes", "In transit to or from the disk.", "gauge")]
    device_bytes: Annotated[int, Metric("headrace:memory_device_bytes", "In use by MLX, everything included.", "gauge")]
    buffers_bytes: Annotated[int, Metric("headrace:memory_buffers_bytes", "Freed, and kept by MLX for reuse.", "gauge")]
    features_bytes: Annotated[
        int, Metric("headrace:memory_features_bytes", "Embeddings of images and videos.", "gauge")
    ] = 0
    adapters_bytes: Annotated[int, Metric("headrace:memory_adapters_bytes", "LoRA and DoRA adapters.", "gauge")] = 0
    capacity_tokens: int = 0

    @property
    def usage(self) -> float:
        """The share of the budget that is reserved, from 0 to 1. What only the prefix cache holds counts as free."""
        return min(1.0, self.reserved_bytes / self.budget_bytes) if self.budget_bytes > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Histogram:
    """bounds: upper limits of the buckets, ascending, without infinity. counts: one more, not cumulative."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


@dataclass(frozen=True, slots=True)
class DraftCounters:
    """Since the start. accepted_at: accepted drafts by position in their window."""

    num_windows: Annotated[int, Metric("vllm:spec_decode_num_drafts", "Verified draft windows.")] = 0
    num_drafted: Annotated[int, Metric("vllm:spec_decode_num_draft_tokens", "Verified draft tokens.")] = 0
    accepted_at: tuple[int, ...] = ()

    @property
    def num_accepted(self) -> int:
        return sum(self.accepted_at)


def _latency(name: str, help: str) -> Metric:
    return Metric(f"vllm:{name}_seconds", help, "histogram")


@dataclass(frozen=True, slots=True)
class Counters:
    """Since the start."""

    num_prompt_tokens: Annotated[int, Metric("vllm:prompt_tokens", "Prompt tokens, cached or computed.")]
    num_output_tokens: Annotated[int, Metric("vllm:generation_tokens", "Output tokens.")]
    num_cached_tokens: int
    num_preemptions: Annotated[int, Metric("vllm:num_preemptions", "Preempted sequences.")]
    num_steps: Annotated[int, Metric("headrace:steps", "Steps of the engine.")]
    finished: Annotated[
        tuple[tuple[str, int], ...],
        Metric(
            "vllm:request_success",
            "Choices that ended, by reason.",
            key="finished_reason",
            keys=(*(reason.value for reason in FinishReason), *UNFINISHED),
        ),
    ]
    drafts: DraftCounters
    time_to_first_token_s: Annotated[Histogram, _latency("time_to_first_token", "From arrival to the first token.")]
    time_per_output_token_s: Annotated[
        Histogram,
        _latency("inter_token_latency", "Between two tokens of a choice."),
        # Its older name, which many dashboards still use.
        _latency("time_per_output_token", "Same as vllm:inter_token_latency_seconds."),
    ]
    request_s: Annotated[Histogram, _latency("e2e_request_latency", "From arrival to the end, of finished requests.")]
    queue_s: Annotated[Histogram, _latency("request_queue_time", "From arrival to the first step.")]
    routes: Annotated[
        tuple[tuple[Route, int], ...],
        Metric("headrace:requests", "Queued requests, by the parts of the model they need.", key="route"),
    ] = ()


_CACHE_BYTES = "headrace:cache_bytes", "Bytes held by the prefix cache, by location."


@dataclass(frozen=True, slots=True)
class DiskStatus:
    """The disk tier of the prefix cache: current content of the folder, of all models, at the last scan; and counts
    since the start. num_bytes: limited by quota_bytes."""

    num_files: Annotated[int, Metric("headrace:cache_disk_files", "Files of the disk cache.", "gauge")]
    num_bytes: Annotated[int, Metric(*_CACHE_BYTES, "gauge", kind_label="disk")]
    quota_bytes: Annotated[int, Metric("headrace:cache_disk_quota_bytes", "Limit of their size.", "gauge")]
    num_pending_bytes: Annotated[int, Metric("headrace:cache_disk_pending_bytes", "Waiting to be written.", "gauge")]
    num_hits: Annotated[int, Metric("headrace:cache_disk_hits", "Prompts that continued from cached files.")]
    num_hit_tokens: Annotated[int, Metric("headrace:cache_disk_hit_tokens", "Prompt tokens that these skipped.")]
    num_reads: Annotated[int, Metric("headrace:cache_disk_reads", "Files read.")]
    num_read_bytes: Annotated[int, Metric("headrace:cache_disk_read_bytes", "Bytes read.")]
    num_writes: Annotated[int, Metric("headrace:cache_disk_writes", "Files written.")]
    num_written_bytes: Annotated[int, Metric("headrace:cache_disk_written_bytes", "Bytes written.")]
    num_dropped: Annotated[int, Metric("headrace:cache_disk_dropped", "Files that were not written.")]


@dataclass(frozen=True, slots=True)
class CacheStatus:
    """The prefix cache: current content, and lookups since the start. disk: None without a disk tier.

    lookups: the latest ones, the oldest first.
    """

    num_bytes: Annotated[int, Metric(*_CACHE_BYTES, "gauge", kind_label="memory")]
    num_tokens: int
    num_nodes: int
    num_snapshots: int
    num_lookups: int
    num_hits: int
    num_lookup_tokens: Annotated[
        int, Metric("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
    ]
    num_hit_tokens: Annotated[int, Metric("vllm:prefix_cache_hits", "Of these, tokens found in the cache.")]
    disk: DiskStatus | None = None
    lookups: tuple[LookupStatus, ...] = ()


@dataclass(frozen=True, slots=True)
class DraftStatus:
    """Speculative decoding. max_drafts: of a sequence at once. A sequence without drafts goes on without them.

    model: the draft model; None for a prediction head. Bytes are the draft model's share of MemoryStatus.
    """

    max_drafts: int
    num_failures: Annotated[int, Metric("headrace:draft_failures", "Sequences that lost their drafts to an error.")]
    model: str | None = None
    weights_bytes: Annotated[
        int, Metric("headrace:draft_weights_bytes", "Of headrace:memory_weights_bytes, the draft model's.", "gauge")
    ] = 0
    state_bytes: Annotated[
        int, Metric("headrace:draft_state_bytes", "Of headrace:memory_state_bytes, the draft model's.", "gauge")
    ] = 0


@dataclass(frozen=True, slots=True)
class HandoverStatus:
    """Requests that another server answers, since the start."""

    num_running: Annotated[int, Metric("headrace:handover_running", "Requests at the other server.", "gauge")]
    num_requests: int
    num_failures: Annotated[
        int, Metric("headrace:handover_failures", "Requests that the other server did not answer to the end.")
    ]


@dataclass(frozen=True, slots=True)
class SparseStatus:
    """Sparse prefill since the start. Bytes are the draft model's share of MemoryStatus."""

    draft: str
    num_thinned: Annotated[int, Metric("headrace:sparse_prompts", "Prompts computed with sparse prefill.")]
    num_kept_tokens: Annotated[
        int, Metric("headrace:sparse_kept_tokens", "Of these, uncached tokens that were computed.")
    ]
    num_dropped_tokens: Annotated[int, Metric("headrace:sparse_dropped_tokens", "Of these, tokens that were left out.")]
    bypassed: Annotated[
        tuple[tuple[str, int], ...],
        Metric("headrace:sparse_bypassed", "Prompts computed in full, by reason.", key="reason"),
    ]
    num_scoring: Annotated[int, Metric("headrace:sparse_scoring", "Prompts that the draft model is scoring.", "gauge")]
    weights_bytes: Annotated[
        int, Metric("headrace:sparse_weights_bytes", "Of headrace:memory_weights_bytes, the draft model's.", "gauge")
    ]
    state_bytes: Annotated[
        int, Metric("headrace:sparse_state_bytes", "Of headrace:memory_state_bytes, the draft model's.", "gauge")
    ]
    records_bytes: Annotated[
        int, Metric("headrace:sparse_records_bytes", "Of headrace:memory_records_bytes, the draft model's.", "gauge")
    ]


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
class StepVariants:
    num_built: Annotated[
        int,
        Metric(
            "headrace:step_forms",
            "Forms of steps that had to be built, each of which took longer than later steps of that form.",
        ),
    ] = 0
    num_built_since_ready: Annotated[
        int,
        Metric("headrace:step_forms_since_ready", "Of these, since /health says ok: an ordinary load builds none."),
    ] = 0


@dataclass(frozen=True, slots=True)
class DeviceStatus:
    """What the model runs on. num_cores: CPU cores that the process may use.

    utilization: share of the last moments in which the GPU computed; None for a CPU, and where it can't be read.
    """

    kind: str
    name: str
    memory_bytes: int
    num_cores: int
    utilization: float | None = None


@dataclass(frozen=True, slots=True)
class AdapterStatus:
    """The names of served adapters: of all, of those with running and of those with waiting requests."""

    names: tuple[str, ...]
    running: tuple[str, ...]
    waiting: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EngineProcessStatus:
    """The process of all engines. Fields as in ProcessStatus."""

    cpu_s: Annotated[float, Metric("headrace:engine_process_cpu_seconds", "Processor time of the engines' process.")]
    peak_memory_bytes: Annotated[
        int, Metric("headrace:engine_process_peak_memory_bytes", "Peak memory of the engines' process.", "gauge")
    ]


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """A snapshot between two steps.

    max_num_seqs: sequences that may run at once.
    cache: None if disabled. drafts: None without speculative decoding. sparse: None without sparse prefill.
    handover: None where it is off. ranks: None unless the model is split. adapters: None while none is served.
    engine_process: None where the engines run in the server's process.
    num_schema_violations: also of tool parameters whose type the schema does not allow.
    """

    num_running: Annotated[int, Metric("vllm:num_requests_running", "Running requests.", "gauge")]
    num_waiting: Annotated[
        int, Metric("vllm:num_requests_waiting", "Queued requests and preempted sequences.", "gauge")
    ]
    requests: tuple[RequestStatus, ...]
    memory: MemoryStatus
    counters: Counters
    cache: CacheStatus | None = None
    num_schema_violations: Annotated[
        int,
        Metric("headrace:schema_misfits", "Finished answers and call arguments that do not match their JSON schema."),
    ] = 0
    num_malformed_calls: Annotated[
        int, Metric("headrace:broken_tool_calls", "Malformed tool calls, returned as text.")
    ] = 0
    drafts: DraftStatus | None = None
    sparse: SparseStatus | None = None
    handover: HandoverStatus | None = None
    ranks: RanksStatus | None = None
    adapters: AdapterStatus | None = None
    warm_up: WarmUpStatus = WarmUpStatus()
    step_forms: StepVariants = StepVariants()
    max_num_seqs: int = 0
    device: DeviceStatus | None = None
    engine_process: EngineProcessStatus | None = None
    history: StepHistory = StepHistory()


_NOTHING = Histogram((), (0,), 0.0)

IDLE_STATUS = EngineStatus(
    num_running=0,
    num_waiting=0,
    requests=(),
    memory=MemoryStatus(0, 0, 0, 0, 0, 0, 0, 0, 0),
    counters=Counters(0, 0, 0, 0, 0, (), DraftCounters(), _NOTHING, _NOTHING, _NOTHING, _NOTHING),
)
"""Of a model that is not loaded."""


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """The server's process. cpu_s: of all threads. peak_memory_bytes: the peak resident size."""

    uptime_s: Annotated[float, Metric("headrace:process_uptime_seconds", "Time since the server started.", "gauge")]
    cpu_s: Annotated[float, Metric("headrace:process_cpu_seconds", "Processor time of the server's process.")]
    peak_memory_bytes: Annotated[
        int, Metric("headrace:process_peak_memory_bytes", "Peak memory of the server's process.", "gauge")
    ]
