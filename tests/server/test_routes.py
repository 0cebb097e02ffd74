"""Routes, keys, origins and errors, through the real application."""

from __future__ import annotations

import asyncio
import codecs
import json
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fakes import END, THINKING_TEMPLATE, FakeEngine, PlainTemplate, app_over, describe, fake_session

from headrace.config import ServerConfig
from headrace.errors import ConfigError, GenerationFailed, Overloaded
from headrace.server.log_format import TEXT_FORMAT, TextLines
from headrace.session.session import Session
from headrace.types.status import WarmUpStatus

CHAT = "/v1/chat/completions"
BODY = {"model": "any", "messages": [{"role": "user", "content": "hello"}]}


def send(
    method: str, path: str, *, session: Session | None = None, config: ServerConfig | None = None, **fields: Any
) -> httpx.Response:
    app = app_over(session or fake_session(FakeEngine("hi", (END,))), config or ServerConfig())

    async def exchange() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, **fields)

    return asyncio.run(exchange())


def error_of(response: httpx.Response) -> dict[str, Any]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def stream_data(response: httpx.Response) -> list[str]:
    return [line.removeprefix("data: ") for line in response.text.split("\n") if line]


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_a_byte_order_mark_before_a_body_is_ignored(path: str) -> None:
    assert send("POST", path, content=json.dumps(BODY).encode("utf-8-sig")).status_code == 200
    assert send("POST", path, content=2 * codecs.BOM_UTF8 + json.dumps(BODY).encode()).status_code == 400


def test_a_whole_answer_comes_as_one_object() -> None:
    response = send("POST", CHAT, json=BODY)
    assert response.status_code == 200
    answer = response.json()
    assert answer["choices"][0]["message"]["content"] == "hi"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["model"] == "fake-model"


def test_a_stream_comes_as_events_and_ends_with_done() -> None:
    response = send("POST", CHAT, json={**BODY, "stream": True, "stream_options": {"include_usage": True}})
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, done = stream_data(response)
    assert done == "[DONE]"
    parsed = [json.loads(chunk) for chunk in chunks]
    assert len({chunk["id"] for chunk in parsed}) == 1
    assert "".join(each["choices"][0]["delta"].get("content", "") for each in parsed[:-1]) == "hi"
    assert [each["choices"][0]["finish_reason"] for each in parsed[:-1]].count("stop") == 1
    assert parsed[-1]["usage"]["completion_tokens"] == 3  # and the end token


def test_thinking_goes_under_the_name_that_the_server_was_given() -> None:
    session = fake_session(FakeEngine("<think>hm</think>yes"))
    response = send("POST", CHAT, session=session, config=ServerConfig(reasoning_field="reasoning"), json=BODY)
    message = response.json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("hm", "yes")


def test_the_request_reaches_the_engine_with_its_values() -> None:
    engine = FakeEngine("hi")
    send("POST", CHAT, session=fake_session(engine), json={**BODY, "temperature": 0.25, "seed": 7, "max_tokens": 3})
    (request,) = engine.requests
    assert (request.sampling.temperature, request.sampling.seed, request.max_tokens) == (0.25, 7, 3)


def test_ignored_fields_are_named_in_a_header_that_nothing_can_break() -> None:
    response = send("POST", CHAT, json={**BODY, "store": True, "zeal": 1, "a\r\nset-cookie: x": 2, "é": 3})
    assert response.status_code == 200
    assert response.headers["x-headrace-ignored"] == "a??set-cookie??x, zeal, ?"
    many = send("POST", CHAT, json={**BODY, **{f"field{index:03}": 1 for index in range(100)}, "stream": True})
    assert many.headers["x-headrace-ignored"].endswith(", ...68-more")
    assert "x-headrace-ignored" not in send("POST", CHAT, json=BODY).headers


def test_models_are_listed_under_the_served_names() -> None:
    config = ServerConfig(served_model_name=("a", "org/b"))
    assert [each["id"] for each in send("GET", "/v1/models", config=config).json()["data"]] == ["a", "org/b"]
    assert send("GET", "/v1/models/org/b", config=config).json()["id"] == "org/b"
    missing = send("GET", "/v1/models/c", config=config)
    assert missing.status_code == 404
    assert error_of(missing)["code"] == "model_not_found"


