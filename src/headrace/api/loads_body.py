"""GET /v1/loads: how busy the engine is, in SGLang's form, for gateways that balance by it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from headrace.errors import InvalidRequest, UnsupportedField
from headrace.types.status import EngineStatus, Phase

_SECTIONS = frozenset({"core", "memory", "spec", "lora", "disagg", "queues", "all"})

_GB = 1 << 30
"""SGLang's unit."""


def read_sections(query: Mapping[str, str]) -> frozenset[str]:
    """The sections that are asked for. Raises InvalidRequest and UnsupportedField."""
    if query.get("format", "json") != "json":
        raise UnsupportedField("format must be json here; /metrics has Prometheus' format", param="format")
    if query.get("dp_rank", "0") != "0":
        raise InvalidRequest("dp_rank must be 0: there is one engine", param="dp_rank")
    sections = frozenset(each.strip() for each in query.get("include", "all").split(",") if each.strip())
    if not sections <= _SECTIONS:
        raise InvalidRequest(f"include takes {', '.join(sorted(_SECTIONS))}, separated by commas", param="include")
    return _SECTIONS if "all" in sections else sections


def loads_body(status: EngineStatus, sections: frozenset[str], *, version: str, now: float) -> dict[str, Any]:
    """now: Unix time. The engine is the only data-parallel rank."""
    load = _core(status, now)
    if "memory" in sections:
        load["memory"] = {
            "weight_gb": round(status.memory.weights_bytes / _GB, 3),
            "kv_cache_gb": round(status.memory.budget_bytes / _GB, 3),
            "graph_gb": 0.0,
            "token_capacity": status.memory.capacity_tokens,
        }
    if "spec" in sections and status.drafts is not None:
        load["speculative"] = _speculative(status)
    if "queues" in sections:
        # Besides queued requests, num_waiting counts preempted sequences; SGLang's requests have one each.
        num_queued = sum(each.phase is Phase.QUEUED for each in status.requests)
        load["queues"] = {
            "waiting": num_queued,
            "grammar": 0,
            "paused": 0,
            "retracted": status.num_waiting - num_queued,
        }
    return {
        "timestamp": datetime.fromtimestamp(now, UTC).isoformat(),
        "version": version,
        "accelerator": None if status.device is None else status.device.name,
        "num_accelerators": 1,
        "dp_rank_count": 1,
        "loads": [load],
    }


def _core(status: EngineStatus, now: float) -> dict[str, Any]:
    memory, cache = status.memory, status.cache
    num_queued = sum(each.num_prompt_tokens for each in status.requests if each.phase is Phase.QUEUED)
    num_used = sum(each.num_computed_tokens for each in status.requests if each.phase is not Phase.QUEUED)
    # the last second is in progress
    outputs = status.history.num_output_tokens[-2:-1]
    num_lookup_tokens = 0 if cache is None else cache.num_lookup_tokens
    hit_rate = cache.num_hit_tokens / num_lookup_tokens if cache is not None and num_lookup_tokens else 0.0
    rows = status.num_running / status.max_num_seqs if status.max_num_seqs else 0.0
    return {
        "dp_rank": 0,
        "timestamp": now,
        "num_running_reqs": status.num_running,
        "num_waiting_reqs": status.num_waiting,
        "num_waiting_uncached_tokens": num_queued,
        "num_used_tokens": num_used,
        "num_total_tokens": num_used + num_queued,
        "max_total_num_tokens": memory.capacity_tokens,
        "token_usage": round(memory.usage, 4),
        "gen_throughput": float(sum(outputs)),
        "cache_hit_rate": round(hit_rate, 4),
        "utilization": round(max(memory.usage, rows), 4),
        "max_running_requests": status.max_num_seqs,
    }


def _speculative(status: EngineStatus) -> dict[str, float]:
    """accept_length counts the token that each verified window gives besides its accepted drafts."""
    drafts = status.counters.drafts
    return {
        "accept_length": round(1 + drafts.num_accepted / drafts.num_windows, 4) if drafts.num_windows else 0.0,
        "accept_rate": round(drafts.num_accepted / drafts.num_drafted, 4) if drafts.num_drafted else 0.0,
    }
