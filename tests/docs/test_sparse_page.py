"""The page about sparse prefill lists every reason and every flag there is."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from headrace.config import EngineConfig
from headrace.engine.sparse.draft import LOOKAHEAD
from headrace.engine.sparse.prefill import NUM_REMEMBERED
from headrace.engine.sparse.select import CHUNK
from headrace.session.sparse import LONG_TURN, TURN_EDGE
from headrace.types.request import Bypass

PAGE = (Path(__file__).parent.parent.parent / "docs" / "sparse-prefill.md").read_text()


def test_every_reason_is_explained() -> None:
    table = PAGE.partition("## When it does not apply")[2].partition("\n## ")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == sorted(reason.value for reason in Bypass)


def test_every_flag_is_listed_with_its_default() -> None:
    listed = dict(re.findall(r"^\| `--(sparse-\w+) \w+` \| (.*) \|$", PAGE, re.MULTILINE))
    known = {each.name.replace("_", "-"): each.default for each in fields(EngineConfig) if "sparse" in each.name}
    assert listed.keys() == known.keys()
    for name, default in known.items():
        assert default is None or listed[name].endswith(f"default {default}")


def test_the_numbers_are_those_of_the_code() -> None:
    assert f"greedily for {LOOKAHEAD} tokens" in PAGE
    assert f"chunks of {CHUNK}" in PAGE
    assert f"more than {LONG_TURN:,} tokens only its first and last {TURN_EDGE}" in PAGE
    assert f"the last {CHUNK} tokens" in PAGE
    assert f"the latest {NUM_REMEMBERED} prompts" in PAGE
