"""Whether requests are traced with OpenTelemetry, an extra that is imported only then."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.config import ServerConfig
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.server.spans import RequestSpans


def check_tracing(config: ServerConfig) -> None:
    """Raises ConfigError if tracing is asked for and can't be had."""
    if not config.otel:
        return
    try:
        import headrace.server.spans  # noqa: F401
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "opentelemetry":
            raise
        raise ConfigError("--otel needs OpenTelemetry's packages: pip install 'headrace[otel]'") from error


def request_spans(config: ServerConfig) -> RequestSpans | None:
    """None without `--otel`."""
    if not config.otel:
        return None
    from headrace.server.spans import RequestSpans, environment_provider

    return RequestSpans(environment_provider())
