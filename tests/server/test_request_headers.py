"""Sessions and foreign ids in headers, as agents and gateways send them, through the real application."""

from __future__ import annotations

import asyncio
import logging

import httpx
import pytest
from fakes import FakeEngine, app_over, fake_session

from headrace.config import ServerConfig
from headrace.server.foreign_ids import trace_id
from headrace.server.session_header import SESSION_HEADERS

CHAT = "/v1/chat/completions"
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"  # the example of the W3C recommendation


def ask(engine: FakeEngine, headers: dict[str, str], **fields: object) -> httpx.Response:
    async def scenario() -> httpx.Response:
        transport = httpx.ASGITransport(app_over(fake_session(engine), ServerConfig()), client=("203.0.113.7", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            body = {"messages": [{"role": "user", "content": "hello"}], **fields}
            return await client.post(CHAT, json=body, headers=headers)

    return asyncio.run(scenario())


def session(headers: dict[str, str], **fields: object) -> str:
    engine = FakeEngine("hi")
    assert ask(engine, headers, **fields).status_code == 200
    return engine.requests[0].session


@pytest.mark.parametrize(
    "name",
    [
        *("X-Gateway-Inference-Fairness-Id", "X-SMG-Routing-Key", "x-session-id", "X-Claude-Code-Session-Id"),
        *("session-id", "session_id", "x-session-affinity", "x-litellm-session-id"),
    ],
)
def test_a_session_in_a_header_wins_over_the_body(name: str) -> None:
    assert session({name: "s-1"}, user="eve", prompt_cache_key="k") == "s-1"


def test_of_several_headers_the_first_of_the_list_counts_that_has_a_value() -> None:
    headers = {name: f"value of {name}" for name in SESSION_HEADERS}
    for name in SESSION_HEADERS:
        assert session(headers) == f"value of {name}"
        headers[name] = ""
    assert session(headers) == "203.0.113.7"


def test_without_a_header_the_cache_key_counts_then_the_user_then_the_address() -> None:
    assert session({}, user="eve", prompt_cache_key="k") == "k"
    assert session({}, user="eve") == "eve"
    assert session({}) == "203.0.113.7"


def test_ids_of_a_gateway_are_logged_and_the_correlation_id_is_answered(caplog: pytest.LogCaptureFixture) -> None:
    headers = {"x-request-id": "r-1", "x-correlation-id": "c-1", "traceparent": f"00-{TRACE}-{SPAN}-01"}
    with caplog.at_level(logging.INFO, "headrace.server"):
        answer = ask(FakeEngine("hi"), headers)
    assert (answer.headers["x-request-id"], answer.headers["x-correlation-id"]) == ("r-1", "c-1")
    assert "traceparent" not in answer.headers
    (record,) = [each for each in caplog.records if hasattr(each, "fields")]
    assert (record.fields["request_id"], record.fields["correlation_id"]) == ("r-1", "c-1")
    assert record.fields["trace_id"] == TRACE
    assert record.getMessage().endswith(f"correlation_id=c-1 trace_id={TRACE}")


@pytest.mark.parametrize("sent", ["", "a b", "x" * 129, 'c"1'])
def test_a_correlation_id_that_could_do_harm_is_dropped(sent: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "headrace.server"):
        assert "x-correlation-id" not in ask(FakeEngine("hi"), {"x-correlation-id": sent}).headers
    (record,) = [each for each in caplog.records if hasattr(each, "fields")]
    assert not {"correlation_id", "trace_id"} & set(record.fields)


@pytest.mark.parametrize(
    ("sent", "known"),
    [
        (f"00-{TRACE}-{SPAN}-01", True),
        (f"cc-{TRACE}-{SPAN}-01", True),
        (f"cc-{TRACE}-{SPAN}-01-what-the-future-will-be-like", True),
        (f"00-{TRACE}-{SPAN}-01-more", False),
        (f"ff-{TRACE}-{SPAN}-01", False),
        (f"00-{'0' * 32}-{SPAN}-01", False),
        (f"00-{TRACE}-{'0' * 16}-01", False),
        (f"00-{TRACE.upper()}-{SPAN}-01", False),
        (f"00-{TRACE}-{SPAN}", False),
        ("", False),
    ],
)
def test_only_a_valid_traceparent_names_a_trace(sent: str, known: bool) -> None:
    """By https://www.w3.org/TR/trace-context/#traceparent-header-field-values."""
    assert trace_id({"traceparent": sent}) == (TRACE if known else None)
