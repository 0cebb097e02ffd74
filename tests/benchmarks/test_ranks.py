"""`python -m benchmarks.ranks` and `benchmarks.collectives` on two processes of this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import collectives, ranks
from benchmarks.ranks import Found, likeliest_line, table


@pytest.mark.slow
def test_a_shape_is_measured_on_one_device_and_on_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    words = ["--shape", "tiny-qwen3", "--random", "--dtype", "float32", "--prefill", "12", "--decode", "2@8"]
    words += ["--repeats", "1", "--steps", "1", "--ranks", "2", "--backend", "ring", "--json", str(file)]
    assert ranks.main(words) == 0
    shown = capsys.readouterr().out
    assert "tiny-qwen3 over 2 ranks by ring" in shown
    assert "likeliest tokens: the same 64 of 64 times" in shown
    report = json.loads(file.read_text("utf-8"))
    assert set(report["one"]["figures"]) == {"prefill 12", "decode 2@8"}
    assert [set(each["without_sums"]) for each in report["ranks"]] == [{"prefill 12", "decode 2@8"}] * 2
    # the embeddings and norms are whole on both
    assert 0.5 < report["ranks"][1]["said"]["weights_bytes"] / report["one"]["said"]["weights_bytes"] < 0.9


@pytest.mark.slow
def test_sums_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = [5_120, 40_960]
    words = ["--ranks", "2", "--backend", "ring", "--repeats", "1", "--bytes", *map(str, sizes)]
    assert collectives.main(words) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "2 ranks by ring"
    assert [line.split()[0] for line in shown[2:]] == [str(size) for size in sizes]


def test_sizes_that_are_no_rows_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert collectives.main(["--ranks", "2", "--bytes", "5121"]) == 2
    assert "--bytes must be multiples of 5120" in capsys.readouterr().err


def test_what_fails_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert ranks.main(["--shape", "tiny-qwen3", "--random", "--ranks", "1"]) == 2
    assert "--ranks must be at least 2" in capsys.readouterr().err
    words = ["--shape", "tiny-qwen3", "--random", "--layers", "1", "--ranks", "2", "--limit-s", "0.1", "--split-only"]
    assert ranks.main(words) == 2
    assert "2 ranks have not ended after 0.1 s" in capsys.readouterr().err


def test_the_table_compares_medians_and_ties_are_named() -> None:
    one, split = Found(), Found()
    figure = {"measure": "decode 1@8", "num_tokens": 1, "num_launches": 7, "host_s": 0.001, "without_sums": False}
    one.take({**figure, "times_s": [0.004, 0.008, 0.006]})
    split.take({**figure, "times_s": [0.003], "num_launches": 9})
    split.take({**figure, "times_s": [0.002], "without_sums": True})
    cells = [cell.strip() for cell in table(one, split).splitlines()[1].split("  ") if cell.strip()]
    assert cells == [
        *("decode 1@8", "6.00 (4.00 to 8.00)", "3.00 (3.00 to 3.00)", "2.00", "2.00 (2.00 to 2.00)", "7 / 9", "1 / 1"),
    ]
    one.take({"likeliest": [[5, 2.0, 1.0], [7, 3.0, 0.25]]})
    split.take({"likeliest": [[5, 2.5, 1.0], [8, 3.0, 0.5]]})
    told = likeliest_line(one, split)
    assert told.startswith("likeliest tokens: the same 1 of 2 times, where the next is at most 0.25 below; ")
    assert told.endswith("their logits differ by up to 0.5")
