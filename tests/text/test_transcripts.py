"""Outputs of every family come to the same thinking, answer and calls, however they are split."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from typing import Any

import pytest
from text.transcripts import FAMILIES, Got, difference, family_of, load, parse, tools_of

from headrace.families.registry import find_family
from headrace.tool_calls.syntaxes import SYNTAXES

SCHEMAS, CASES = load()

# Splits of a long text that are tried: all at both ends, and some in between.
NUM_AT_ENDS, STEP = 120, 61


def result(case: dict[str, Any], pieces: Iterable[str]) -> Got:
    return parse(
        pieces,
        family_of(case),
        tools_of(case, SCHEMAS),
        thinking_open=case.get("thinking_open", False),
        is_cut=case["finish"] == "length",
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_every_transcript_comes_to_what_it_means_whole_and_in_pieces(case: dict[str, Any]) -> None:
    raw = case["raw"]
    whole = result(case, [raw])
    assert not difference(whole, case["expect"])
    assert whole.is_broken == case["expect"].get("broken", False)
    assert result(case, raw).told == whole.told, "a character at a time"
    assert result(case, re.findall(r"\w+|\s+|[^\w\s]+", raw)).told == whole.told, "in pieces like tokens"
    cuts = sorted(random.Random(case["id"]).choices(range(len(raw)), k=6))
    pieces = [raw[start:end] for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    assert result(case, pieces).told == whole.told, f"cut at {cuts}"


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_every_split_in_two_comes_to_the_same(case: dict[str, Any]) -> None:
    raw = case["raw"]
    whole = result(case, [raw]).told
    places = {*range(NUM_AT_ENDS), *range(0, len(raw), STEP), *range(len(raw) - NUM_AT_ENDS, len(raw))}
    for place in sorted(place for place in places if 0 < place < len(raw)):
        assert result(case, [raw[:place], raw[place:]]).told == whole, f"split at {place}"


def test_every_syntax_has_transcripts() -> None:
    assert {case["format"] for case in CASES} == set(SYNTAXES)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_the_syntax_of_every_family_is_found_by_its_type_and_template(name: str) -> None:
    formats = {case["format"] for case in CASES if case["family"] == name}
    if name == "llama3.2":
        formats = {"llama_json"}  # it writes lists too where the system prompt asks for them
    assert {find_family(*FAMILIES[name]).tool_format} == formats
