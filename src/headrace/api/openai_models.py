"""GET /v1/models: the loaded model under its served names, for OpenAI and Anthropic clients.

The one loaded model serves a request for any model name, unless the server is strict about names. The answer carries
the requested name if it is a served one, else the first served name, so that it is not taken for another model's.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from headrace.errors import InvalidRequest, ModelNotFound


def model_list(names: Sequence[str], created: int, max_model_len: int) -> dict[str, Any]:
    """All served names on one page."""
    data = [_model(name, created, max_model_len) for name in names]
    return {"object": "list", "data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]}


def one_model(asked: str, names: Sequence[str], created: int, max_model_len: int) -> dict[str, Any]:
    """One served name. Raises ModelNotFound."""
    return _model(answer_name(asked, names, strict=True), created, max_model_len)


def answer_name(asked: str | None, names: Sequence[str], *, strict: bool) -> str:
    """The model name in an answer. Raises ModelNotFound, or InvalidRequest if a strict server gets none."""
    if asked in names:
        return str(asked)
    if not strict:
        return names[0]
    if asked is None:
        raise InvalidRequest("model is missing", param="model")
    raise ModelNotFound(f"The model `{asked}` does not exist; served: {', '.join(names)}", param="model")


def _model(name: str, created: int, max_model_len: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "headrace",
        "max_model_len": max_model_len,
        "type": "model",
        "display_name": name,
        "lifecycle": "active",
        "created_at": datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z"),
        "max_input_tokens": max_model_len,
        "max_tokens": max_model_len,
    }