def test_any_model_name_is_served_unless_the_server_is_strict() -> None:
    assert send("POST", CHAT, json={**BODY, "model": "gpt-9"}).json()["model"] == "fake-model"
    strict = ServerConfig(strict_model_name=True)
    refused = send("POST", CHAT, config=strict, json={**BODY, "model": "gpt-9"})
    assert refused.status_code == 404
    assert (error_of(refused)["code"], error_of(refused)["param"]) == ("model_not_found", "model")
    assert send("POST", CHAT, config=strict, json={**BODY, "model": "fake-model"}).status_code == 200


def test_health_is_green_while_the_engine_lives_and_red_with_the_reason_after() -> None:
    assert send("GET", "/health").json() == {"status": "ok"}
    engine = FakeEngine("hi")
    engine.sick = "its thread ended"
    red = send("GET", "/health", session=fake_session(engine))
    assert red.status_code == 503
    assert "its thread ended" in error_of(red)["message"]


def test_health_asks_to_wait_while_steps_are_warmed_up_and_chats_are_answered_all_the_same() -> None:
    """As readiness probes want it: Kubernetes takes 200 to 399 as a success."""
    engine = FakeEngine("hi")
    engine.warmth = WarmUpStatus(num_pieces=12, num_done=5, num_failed=1, seconds=2.5)
    session = fake_session(engine)
    waiting = send("GET", "/health", session=session)
    assert waiting.status_code == 503
    progress = {"num_pieces": 12, "num_done": 5, "num_failed": 1, "seconds": 2.5}
    assert waiting.json() == {"status": "warming", "warm_up": progress}
    assert send("POST", CHAT, session=session, json=BODY).status_code == 200
    engine.warmth = replace(engine.warmth, num_done=12)
    ready = send("GET", "/health", session=session)
    assert (ready.status_code, ready.json()) == (200, {"status": "ok"})


def test_a_dead_engine_is_not_one_that_warms_up() -> None:
    engine = FakeEngine("hi")
    engine.warmth, engine.sick = WarmUpStatus(num_pieces=12), "its thread ended"
    red = send("GET", "/health", session=fake_session(engine))
    assert red.status_code == 503
    assert error_of(red)["code"] == "engine_dead"


@pytest.mark.parametrize("stream", [False, True])
def test_a_dead_engine_answers_503(stream: bool) -> None:
    engine = FakeEngine("hi")
    engine.sick = "its thread ended"
    response = send("POST", CHAT, session=fake_session(engine), json={**BODY, "stream": stream})
    assert response.status_code == 503
    assert error_of(response)["type"] == "server_error"


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_over_the_context_is_refused_before_the_stream_begins(stream: bool) -> None:
    session = fake_session(FakeEngine("hi", model=describe(max_model_len=5)))
    response = send("POST", CHAT, session=session, json={**BODY, "stream": stream})
    assert response.status_code == 400
    error = error_of(response)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert "maximum context length is 5 tokens" in error["message"]


def test_a_wrong_field_is_named_in_the_error() -> None:
    response = send("POST", CHAT, json={**BODY, "messages": [{"role": "user", "content": [{"type": "file"}]}]})
    assert response.status_code == 400
    error = error_of(response)
    assert error["type"] == "invalid_request_error"
    assert (error["param"], error["code"]) == ("messages[0].content[0]", "unsupported_parameter")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "not_found"),
        ("GET", "/nothing", 404, "not_found"),
        ("POST", "/", 405, "method_not_allowed"),
        ("POST", "/v1/chat/completions/", 404, "not_found"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("OPTIONS", CHAT, 405, "method_not_allowed"),
    ],
)
def test_every_path_answers_in_the_same_shape(method: str, path: str, status: int, code: str) -> None:
    response = send(method, path)
    assert response.status_code == status
    assert error_of(response)["code"] == code


@pytest.mark.parametrize(
    ("method", "path", "fields", "status", "kind"),
    [
        ("GET", "/v1/models/other", {}, 404, "not_found_error"),
        ("DELETE", "/v1/models", {}, 405, "invalid_request_error"),
        ("GET", "/v1/models", {"config": ServerConfig(api_key="k")}, 401, "authentication_error"),
    ],
)
def test_a_client_of_the_other_dialect_gets_errors_in_its_shape(
    method: str, path: str, fields: dict[str, Any], status: int, kind: str
) -> None:
    response = send(method, path, headers={"anthropic-version": "2023-06-01"}, **fields)
    assert response.status_code == status
    assert set(response.json()) == {"type", "error"}
    assert response.json()["type"] == "error"
    assert set(response.json()["error"]) == {"type", "message"}
    assert response.json()["error"]["type"] == kind


