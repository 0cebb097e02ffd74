"""Spans for OpenTelemetry: by the SDK's own exporter in memory, and over HTTP to a receiver that parses protobuf."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from fakes import FakeEngine, app_over, fake_session
from loopback import serving
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from headrace.config import ServerConfig
from headrace.errors import ConfigError, GenerationFailed
from headrace.server import app as app_module
from headrace.server.bookkeeping import RequestRecord
from headrace.server.spans import RequestSpans
from headrace.server.tracing import check_tracing, request_spans
from headrace.types.events import Finished, FinishReason, OutputTimes, Started, Usage

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "tell me a secret"}]}
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"  # the example of the W3C recommendation


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(app_module, "request_spans", lambda config: RequestSpans(provider))
    return exporter


def ask(engine: FakeEngine, path: str, body: dict[str, object], headers: dict[str, str] | None = None) -> None:
    async def scenario() -> None:
        transport = httpx.ASGITransport(app_over(fake_session(engine), ServerConfig()))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            await client.get("/health")
            await client.post(path, json=body, headers=headers)

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_one_span_with_counts_in_the_callers_trace(
    stream: bool, exporter: InMemorySpanExporter, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine("four", num_cached_tokens=3)
    headers = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=1", "x-request-id": "r-1"}
    with caplog.at_level(logging.INFO, "headrace.server"):
        ask(engine, CHAT, {**BODY, "stream": stream, "max_tokens": 4}, headers)
    (span,) = exporter.get_finished_spans()
    assert (span.name, span.kind, span.status.status_code) == ("chat fake-model", SpanKind.SERVER, StatusCode.UNSET)
    assert span.parent is not None
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, SPAN)
    assert span.context.trace_state.get("vendor") == "1"
    values = dict(span.attributes or {})
    assert values.pop("gen_ai.response.time_to_first_chunk") >= 0
    assert values == {
        "http.request.method": "POST",
        "url.path": CHAT,
        "http.response.status_code": 200,
        "headrace.request_id": "r-1",
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "headrace",
        "gen_ai.request.model": "fake-model",
        "gen_ai.response.model": "fake-model",
        "gen_ai.response.id": engine.requests[0].request_id,
        "gen_ai.usage.input_tokens": len("user: tell me a secret\n"),
        "gen_ai.usage.cache_read.input_tokens": 3,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.response.finish_reasons": ("length",),
    }
    assert "secret" not in span.to_json()
    (line,) = [each for each in caplog.records if hasattr(each, "fields") and each.fields["path"] == CHAT]
    assert line.fields["trace_id"] == TRACE


def test_without_a_parent_the_span_begins_a_trace_that_the_log_names(
    exporter: InMemorySpanExporter, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "headrace.server"):
        ask(FakeEngine("x"), "/v1/completions", {"prompt": "x", "max_tokens": 1})
    (span,) = exporter.get_finished_spans()
    assert (span.name, span.parent) == ("text_completion fake-model", None)
    (line,) = [each for each in caplog.records if hasattr(each, "fields") and each.fields["method"] == "POST"]
    assert line.fields["trace_id"] == f"{span.context.trace_id:032x}"


@pytest.mark.parametrize(
    ("engine", "body", "error", "status"),
    [
        (
            FakeEngine("par", GenerationFailed("a secret")),
            {**BODY, "stream": True},
            "generation_failed",
            StatusCode.ERROR,
        ),
        # by the conventions for HTTP, a client's error leaves a server's span alone
        (FakeEngine(), {"messages": 1}, "invalid_value", StatusCode.UNSET),
    ],
)
def test_an_error_is_named_by_its_code(
    engine: FakeEngine, body: dict[str, object], error: str, status: StatusCode, exporter: InMemorySpanExporter
) -> None:
    ask(engine, CHAT, body)
    (span,) = exporter.get_finished_spans()
    assert (span.attributes or {})["error.type"] == error
    assert span.status.status_code is status
    assert "secret" not in span.to_json()


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (CHAT, "chat m"),
        ("/v1/messages", "chat m"),
        ("/v1/responses", "chat m"),
        ("/v1/completions", "text_completion m"),
        ("/v1/embeddings", "embeddings m"),
        ("/v2/rerank", "rerank m"),
    ],
)
def test_the_operation_is_that_of_the_conventions(path: str, name: str, exporter: InMemorySpanExporter) -> None:
    """https://opentelemetry.io/docs/specs/semconv/registry/attributes/gen-ai/; rerank has no name there."""
    record = RequestRecord("r", "POST", path)
    record.begin_answer("a", "m")
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    RequestSpans(provider).add(record, {})
    (span,) = exporter.get_finished_spans()
    assert span.name == name


def test_phases_are_spans_inside_with_the_engines_times(exporter: InMemorySpanExporter) -> None:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    record = RequestRecord("r", "POST", CHAT, clock=lambda: 100.0)
    record.begin_answer("a", "m")
    record.take(Started(5))
    usage = Usage(5, 2, times=OutputTimes(began_s=100.5, first_s=102.0, last_s=106.0))
    record.take(Finished(FinishReason.STOP, usage))
    RequestSpans(provider).add(record, {})
    *phases, whole = exporter.get_finished_spans()
    assert [(each.name, round(seconds(each), 3)) for each in phases] == [
        ("queue", 0.5),
        ("prefill", 1.5),
        ("decode", 4.0),
    ]
    assert {each.parent.span_id for each in phases if each.parent} == {whole.context.span_id}
    assert phases[0].start_time == whole.start_time
    assert phases[0].end_time == phases[1].start_time


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None and span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


def test_polls_have_no_spans(exporter: InMemorySpanExporter) -> None:
    async def scenario() -> None:
        transport = httpx.ASGITransport(app_over(fake_session(FakeEngine()), ServerConfig()))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for path in ("/health", "/metrics", "/v1/status", "/v1/models"):
                await client.get(path)

    asyncio.run(scenario())
    assert [span.name for span in exporter.get_finished_spans()] == ["GET"]


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ExportTraceServiceRequest]]:
    """What a receiver of OTLP over HTTP gets."""
    received: list[ExportTraceServiceRequest] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            received.append(ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=server.serve_forever).start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    yield received
    server.shutdown()
    server.server_close()


def test_spans_reach_a_collector_at_the_latest_when_the_server_ends(collector: list[ExportTraceServiceRequest]) -> None:
    async def scenario() -> None:
        async with (
            serving(fake_session(FakeEngine("hi")), ServerConfig(otel=True)) as url,
            httpx.AsyncClient() as client,
        ):
            assert (await client.post(url + CHAT, json=BODY)).status_code == 200

    asyncio.run(asyncio.wait_for(scenario(), 30))
    (request,) = collector
    (resource,) = request.resource_spans
    assert {each.key: each.value.string_value for each in resource.resource.attributes}["service.name"] == "mine"
    (span,) = resource.scope_spans[0].spans
    assert span.name == "chat fake-model"
    counts = {each.key: each.value.int_value for each in span.attributes if each.value.HasField("int_value")}
    assert counts["gen_ai.usage.output_tokens"] == 2


def test_without_the_packages_the_flag_is_refused_with_the_way_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.context", None)
    monkeypatch.delitem(sys.modules, "headrace.server.spans")
    with pytest.raises(ConfigError, match=r"pip install 'headrace\[otel\]'"):
        check_tracing(ServerConfig(otel=True))
    check_tracing(ServerConfig())


def test_nothing_is_imported_without_the_flag() -> None:
    code = "import sys, headrace.server.run; sys.exit('headrace.server.spans' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert request_spans(ServerConfig()) is None
