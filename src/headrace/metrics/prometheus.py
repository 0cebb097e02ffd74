"""An engine's status as Prometheus text (exposition format 0.0.4): every field that is annotated with a Metric.

Plain string formatting of a snapshot; the client library would add a registry and a dependency.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from headrace.types.metric import Metric, metrics_of
from headrace.types.status import BLOCK_TOKENS, AdapterStatus, EngineStatus, Histogram, ProcessStatus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_USAGE = Metric("vllm:kv_cache_usage_perc", "Share of the memory for sequences that is reserved, 0 to 1.", "gauge")
_CACHE_CONFIG = Metric("vllm:cache_config_info", "Memory for sequences in blocks of tokens, as labels.", "gauge")
_ADAPTERS = Metric("vllm:lora_requests_info", "Adapters with requests, as labels; the value is the Unix time.", "gauge")
_ACCEPTED = Metric("vllm:spec_decode_num_accepted_tokens", "Accepted draft tokens.")
_ACCEPTED_AT = Metric(
    "vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted draft tokens, by position in the window.", key="position"
)

_RANK_USED = Metric("headrace:rank_used_bytes", "In use by MLX on each rank's device.", "gauge", key="rank")
_RANK_AVAILABLE = Metric("headrace:rank_available_bytes", "Left of each rank's device.", "gauge", key="rank")


def render(models: Mapping[str, EngineStatus], process: ProcessStatus) -> str:
    """All metrics. models: by the first served name. Processes' metrics have the first model's labels."""
    families: dict[str, list[str]] = {}
    for number, (model_name, status) in enumerate(models.items()):
        labels = {"model_name": model_name, "engine": "0"}
        for metric, value in _figures(status, process if number == 0 else None):
            name = f"{metric.name}_total" if metric.type == "counter" else metric.name
            heading = [f"# HELP {name} {metric.help}", f"# TYPE {name} {metric.type}"]
            families.setdefault(name, heading).extend(_samples(name, metric, value, labels))
    return "\n".join(line for lines in families.values() for line in lines) + "\n"


def _figures(status: EngineStatus, process: ProcessStatus | None) -> Iterator[tuple[Metric, Any]]:
    parts = [status, status.counters, status.cache, status.cache and status.cache.disk, status.sparse, status.handover]
    processes = (process, process and status.engine_process)
    for part in (*parts, status.memory, status.step_forms, *processes):
        yield from _figures_of(part)
    yield _USAGE, status.memory.usage
    yield _CACHE_CONFIG, _Info(_cache_config(status))
    if status.adapters is not None:
        yield _ADAPTERS, _Info(_adapters_labels(status.adapters), time.time())
    if status.ranks is not None:
        yield from _figures_of(status.ranks)
        yield _RANK_USED, [(each.rank, each.used_bytes) for each in status.ranks.ranks]
        yield _RANK_AVAILABLE, [(each.rank, each.available_bytes) for each in status.ranks.ranks]
    if status.drafts is not None:
        drafts = status.counters.drafts
        accepted_at = (*drafts.accepted_at, *(0,) * (status.drafts.max_drafts - len(drafts.accepted_at)))
        yield from (*_figures_of(status.drafts), *_figures_of(drafts))
        yield _ACCEPTED, drafts.num_accepted
        yield _ACCEPTED_AT, tuple(enumerate(accepted_at))


@dataclass(frozen=True, slots=True)
class _Info:
    """A sample whose labels are the content."""

    labels: Mapping[str, str]
    value: float = 1


def _cache_config(status: EngineStatus) -> dict[str, str]:
    """Labels of vLLM's metric. Gateways keep an index of prefixes of this size for each server."""
    capacity_tokens = status.memory.capacity_tokens
    return {
        "block_size": str(BLOCK_TOKENS),
        "num_gpu_blocks": str(capacity_tokens // BLOCK_TOKENS),
        "kv_cache_size_tokens": str(capacity_tokens),
        "enable_prefix_caching": str(status.cache is not None),
    }


def _adapters_labels(adapters: AdapterStatus) -> dict[str, str]:
    """vLLM limits the adapters of a step to `max_lora`; here all that are loaded may be in one."""
    return {
        "running_lora_adapters": ",".join(adapters.running),
        "waiting_lora_adapters": ",".join(adapters.waiting),
        "max_lora": str(len(adapters.names)),
    }


def _figures_of(part: Any) -> Iterator[tuple[Metric, Any]]:
    if part is not None:
        yield from ((metric, getattr(part, field)) for field, metric in metrics_of(part))


def _samples(name: str, metric: Metric, value: Any, labels: Mapping[str, str]) -> Iterator[str]:
    if metric.kind_label:
        labels = {**labels, "kind": metric.kind_label}
    if isinstance(value, Histogram):
        yield from _buckets(name, value, labels)
    elif isinstance(value, _Info):
        yield _sample(name, {**labels, **value.labels}, value.value)
    elif metric.key:
        for key, number in {**dict.fromkeys(metric.keys, 0), **dict(value)}.items():
            yield _sample(name, {**labels, metric.key: str(key)}, number)
    else:
        yield _sample(name, labels, value)


def _buckets(name: str, histogram: Histogram, labels: Mapping[str, str]) -> Iterator[str]:
    limits = [*(repr(bound) for bound in histogram.bounds), "+Inf"]
    for limit, count in zip(limits, accumulate(histogram.counts), strict=True):
        yield _sample(f"{name}_bucket", {**labels, "le": limit}, count)
    yield _sample(f"{name}_sum", labels, histogram.total)
    yield _sample(f"{name}_count", labels, sum(histogram.counts))


def _sample(name: str, labels: Mapping[str, str], value: float) -> str:
    shown = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
    return f"{name}{{{shown}}} {value}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