def test_query_strings_are_no_obstacle() -> None:
    assert send("POST", CHAT + "?beta=true", json=BODY).status_code == 200


def test_an_overloaded_engine_says_when_to_come_back() -> None:
    template = PlainTemplate(error=Overloaded("the queue is full", retry_after_s=2.2))
    response = send("POST", CHAT, session=fake_session(FakeEngine(), template), json=BODY)
    assert response.status_code == 429
    assert response.headers["retry-after"] == "3"


def test_a_request_whose_work_fails_is_a_500_and_in_a_stream_an_error_event_at_the_end() -> None:
    session = fake_session(FakeEngine("par", GenerationFailed("the row failed")))
    whole = send("POST", CHAT, session=session, json=BODY)
    assert whole.status_code == 500
    assert error_of(whole)["message"] == "the row failed"
    data = stream_data(send("POST", CHAT, session=session, json={**BODY, "stream": True}))
    assert json.loads(data[-1])["error"]["message"] == "the row failed"
    assert "[DONE]" not in data
    assert json.loads(data[1])["choices"][0]["delta"] == {"content": "par"}


def test_an_unforeseen_failure_is_logged_and_told_without_its_details(caplog: pytest.LogCaptureFixture) -> None:
    session = fake_session(FakeEngine("par", RuntimeError("a secret detail")))
    with caplog.at_level(logging.ERROR, "headrace.server"):
        whole = send("POST", CHAT, session=session, json=BODY)
        streamed = send("POST", CHAT, session=session, json={**BODY, "stream": True})
    assert whole.status_code == 500
    assert error_of(whole)["code"] == "generation_failed"
    assert whole.headers["x-request-id"] in caplog.text
    assert json.loads(stream_data(streamed)[-1])["error"]["type"] == "server_error"
    written = "".join(TextLines(TEXT_FORMAT).format(record) for record in caplog.records)
    assert written.count("RuntimeError") == 2
    assert "a secret detail" not in whole.text + streamed.text + written


def test_logs_hold_no_content(caplog: pytest.LogCaptureFixture) -> None:
    body = {**BODY, "messages": [{"role": "user", "content": "my password is swordfish"}]}
    with caplog.at_level(logging.DEBUG):
        send("POST", CHAT, session=fake_session(FakeEngine("swordfish it is")), json=body)
        send("POST", CHAT, json={**body, "temperature": "swordfish"})
    lines = [record.getMessage() for record in caplog.records if record.name == "headrace.server"]
    assert any(line.startswith("POST /v1/chat/completions 200 ") for line in lines)
    assert any(line.startswith("POST /v1/chat/completions 400 ") for line in lines)
    assert "swordfish" not in caplog.text


KEY = ServerConfig(api_key="schlüssel-1")


def test_without_the_key_nothing_but_health_and_the_page_is_answered() -> None:
    assert send("GET", "/health", config=KEY).status_code == 200
    assert send("GET", "/", config=KEY).status_code == 200
    for path in ("/v1/models", "/v1/nothing", "/nothing"):
        refused = send("GET", path, config=KEY)
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"] == "Bearer"
        assert error_of(refused)["code"] == "invalid_api_key"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"authorization": "Bearer schlüssel-1".encode()}, 200),
        ({"authorization": "bearer  schlüssel-1".encode()}, 200),
        ({"x-api-key": "schlüssel-1".encode()}, 200),
        ([("authorization", "Bearer schlüssel-1".encode()), ("x-api-key", "schlüssel-1".encode())], 200),
        ([("authorization", b"Bearer wrong"), ("x-api-key", "schlüssel-1".encode())], 401),
        ([("x-api-key", b"wrong"), ("authorization", "Bearer schlüssel-1".encode())], 401),
        ([("x-api-key", "schlüssel-1".encode()), ("x-api-key", b"wrong")], 401),
        ([("authorization", "Bearer schlüssel-1".encode()), ("authorization", b"Bearer wrong")], 401),
        ([("authorization", b"Basic dTpw"), ("x-api-key", "schlüssel-1".encode())], 401),
        ([("x-api-key", "schlüssel-1".encode())] * 3, 200),
        ({"authorization": "Basic schlüssel-1".encode()}, 401),
        ({"authorization": "schlüssel-1".encode()}, 401),
        ({"authorization": b"Bearer "}, 401),
        ({"authorization": "Bearer schlüssel-12".encode()}, 401),
        ({"x-api-key": b""}, 401),
    ],
)
def test_the_key_may_come_as_bearer_or_as_x_api_key_and_whatever_is_sent_is_right(headers: Any, status: int) -> None:
    assert send("GET", "/v1/models", config=KEY, headers=headers).status_code == status


