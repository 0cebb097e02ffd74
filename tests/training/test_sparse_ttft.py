"""The benchmark of sparse prefill: its figures from times, and a whole run of it at a tiny size."""

from __future__ import annotations

import sys

import pytest

from training import sparse_ttft
from training.sparse_ttft import Line, SelectedTokens, median_line, pays_from


def test_a_line_compares_within_rounds_and_its_bound_is_the_draft_alone_and_the_share_computed() -> None:
    rounds = [SelectedTokens(1.5, 1.0, 0.25), SelectedTokens(2.0, 1.0, 0.25), SelectedTokens(6.0, 2.0, 0.25)]
    line = median_line(512, 0.2, 0.4, [2.0, 4.0, 8.0], rounds)
    assert (line.whole_s, line.thinned_s, line.computed) == (4.0, 2.0, 0.25)
    assert line.ratio == 0.75  # of 0.75, 0.5 and 0.75
    assert line.draft == 0.25  # of 0.25, 0.25 and 0.5
    assert line.bound == pytest.approx(0.1 + 0.25)


@pytest.mark.parametrize(
    ("ratios", "expected"), [((1.2, 0.9, 0.7), 2048), ((0.9, 1.0, 0.7), 4096), ((0.5, 0.5, 1.1), None)]
)
def test_thinning_pays_from_where_it_stays_faster(ratios: tuple[float, ...], expected: int | None) -> None:
    lines = [Line(1024 << place, 0.2, 1.0, ratio, 0.1, 0.1, 0.2, ratio) for place, ratio in enumerate(ratios)]
    assert pays_from(lines) == expected


@pytest.mark.slow
def test_a_tiny_run_measures_every_share_of_every_length(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = "sparse_ttft --models tiny --lengths 128 192 --keep 0.2 0.5 --repeats 1"
    monkeypatch.setattr(sys, "argv", command.split())
    sparse_ttft.main()
    table = capsys.readouterr().out.rpartition(sparse_ttft.HEADINGS)[2].splitlines()
    measured = [line.split() for line in table if line[:6].strip().isdigit()]
    assert [(row[0], row[1]) for row in measured] == [("128", "0.2"), ("128", "0.5"), ("192", "0.2"), ("192", "0.5")]
    # whole chunks of 32 beside the last one: of 96 tokens none fit into 0.2, one into 0.5; of 160 one and two
    assert [float(row[6]) for row in measured] == [0.25, 0.5, 0.333, 0.5]
