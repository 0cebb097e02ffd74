"""/v1/responses takes anything: whatever a field holds, the request is answered or refused by the field's name."""

from __future__ import annotations

import json
from typing import Any

import httpx
from attack.in_process import Wire
from attack.inputs import RESPONSES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.api.responses_body import ResponsesBody

FIELDS = sorted({*ResponsesBody.model_fields, *ResponsesBody.neutral_values, *ResponsesBody.without_effect})
SCALARS = st.none() | st.booleans() | st.integers(-3, 300) | st.floats(-5, 5) | st.text(max_size=6)
KEYS = st.sampled_from(
    ["type", "name", "format", "schema", "effort", "tools", "id", "role", "content", "mode", "input"]
)
WORDS = st.sampled_from(["function", "custom", "namespace", "allowed_tools", "json_schema", "message", "auto", "user"])
VALUES = st.recursive(
    SCALARS | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=8,
)
BODIES = st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=6), VALUES, max_size=4)
SLOW = [HealthCheck.too_slow]


WIRE = Wire()


def check(response: httpx.Response, body: dict[str, Any]) -> None:
    if response.status_code == 200:
        told = response.json() if body.get("stream") is not True else json.loads(response.text.split("data: ")[-1])
        answer = told.get("response", told)
        assert answer["status"] in ("completed", "incomplete")
        assert answer["usage"]["total_tokens"] > 0
        return
    assert response.status_code in (400, 404), response.text
    error = response.json()["error"]
    name = error["param"].split(".")[0].split("[")[0]
    assert name in body or name == "input"


@given(BODIES)
@settings(max_examples=80, suppress_health_check=SLOW)
def test_any_body_is_answered_or_refused_by_a_field_of_it(body: dict[str, Any]) -> None:
    check(WIRE.post(json.dumps(body).encode(), RESPONSES), body)


@given(st.sampled_from(FIELDS), VALUES)
@settings(max_examples=100, suppress_health_check=SLOW)
def test_one_odd_field_in_a_good_body_is_served_or_refused_by_its_name(name: str, value: Any) -> None:
    body = {"input": "hello", name: value}
    response = WIRE.post(json.dumps(body).encode(), RESPONSES)
    check(response, body)
    if response.status_code != 200:
        assert response.json()["error"]["param"].startswith(name)
