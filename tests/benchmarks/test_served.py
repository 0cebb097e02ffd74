"""Loads on a server that the benchmark starts."""

from __future__ import annotations

import re

import pytest

from benchmarks.served import run, spread
from headrace.errors import HeadraceError


def test_a_burst_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    run(["miniature", "--parts", "bursts", "--at-once", "2", "--repeats", "1", "--max-num-seqs", "2"])
    rows = dict(re.findall(r"^\| (.*) \| (.*) \|$", capsys.readouterr().out, re.MULTILINE))
    assert rows["load"] == "--max-num-seqs 2"
    assert float(rows["2 at once, 20 words, 256 tokens: tokens/s"]) > 0
    assert float(rows["its first text, median of each burst: ms"]) > 0
    assert rows["compiled variants built since ready"] == "0"


@pytest.mark.slow
def test_why_a_server_does_not_start_is_told() -> None:
    with pytest.raises(HeadraceError, match="no/such/folder"):
        run(["/no/such/folder", "--parts", "bursts"])


def test_figures_have_their_median_and_their_range() -> None:
    assert spread([0.003, 0.001, 0.1], ".0f", 1e3) == "3 (1 to 100)"
    assert spread([1234.5]) == "1,234"
