"""GET /health, /v1/status and /v1/cache: the server, the model, the prefix cache and every request, as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from typing import Any

from headrace.types.metric import metrics_of
from headrace.types.model import ModelDescription
from headrace.types.model_status import ModelStatus
from headrace.types.recent import ErrorStatus
from headrace.types.status import CacheStatus, EngineStatus, ProcessStatus, WarmUpStatus


def status_body(
    status: EngineStatus,
    model: ModelDescription | None,
    models: Sequence[tuple[ModelStatus, EngineStatus]],
    process: ProcessStatus,
    *,
    version: str,
    ignored: Mapping[str, int],
    errors: Sequence[ErrorStatus],
    is_draining: bool,
) -> dict[str, Any]:
    """status, model: of the model whose figures are shown in full; None if no model is loaded. models: all of them, the
    one first. ignored: how often each unknown field was sent. errors: the latest, the oldest first."""
    names = models[0][0].names
    return {
        "status": health_body(status.warm_up, is_draining=is_draining)["status"],
        "version": version,
        "process": asdict(process),
        "model": {
            "name": names[0] if model is None else model.name,
            "served_names": list(names),
            "model_type": None if model is None else model.model_type,
            "max_model_len": None if model is None else model.max_model_len,
            "vocab_size": None if model is None else model.tokens.end,
            "kv_bits": None if model is None else model.kv_bits,
            "report": [] if model is None else list(model.report),
        },
        "models": [_model(each, of_it) for each, of_it in models],
        **_shown(status),
        "ignored_fields": dict(ignored),
        "errors": [asdict(error) for error in errors],
    }


def _model(model: ModelStatus, status: EngineStatus) -> dict[str, Any]:
    own = {"num_running": status.num_running, "num_waiting": status.num_waiting, "requests": _shown(status.requests)}
    budget = model.budget_bytes or status.memory.budget_bytes  # a lone model's is not divided
    return {"name": model.names[0], **asdict(model), "budget_bytes": budget, **own}


def health_body(warm_up: WarmUpStatus, *, is_draining: bool) -> dict[str, Any]:
    if is_draining:
        return {"status": "draining"}
    return {"status": "ok"} if warm_up.is_over else {"status": "warming", "warm_up": asdict(warm_up)}


def cache_body(cache: CacheStatus | None) -> dict[str, Any]:
    """The prefix cache alone. Rates cover all lookups since the start; null before the first."""
    if cache is None:
        return {"object": "cache", "enabled": False}
    return {
        "object": "cache",
        "enabled": True,
        **asdict(cache),
        "hit_rate": _share(cache.num_hits, cache.num_lookups),
        "token_hit_rate": _share(cache.num_hit_tokens, cache.num_lookup_tokens),
    }


def _shown(value: Any) -> Any:
    """A status as JSON; fields of (key, number) pairs become objects."""
    if isinstance(value, tuple):
        return [_shown(each) for each in value]
    if not is_dataclass(value):
        return value
    keyed = {field for field, metric in metrics_of(value) if metric.key}
    shown = {field.name: getattr(value, field.name) for field in fields(value)}
    return {name: dict(each) if name in keyed else _shown(each) for name, each in shown.items()}


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None
