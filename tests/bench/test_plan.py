"""An invalid measurement plan is refused before it begins."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headrace.bench.plan import Plan, Target, check, parse_peer, parse_url
from headrace.errors import ConfigError

PLAN = Plan((Target("a", "http://a"), Target("b", "http://b")))


def test_the_defaults_pass() -> None:
    check(PLAN)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"workloads": ("short-chat", "chess")}, "--workload .* not 'chess'"),
        ({"streams": (4, 0)}, "--streams must be at least 1, not 0"),
        ({"num_conversations": 0}, "--requests"),
        ({"num_repeats": 0}, "--repeats"),
        ({"max_tokens": 0}, "--max-tokens"),
        ({"num_prompt_tokens": 3}, "--prompt-tokens must be at least 16"),
        ({"num_turns": 0}, "--turns must be at least 1"),
        ({"timeout_s": 0.0}, "--timeout"),
        ({"timeout_s": float("nan")}, "--timeout"),
        ({"workloads": ("mixed",), "streams": (1,)}, "--streams must hold 2 or more"),
        ({"targets": (Target("a", "http://a"), Target("a", "http://b"))}, "a different label"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check(replace(PLAN, **change))


@pytest.mark.parametrize("said", ["http://h:80", "http://h:80/", "http://h:80/v1", " http://h:80/v1/ "])
def test_a_url_is_taken_with_and_without_v1(said: str) -> None:
    assert parse_url(said, "URL") == "http://h:80"


@pytest.mark.parametrize("said", ["h:80", "ftp://h", "http://", "http://h:eighty", "", "http://[::1"])
def test_what_is_no_url_is_refused_by_name(said: str) -> None:
    with pytest.raises(ConfigError, match="--peer must be like http"):
        parse_url(said, "--peer")


def test_a_peer_has_a_label_a_url_and_perhaps_a_model() -> None:
    assert parse_peer("x=http://h:1/v1") == Target("x", "http://h:1")
    assert parse_peer("x=http://h:1,org/name=2") == Target("x", "http://h:1", "org/name=2")


@pytest.mark.parametrize("said", ["http://h:1", "=http://h:1", "x"])
def test_a_peer_without_a_label_is_refused(said: str) -> None:
    with pytest.raises(ConfigError, match="--peer"):
        parse_peer(said)
