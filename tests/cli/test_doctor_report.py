"""`headrace doctor --report`: the file that a Mac's user attaches to an issue, made here on a CPU."""

from __future__ import annotations

import getpass
import json
import os
import platform
from pathlib import Path
from typing import Any

import pytest
from models import tiny

from headrace.backend.kernel_times import kernel_times
from headrace.cli import doctor_report
from headrace.cli.main import main
from headrace.config import Config, EngineConfig, ModelConfig
from headrace.engine import measurement
from headrace.engine.measurement import rates


def numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [number for each in value.values() for number in numbers(each)]
    return [value] if isinstance(value, int | float) else []


def test_rates_count_from_the_last_row_that_begins() -> None:
    # Two prompts of 50 tokens: both have begun after 2 s. Then 6 tokens come in 3 s.
    events = [(11.0, 0, 1), (11.5, 0, 1), (12.0, 1, 1), (13.0, 0, 2), (14.0, 1, 2), (15.0, 0, 2)]
    assert rates(10.0, events, 100) == {"prompt_tokens_per_s": 50.0, "tokens_per_s": 2.0}


@pytest.mark.parametrize("name", ["qwen3_5"])
def test_a_report_has_times_of_both_and_no_names(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor_report, "kernel_times", lambda: {"launch_us": 1.0})
    monkeypatch.setattr(doctor_report, "_ANSWER_TOKENS", 6)
    monkeypatch.setattr("headrace.cli.doctor.machine_report", lambda numerics: [])
    folder, file = tiny.save(name, tmp_path / "its own folder"), tmp_path / "report.json"
    monkeypatch.setattr("headrace.cli.doctor._report_model", lambda *_: None)  # these weights have no tokenizer
    assert main(["doctor", str(folder), "--report", str(file)]) == 0, capsys.readouterr().err
    text = file.read_text()
    report = json.loads(text)
    for program in ("mlx_lm", "headrace"):
        assert set(report[program]["rates"]) == {"1", "8"}
        assert all(number > 0 for number in numbers(report[program]["rates"]))
    operations = report["mlx_lm"]["operations_of_a_step"]
    assert operations["headrace, 1 row"] <= operations["headrace, 8 rows"]
    assert (
        report["model"]["num_hidden_layers"]
        == tiny.FAMILIES[name].get("text_config", tiny.FAMILIES[name])["num_hidden_layers"]
    )
    assert report["device"]["num_cores"] >= 1
    assert report["versions"]["mlx"]
    for secret in (platform.node(), str(tmp_path), "its own folder", os.path.expanduser("~/")):
        assert secret not in text
    assert f'"{getpass.getuser()}"' not in text


@pytest.mark.slow
def test_a_slow_machine_is_measured_for_a_while_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in (doctor_report, measurement):
        monkeypatch.setattr(module, "LONGEST_S", 0.0)
    monkeypatch.setattr(doctor_report, "kernel_times", dict)
    file = tmp_path / "report.json"
    folder = tiny.save("qwen3", tmp_path / "model")
    doctor_report.write_report(Config(str(folder), ModelConfig(self_check=False), EngineConfig(mtp="off")), file)
    report = json.loads(file.read_text())
    # one token of each row, or of those that began in time
    assert report["headrace"]["rates"]["1"]["tokens_per_s"] == report["mlx_lm"]["rates"]["1"]["tokens_per_s"] == 0


def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("headrace.cli.doctor.machine_report", lambda numerics: [])
    assert main(["doctor", "--report", str(tmp_path / "none" / "report.json")]) == 2
    assert "can't be written: No such file or directory" in capsys.readouterr().err


@pytest.mark.slow
def test_kernels_are_timed_in_their_units() -> None:
    times = kernel_times()
    assert {"launch_us", "copy_gb_per_s"} < set(times)
    assert all(value > 0 for value in times.values())
