"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter in vLLM's form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from headrace.api.json_body import JsonBody, StrictBody, check, ignored_names, read_object, unknown_fields
from headrace.errors import InvalidRequest


class AdapterBody(StrictBody):
    neutral_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {"lora_int_id": ()}

    model: str | None = None
    lora_name: str


class LoadAdapterBody(AdapterBody):
    lora_path: str
    load_inplace: bool = False


@dataclass(frozen=True, slots=True)
class AdapterCall:
    """name: of the adapter. path: inside of the folder of adapters; empty to unload. replaces: see `load_inplace`."""

    name: str
    path: str
    ignored: tuple[str, ...]
    replaces: bool = False


def read_load_adapter(body: JsonBody) -> AdapterCall:
    """Parse and validate a body. Raises InvalidRequest with the field's path as its param."""
    parsed = check(LoadAdapterBody, read_object(body))
    for field in ("lora_name", "lora_path"):
        if not getattr(parsed, field):
            raise InvalidRequest(f"{field} must not be empty", param=field)
    return AdapterCall(parsed.lora_name, parsed.lora_path, ignored_names(unknown_fields(parsed)), parsed.load_inplace)


def read_unload_adapter(body: JsonBody) -> AdapterCall:
    """Parse and validate a body. Raises InvalidRequest with the field's path as its param."""
    parsed = check(AdapterBody, read_object(body))
    return AdapterCall(parsed.lora_name, "", ignored_names(unknown_fields(parsed)))
