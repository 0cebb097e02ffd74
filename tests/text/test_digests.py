"""Digests tell apart whatever decides what is cached between turns."""

from __future__ import annotations

from headrace.text.boundaries import digest_of_variables


def test_variables_are_told_apart_whatever_their_order() -> None:
    assert digest_of_variables({"a": 1, "b": [2]}) == digest_of_variables({"b": [2], "a": 1})
    assert digest_of_variables({"a": 1}) != digest_of_variables({"a": True}) != digest_of_variables({"a": "1"})
