"""The ids under which gateways and tracers record a request."""

from __future__ import annotations

import re
from collections.abc import Mapping

SAFE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
"""Safe in a header, a path and a log line."""

# https://www.w3.org/TR/trace-context/#traceparent-header: versions after 00 may add fields, ff is invalid
_TRACEPARENT = re.compile(
    r"(?P<version>(?!ff)[0-9a-f]{2})-(?P<trace>(?!0{32})[0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?P<more>-.*)?"
)


def correlation_id(headers: Mapping[str, str]) -> str | None:
    """The id that a gateway gave the request and looks for in its answer; None if it is missing or not safe."""
    sent = headers.get("x-correlation-id", "")
    return sent if SAFE_ID.fullmatch(sent) else None


def trace_id(headers: Mapping[str, str]) -> str | None:
    """The trace of a W3C `traceparent`; None if it is missing or invalid."""
    match = _TRACEPARENT.fullmatch(headers.get("traceparent", ""))
    if match is None or (match["version"] == "00" and match["more"]):
        return None
    return match["trace"]