def test_a_key_without_its_scheme_is_told_from_a_wrong_one() -> None:
    for given, said in (("secret", "must be `Bearer KEY`"), ("Bearer secret", "the API key is wrong")):
        refused = send("GET", "/v1/models", config=KEY, headers={"authorization": given})
        assert said in error_of(refused)["message"]


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/v1/messages", "/v1/messages"),
        ("/messages/count_tokens", "/v1/messages/count_tokens"),
        ("/models", "/v1/models"),
        ("/v1/tokenize", "/tokenize"),
        ("/v1/health", "/health"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/chat", None),
        ("/v1", None),
        ("/v1/", None),
        ("/nothing", None),
        ("/v2/chat/completions", None),
    ],
)
def test_a_path_with_its_prefix_missing_or_doubled_is_answered_with_the_one_that_exists(
    path: str, meant: str | None
) -> None:
    response = send("POST", path, json=BODY)
    assert response.status_code == 404
    message = response.json()["error"]["message"]
    assert (f" {meant} is probably meant" in message) if meant else ("meant" not in message)


def test_a_mistyped_path_is_answered_with_the_one_that_it_resembles() -> None:
    response = send("POST", "/v1/chat/completion", json=BODY)
    assert response.status_code == 404
    assert response.json()["error"]["message"].endswith("; did you mean /v1/chat/completions?")
    for path in ("/x", "/v1/models/unknown/x"):
        message = send("POST", path, json=BODY).json()["error"]["message"]
        assert "did you mean /?" not in message and "{" not in message


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_no_chat_completion_is_stored(method: str) -> None:
    response = send(method, f"{CHAT}/chatcmpl-1")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")
    assert "not stored" in response.json()["error"]["message"]
    assert send("GET", f"{CHAT}/chatcmpl-1/messages").json() == response.json()


def test_what_a_tokenizer_is_can_be_asked() -> None:
    told = send("GET", "/tokenizer_info").json()
    assert (told["bos_token"], told["eos_token"]) == ("<begin>", "<end>")
    assert told["chat_template"] == THINKING_TEMPLATE
    assert told["model_max_length"] == 1000


ORIGIN = ServerConfig(allowed_origin=("https://app.example/",))


def test_browser_pages_are_refused_unless_their_origin_is_allowed() -> None:
    for origin in ("https://evil.example", "null", "https://app.example.evil"):
        refused = send("POST", CHAT, config=ORIGIN, json=BODY, headers={"origin": origin})
        assert refused.status_code == 403
        assert error_of(refused)["code"] == "origin_refused"
        assert "access-control-allow-origin" not in refused.headers
    welcome = send("POST", CHAT, config=ORIGIN, json=BODY, headers={"origin": "https://app.example"})
    assert welcome.status_code == 200
    assert welcome.headers["access-control-allow-origin"] == "https://app.example"
    assert welcome.headers["vary"] == "Origin"


def test_errors_are_readable_to_an_allowed_page_too() -> None:
    response = send("POST", CHAT, config=ORIGIN, json={}, headers={"origin": "https://app.example"})
    assert response.status_code == 400
    assert response.headers["access-control-allow-origin"] == "https://app.example"


def test_a_preflight_is_answered_without_a_key_for_allowed_origins_only() -> None:
    config = ServerConfig(api_key="k", allowed_origin=("https://app.example",))
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, content-type"}
    welcome = send("OPTIONS", CHAT, config=config, headers={"origin": "https://app.example", **asked})
    assert welcome.status_code == 204
    assert welcome.headers["access-control-allow-headers"] == "authorization, content-type"
    assert "POST" in welcome.headers["access-control-allow-methods"]
    assert send("OPTIONS", CHAT, config=config, headers={"origin": "https://evil", **asked}).status_code == 403


