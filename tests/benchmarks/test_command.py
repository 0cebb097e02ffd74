"""`python -m benchmarks.model` from the command line to the table and the report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.figures import Figure, line, table
from benchmarks.host import HostWork
from benchmarks.model import main

QUICK = ["--shape", "tiny-qwen3", "--random", "--dtype", "float32", "--repeats", "1", "--steps", "1"]


def test_a_shape_is_measured_and_everything_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / "report.json"
    words = [*QUICK, "--layers", "1", "--prefill", "12", "--decode", "2@8", "--json", str(file)]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "prefill 12, headrace: " in shown
    assert "decode 2@8, mlx-lm: " in shown
    assert shown.index("decode 2@8, mlx-lm: ") < shown.index("measure ")
    report = json.loads(file.read_text("utf-8"))
    assert report["command"] == ["python", "-m", "benchmarks.model", *words]
    assert report["copy_bytes_per_s"] > 0
    found = [(each["side"], each["measure"]) for each in report["figures"]]
    assert found == [(side, name) for side in ("headrace", "mlx-lm") for name in ("prefill 12", "decode 2@8")]
    decode = report["figures"][1]
    assert decode["tokens_per_s"] == pytest.approx(2 / decode["times_s"][0])
    assert set(decode["host"]) == {"seconds", "num_calls", "num_objects"}
    share = decode["num_bytes"] / decode["times_s"][0] / report["copy_bytes_per_s"]
    assert decode["share_of_copy"] == pytest.approx(share)


def test_one_side_alone_and_one_kind_of_measure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "--prefill", "none", "--decode", "1@8", "--peer-only"]) == 0
    shown = capsys.readouterr().out
    assert "headrace" not in shown
    assert "prefill" not in shown
    assert main([*QUICK, "--prefill", "8", "--decode", "none", "--ours-only"]) == 0
    shown = capsys.readouterr().out
    assert "headrace" in shown
    assert "decode" not in shown


def test_the_table_compares_tokens_and_bytes() -> None:
    ours = Figure("headrace", "decode 2@8", (0.001, 0.002, 0.004), 2, num_bytes=10**9)
    theirs = Figure("mlx-lm", "decode 2@8", (0.005,), 2, num_bytes=10**9, note="BatchGenerator")
    rows = [each.split("  ") for each in table([ours, theirs], 2e12).splitlines()]
    cells = [[cell.strip() for cell in each if cell.strip()] for each in rows]
    assert cells[1] == ["decode 2@8", "headrace", "2.00 (1.00 to 4.00)", "1", "25%", "0"]
    assert cells[2] == ["decode 2@8", "mlx-lm", "5.00 (5.00 to 5.00)", "2.50", "1", "10%", "0", "BatchGenerator"]


def test_the_hosts_work_is_told_in_milliseconds_calls_and_objects() -> None:
    figure = Figure("headrace", "decode 2@8", (0.003,), 2, host=HostWork(0.00125, 900, 321))
    told = "decode 2@8, headrace: 3.00 (3.00 to 3.00) ms, host ms 1.25, calls 900, objects 321, peak GB 0"
    assert line(figure, 1e12) == told


def test_a_prefill_is_told_by_its_rate() -> None:
    figure = Figure("mlx-lm", "prefill 8192", (0.5, 0.25), 500)
    assert line(figure, 1e12) == "prefill 8192, mlx-lm: 1500 (1000 to 2000) tokens/s, peak GB 0"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--shape"),
        (["--shape", "tiny-qwen3"], "--random"),
        (["--shape", "llama", "--random"], "--shape llama"),
        ([*QUICK, "--layers", "0"], "--layers"),
        ([*QUICK, "--prefill", "0"], "--prefill"),
        ([*QUICK, "--decode", "8"], "--decode"),
        ([*QUICK, "--steps", "0"], "--steps"),
        ([*QUICK, "--quantize", "7"], "--quantize"),
        ([*QUICK, "--ours-only", "--peer-only"], "--peer-only"),
        ([*QUICK, "--json", "/dev/null/x.json"], "--json"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_measured(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert said in shown.err
    assert shown.err.count("\n") == 1
