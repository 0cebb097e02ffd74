"""Answers that are made of all replicas'."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.responses import Response

from headrace.replicas.peers import PeerAnswer, combine_answers, combined


def answer(method: str, path: str, *answers: tuple[int, Any]) -> Response:
    asked = combined(method, path)
    assert asked is not None
    bodies = [body if isinstance(body, str) else json.dumps(body) for _, body in answers]
    peers = [
        PeerAnswer(f"replica{number}", status, body.encode())
        for number, ((status, _), body) in enumerate(zip(answers, bodies, strict=True))
    ]
    return combine_answers(peers, asked[1])


def body_of(response: Response) -> Any:
    return json.loads(bytes(response.body))


def test_other_requests_are_answered_by_one_replica() -> None:
    for method, path in [("POST", "/v1/chat/completions"), ("GET", "/v1/cache"), ("GET", "/v1/requests/1/cancel")]:
        assert combined(method, path) is None


METRICS = """\
# HELP vllm:num_requests_running Running requests.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{model_name="m",engine="0"}} {0}
# HELP vllm:prompt_tokens_total Prompt tokens.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{{model_name="m",engine="0"}} {1}
"""


def test_metrics_have_one_family_of_each_name_with_a_sample_of_each_replica() -> None:
    text = bytes(answer("GET", "/metrics", (200, METRICS.format(1, 20)), (200, METRICS.format(3, 40))).body).decode()
    assert (
        text
        == """\
# HELP vllm:num_requests_running Running requests.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="m",engine="replica0"} 1
vllm:num_requests_running{model_name="m",engine="replica1"} 3
# HELP vllm:prompt_tokens_total Prompt tokens.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{model_name="m",engine="replica0"} 20
vllm:prompt_tokens_total{model_name="m",engine="replica1"} 40
"""
    )


def test_clearing_the_cache_frees_that_of_all() -> None:
    cleared = answer("DELETE", "/v1/cache", *((200, {"object": "cache.cleared", "freed_bytes": n}) for n in (5, 7)))
    assert body_of(cleared) == {"object": "cache.cleared", "freed_bytes": 12}


def test_a_request_is_ended_by_the_replica_that_has_it() -> None:
    unknown = (404, {"error": {"code": "not_found"}})
    done = {"id": "a", "object": "request.cancelled", "cancelled": ["chatcmpl-1"]}
    assert body_of(answer("POST", "/v1/requests/a/cancel", unknown, (200, done))) == done
    nowhere = answer("POST", "/v1/requests/a/cancel", unknown, unknown)
    assert (nowhere.status_code, body_of(nowhere)) == unknown


def test_replicas_are_listed_with_their_status() -> None:
    asked = combined("GET", "/v1/replicas")
    assert asked is not None
    assert asked[0] == "/v1/status"
    listed = body_of(answer("GET", "/v1/replicas", (200, {"queue": 0}), (200, {"queue": 1})))
    assert [(each["id"], each["status"]["queue"]) for each in listed["data"]] == [("replica0", 0), ("replica1", 1)]


def test_a_wrong_key_is_refused_as_each_replica_refuses_it() -> None:
    refused = answer("GET", "/metrics", (401, {"error": 1}), (401, {"error": 1}))
    assert refused.status_code == 401


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/metrics"), ("DELETE", "/v1/cache"), ("GET", "/v1/replicas"), ("POST", "/v1/requests/a/cancel")],
)
def test_without_an_answer_in_time_the_client_may_ask_again(method: str, path: str) -> None:
    none = answer(method, path)
    assert none.status_code == 503
    assert "no replica has answered" in body_of(none)["error"]["message"]