@pytest.mark.parametrize(
    ("host", "is_own"),
    [
        *((host, True) for host in ("localhost", "LocalHost:8080", "localhost.:8080", "a.localhost", "127.0.0.1:8080")),
        *((host, True) for host in ("127.8.9.1", "[::1]", "[::1]:8080", "192.168.1.7:8080", "")),
        *((host, True) for host in ("host.docker.internal:8080", "host.containers.internal", "app.example:8080")),
        *((host, False) for host in ("evil.example", "evil.example:8080", "127.0.0.1.evil.example", "localhost.evil")),
        *((host, False) for host in ("evillocalhost", "app.example.evil", "127.0.0.1@evil.example", "[evil]", "a:b")),
        *((host, False) for host in ("evil.example#.localhost:1", "docker.internal", ".", ":8080", "[::1].evil")),
    ],
)
def test_a_server_without_a_key_answers_to_its_own_names_only(host: str, is_own: bool) -> None:
    for method, path in (("GET", "/v1/models"), ("POST", CHAT), ("GET", "/health"), ("DELETE", "/v1/cache")):
        engine = FakeEngine("hi", (END,))
        answer = send(method, path, session=fake_session(engine), config=ORIGIN, json=BODY, headers={"host": host})
        assert (answer.status_code == 403) is not is_own
        if not is_own:
            assert error_of(answer)["code"] == "host_refused"
            assert "evil" not in answer.text
            assert engine.requests == []


def test_with_a_key_or_for_pages_of_any_origin_the_name_does_not_matter() -> None:
    foreign = {"host": "tunnel.example"}
    key = {"authorization": "Bearer k"}
    assert send("GET", "/v1/models", config=ServerConfig(api_key="k"), headers={**foreign, **key}).status_code == 200
    assert send("GET", "/v1/models", config=ServerConfig(allowed_origin=("*",)), headers=foreign).status_code == 200


@pytest.mark.parametrize("origin", ["http://[::1", "app.example", "localhost:3000", "file://", ""])
def test_an_allowed_origin_that_is_none_is_a_configuration_error(origin: str) -> None:
    with pytest.raises(ConfigError, match="--allowed-origin"):
        app_over(fake_session(FakeEngine()), ServerConfig(allowed_origin=(origin,)))


def test_an_allowed_origin_without_a_host_lets_no_foreign_name_in() -> None:
    config = ServerConfig(allowed_origin=("null",))
    assert send("GET", "/v1/models", config=config, headers={"host": "localhost", "origin": "null"}).status_code == 200
    # The URL standard allows such a name, which is no name to our reading of the header.
    assert send("GET", "/v1/models", config=config, headers={"host": "a!b.example"}).status_code == 403


def test_a_star_allows_every_origin() -> None:
    config = ServerConfig(allowed_origin=("*",))
    response = send("GET", "/v1/models", config=config, headers={"origin": "http://anything"})
    assert response.headers["access-control-allow-origin"] == "http://anything"


def test_every_answer_has_an_id_and_a_clients_own_is_kept_if_it_is_harmless() -> None:
    first, second = (send("GET", path).headers["x-request-id"] for path in ("/health", "/nothing"))
    assert first != second
    assert send("GET", "/health", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    assert send("GET", "/health", headers={"x-request-id": "a b"}).headers["x-request-id"].startswith("req_")


def test_a_body_over_the_limit_is_refused_announced_or_not() -> None:
    config = ServerConfig(max_body_bytes=200)
    large = json.dumps({**BODY, "user": "x" * 500}).encode()

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(large), 50):
            yield large[start : start + 50]

    for content in (large, pieces()):
        refused = send("POST", CHAT, config=config, content=content)
        assert refused.status_code == 413
        assert error_of(refused)["code"] == "request_too_large"
    assert send("POST", CHAT, config=config, json=BODY).status_code == 200


def test_a_long_prompt_is_read_like_a_short_one() -> None:
    text = "x" * 300_000
    engine = FakeEngine("hi", model=describe(max_model_len=400_000))
    body = {**BODY, "messages": [{"role": "user", "content": text}]}
    assert send("POST", CHAT, session=fake_session(engine), json=body).status_code == 200
    assert len(engine.requests[0].prompt) == len(text) + len("user: \n")
