"""An engine's status as Prometheus text (exposition format 0.0.4).

Names and labels are vLLM's where it has the metric, so that its dashboards and autoscalers work; our own metrics begin
with `headrace:`. Plain string formatting of a snapshot; the client library would add a registry and a dependency.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate

from headrace.types.events import FinishReason
from headrace.types.status import DiskStatus, EngineStatus, Histogram, ProcessStatus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Present from the start: a counter that appears with its first event hides that event from rates.
_FINISH_REASONS = tuple(reason.value for reason in FinishReason)


def render(status: EngineStatus, model_name: str, process: ProcessStatus) -> str:
    """All metrics. model_name: the first served name."""
    labels = {"model_name": model_name, "engine": "0"}
    lines = [*_gauges(status, labels), *_counters(status, labels), *_histograms(status, labels)]
    lines += [*_cache(status, labels), *_drafts(status, labels), *_sparse(status, labels)]
    return "\n".join([*lines, *_own(status, process, labels)]) + "\n"


def _gauges(status: EngineStatus, labels: Mapping[str, str]) -> Iterator[str]:
    yield from _gauge("vllm:num_requests_running", "Running requests.", status.num_running, labels)
    yield from _gauge("vllm:num_requests_waiting", "Requests that are queued.", status.num_waiting, labels)


def _counters(status: EngineStatus, labels: Mapping[str, str]) -> Iterator[str]:
    counters = status.counters
    yield from _counter("vllm:prompt_tokens", "Prompt tokens, cached or computed.", counters.num_prompt_tokens, labels)
    yield from _counter("vllm:generation_tokens", "Output tokens.", counters.num_output_tokens, labels)
    yield from _counter("vllm:num_preemptions", "Preempted sequences.", counters.num_preemptions, labels)
    name = "vllm:request_success_total"
    yield from _heading(name, "counter", "Choices that ended, by reason.")
    finished = {**dict.fromkeys((*_FINISH_REASONS, "abort", "error"), 0), **dict(counters.finished)}
    for reason, count in finished.items():
        yield _sample(name, {**labels, "finished_reason": reason}, count)


def _histograms(status: EngineStatus, labels: Mapping[str, str]) -> Iterator[str]:
    counters = status.counters
    token = counters.time_per_output_token_s
    shown = (
        ("vllm:time_to_first_token_seconds", "From arrival to the first token.", counters.time_to_first_token_s),
        ("vllm:inter_token_latency_seconds", "Between two tokens of a choice.", token),
        # Its older name, which many dashboards still use.
        ("vllm:time_per_output_token_seconds", "Same as vllm:inter_token_latency_seconds.", token),
        ("vllm:e2e_request_latency_seconds", "From arrival to the end, of finished requests.", counters.request_s),
        ("vllm:request_queue_time_seconds", "From arrival to the first step.", counters.queue_s),
    )
    for name, help, histogram in shown:
        yield from _histogram(name, help, histogram, labels)


def _cache(status: EngineStatus, labels: Mapping[str, str]) -> Iterator[str]:
    """Empty if the prefix cache is off."""
    cache = status.cache
    if cache is None:
        return
    help = "Prompt tokens looked up in the prefix cache."
    yield from _counter("vllm:prefix_cache_queries", help, cache.num_lookup_tokens, labels)
    help = "Of these, tokens found in the cache."
    yield from _counter("vllm:prefix_cache_hits", help, cache.num_hit_tokens, labels)
    help = "Bytes held by the prefix cache, by location."
    yield from _heading("headrace:cache_bytes", "gauge", help)
    yield _sample("headrace:cache_bytes", {**labels, "kind": "memory"}, cache.num_bytes)
    if cache.disk is not None:
        yield _sample("headrace:cache_bytes", {**labels, "kind": "disk"}, cache.disk.num_bytes)
        yield from _disk(cache.disk, labels)


def _disk(disk: DiskStatus, labels: Mapping[str, str]) -> Iterator[str]:
    for name, help, value in (
        ("files", "Files of the disk cache.", disk.num_files),
        ("quota_bytes", "Limit of their size.", disk.quota_bytes),
        ("pending_bytes", "Waiting to be written.", disk.num_pending_bytes),
    ):
        yield from _gauge(f"headrace:cache_disk_{name}", help, value, labels)
    for name, help, value in (
        ("hits", "Prompts that continued from cached files.", disk.num_hits),
        ("hit_tokens", "Prompt tokens that these skipped.", disk.num_hit_tokens),
        ("reads", "Files read.", disk.num_reads),
        ("read_bytes", "Bytes read.", disk.num_read_bytes),
        ("writes", "Files written.", disk.num_writes),
        ("written_bytes", "Bytes written.", disk.num_written_bytes),
        ("dropped", "Files that were not written.", disk.num_dropped),
    ):
        yield from _counter(f"headrace:cache_disk_{name}", help, value, labels)


def _drafts(status: EngineStatus, labels: Mapping[str, str]) -> Iterator[str]:
    """Empty without speculative decoding."""
    if status.drafts is None:
        return
    counted = status.counters.drafts
    for name, help, count in (
        ("vllm:spec_decode_num_drafts", "Verified draft windows.", counted.num_windows),
        ("vllm:spec_decode_num_draft_tokens", "Verified draft tokens.", counted.num_drafted),
        ("vllm:spec_decode_num_accepted_tokens", "Accepted draft tokens.", counted.num_accepted),
        ("headrace:draft_failures", "Sequences that lost their drafts to an error.", status.drafts.num_failures),
    ):
        yield from _counter(name, help, count, labels)
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    yield from _heading(name, "counter", "Accepted draft tokens, by position in the window.")
    accepted_at = (*counted.accepted_at, *(0,) * (status.drafts.max_drafts - len(counted.accepted_at)))
    for place, count in enumerate(accepted_at):
        yield _sample(name, {**labels, "position": str(place)}, count)


def _sparse(status: EngineStatus, labels: Mapping[str, str]) -> Iterator[str]:
    """Empty without sparse prefill."""
    sparse = status.sparse
    if sparse is None:
        return
    yield from _counter("headrace:sparse_prompts", "Prompts computed with sparse prefill.", sparse.num_thinned, labels)
    help = "Of these, uncached tokens that were computed."
    yield from _counter("headrace:sparse_kept_tokens", help, sparse.num_kept_tokens, labels)
    help = "Of these, tokens that were left out."
    yield from _counter("headrace:sparse_dropped_tokens", help, sparse.num_dropped_tokens, labels)
    name = "headrace:sparse_bypassed_total"
    yield from _heading(name, "counter", "Prompts computed in full, by reason.")
    for reason, count in sparse.bypassed:
        yield _sample(name, {**labels, "reason": reason}, count)
    help = "Prompts that the draft model is scoring."
    yield from _gauge("headrace:sparse_scoring", help, sparse.num_scoring, labels)
    for part, help, num_bytes in (
        ("weights", "Of headrace:memory_weights_bytes, the draft model's.", sparse.weights_bytes),
        ("state", "Of headrace:memory_state_bytes, the draft model's.", sparse.state_bytes),
        ("records", "Of headrace:memory_records_bytes, the draft model's.", sparse.records_bytes),
    ):
        yield from _gauge(f"headrace:sparse_{part}_bytes", help, num_bytes, labels)


def _own(status: EngineStatus, process: ProcessStatus, labels: Mapping[str, str]) -> Iterator[str]:
    memory = status.memory
    yield from _counter("headrace:steps", "Steps of the engine.", status.counters.num_steps, labels)
    help = "Forms of steps that had to be built, each of which took longer than later steps of that form."
    yield from _counter("headrace:step_forms", help, status.step_forms.num_built, labels)
    help = "Of these, since /health says ok: an ordinary load builds none."
    yield from _counter("headrace:step_forms_since_ready", help, status.step_forms.num_built_since_ready, labels)
    name = "headrace:requests_total"
    yield from _heading(name, "counter", "Queued requests, by the parts of the model they need.")
    for route, count in status.counters.routes:
        yield _sample(name, {**labels, "route": route.value}, count)
    help = "Finished answers and call arguments that do not match their JSON schema."
    yield from _counter("headrace:schema_misfits", help, status.num_schema_violations, labels)
    help = "Malformed tool calls, returned as text."
    yield from _counter("headrace:broken_tool_calls", help, status.num_malformed_calls, labels)
    for name, help, num_bytes in (
        ("budget", "Limit for all sequences.", memory.budget_bytes),
        ("weights", "The model's weights.", memory.weights_bytes),
        ("reserved", "Reserved for sequences.", memory.reserved_bytes),
        ("state", "Held by the states of running sequences.", memory.state_bytes),
        ("preempted", "Held by checkpoints of preempted sequences.", memory.preempted_bytes),
        ("records", "Held by the prefix cache.", memory.records_bytes),
        ("features", "Embeddings of images and videos.", memory.features_bytes),
        ("disk", "In transit to or from the disk.", memory.disk_bytes),
        ("device", "In use by MLX, everything included.", memory.device_bytes),
        ("buffers", "Freed, and kept by MLX for reuse.", memory.buffers_bytes),
    ):
        yield from _gauge(f"headrace:memory_{name}_bytes", help, num_bytes, labels)
    yield from _counter("headrace:process_cpu_seconds", "Processor time of the process.", process.cpu_s, labels)
    help = "Peak memory of the process."
    yield from _gauge("headrace:process_peak_memory_bytes", help, process.peak_memory_bytes, labels)
    yield from _gauge("headrace:process_uptime_seconds", "Time since the server started.", process.uptime_s, labels)


def _gauge(name: str, help: str, value: float, labels: Mapping[str, str]) -> Iterator[str]:
    yield from _heading(name, "gauge", help)
    yield _sample(name, labels, value)


def _counter(name: str, help: str, value: float, labels: Mapping[str, str]) -> Iterator[str]:
    yield from _heading(f"{name}_total", "counter", help)
    yield _sample(f"{name}_total", labels, value)


def _histogram(name: str, help: str, histogram: Histogram, labels: Mapping[str, str]) -> Iterator[str]:
    yield from _heading(name, "histogram", help)
    limits = [*(repr(bound) for bound in histogram.bounds), "+Inf"]
    for limit, count in zip(limits, accumulate(histogram.counts), strict=True):
        yield _sample(f"{name}_bucket", {**labels, "le": limit}, count)
    yield _sample(f"{name}_sum", labels, histogram.total)
    yield _sample(f"{name}_count", labels, sum(histogram.counts))


def _heading(name: str, kind: str, help: str) -> Iterator[str]:
    yield f"# HELP {name} {help}"
    yield f"# TYPE {name} {kind}"


def _sample(name: str, labels: Mapping[str, str], value: float) -> str:
    shown = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
    return f"{name}{{{shown}}} {value}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
