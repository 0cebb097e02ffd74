"""A span of each request for an OpenTelemetry collector: times and counts, no content.

Imports the packages of the extra `otel`; only `tracing.py` imports this module.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from headrace import __version__
from headrace.server.bookkeeping import RequestRecord

_OPERATIONS = {"completions": "text_completion", "messages": "chat", "responses": "chat"}
"""`gen_ai.operation.name` by the last part of an answer's path, where that is not the name itself (`embeddings`)."""

_ANSWER = {
    "gen_ai.response.id": "answer_id",
    "gen_ai.request.model": "model",
    "gen_ai.response.model": "model",
    "gen_ai.usage.input_tokens": "num_prompt_tokens",
    "gen_ai.usage.cache_read.input_tokens": "num_cached_tokens",
    "gen_ai.usage.output_tokens": "num_output_tokens",
    "gen_ai.response.finish_reasons": "finish_reasons",
    "gen_ai.response.time_to_first_chunk": "time_to_first_token_s",
}
"""Attributes of the semantic conventions for generative AI, and the fields of a log line with their values."""


def environment_provider() -> TracerProvider:
    """Sends spans over HTTP in batches, as the OTEL_* variables say. `RequestSpans.close` ends it."""
    resource = Resource.create()
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "headrace", SERVICE_VERSION: __version__}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


class RequestSpans:
    """Makes each request's span when it is over, with one inside for each of its phases."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("headrace", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def add(self, record: RequestRecord, headers: Mapping[str, str]) -> None:
        """The span's parent is that of the headers. The record gets the span's trace id, for its log line."""
        fields = record.fields()
        now, offset_s = time.monotonic(), time.time() - time.monotonic()
        span = self._tracer.start_span(
            _name(record, fields),
            context=self._propagator.extract(headers),
            kind=SpanKind.SERVER,
            attributes=dict(_attributes(record, fields)),
            start_time=_nanoseconds(record.arrived + offset_s),
        )
        if span.get_span_context().is_valid:
            record.trace_id = format_trace_id(span.get_span_context().trace_id)
        if record.error is not None and record.error.status >= 500:
            span.set_status(StatusCode.ERROR)
        self._add_phases(record, set_span_in_context(span, Context()), offset_s)
        _end(span, now + offset_s)

    def _add_phases(self, record: RequestRecord, parent: Context, offset_s: float) -> None:
        if (times := record.times) is None:
            return
        moments = (record.arrived, times.began_s, times.first_s, times.last_s)
        for name, start, end in zip(("queue", "prefill", "decode"), moments, moments[1:], strict=False):
            span = self._tracer.start_span(name, parent, start_time=_nanoseconds(start + offset_s))
            _end(span, end + offset_s)

    def close(self, timeout_s: float) -> None:
        """Send what is left, as far as there is time: a collector that does not answer must not keep the process."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(timeout_s)


def _attributes(record: RequestRecord, fields: Mapping[str, object]) -> Iterator[tuple[str, AttributeValue]]:
    yield "http.request.method", record.method
    yield "url.path", record.path
    yield "headrace.request_id", record.request_id
    if record.status is not None:
        yield "http.response.status_code", record.status
    if record.error is not None:
        yield "error.type", record.error.code or str(record.error.status)
    if "answer_id" not in fields:
        return
    yield "gen_ai.operation.name", _operation(record)
    yield "gen_ai.provider.name", "headrace"
    for attribute, field in _ANSWER.items():
        value = fields[field]
        if isinstance(value, str | int | float | list):
            yield attribute, value


def _name(record: RequestRecord, fields: Mapping[str, object]) -> str:
    """As the conventions have it: operation and model, else the method alone, since paths may have ids."""
    return f"{_operation(record)} {fields['model']}" if "model" in fields else record.method


def _operation(record: RequestRecord) -> str:
    if record.path == "/v1/chat/completions":
        return "chat"
    kind = record.path.rpartition("/")[2]
    return _OPERATIONS.get(kind, kind)


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def _end(span: Span, unix_s: float) -> None:
    span.end(_nanoseconds(unix_s))
