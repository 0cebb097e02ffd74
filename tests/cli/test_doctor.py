"""`headrace doctor`: what it concludes, and the command as a user runs it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_hub import fake_hub

from headrace.backend.device import Device, available_memory_bytes
from headrace.cli import doctor
from headrace.cli import fit as fit_module
from headrace.cli.doctor import Resources, resources
from headrace.cli.fit import fit
from headrace.cli.main import main
from headrace.engine.memory import CONTEXT_STEP
from headrace.errors import ModelError
from headrace.models.built_in import MINIATURE
from headrace.models.preview import Preview, estimate, estimate_split, preview_folder
from headrace.models.source import ModelFiles, read_files

GB = 1_000_000_000
GPU = Device("cuda", "Some GPU", 24 * GB, 8)
CPU = Device("cpu", "Some CPU", 24 * GB, 8)

LLAMA_8B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "rms_norm_eps": 1e-5,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}


def preview(num_bytes: int, missing_bytes: int = 0) -> Preview:
    return Preview(ModelFiles("m", Path("m"), LLAMA_8B, LLAMA_8B, {}), num_bytes, missing_bytes)


def test_a_model_that_fits_has_a_context_and_room_for_requests() -> None:
    # 12 GB may be used, 5 are weights. A token takes 128 KiB; slots are powers of two: 32,768 tokens take 4.29 GB.
    assert list(fit(preview(5 * GB), GPU, 0.5, "auto").lines()) == [
        "fits: 5.00 GB of weights, 12.00 GB of memory may be used",
        "context: 32768 tokens, the model's is 131072; up to 1 such requests at a time, at least 4.29 GB each",
    ]


def test_keys_and_values_of_few_bits_leave_room_for_more_tokens() -> None:
    # in 4 bits a token of this model takes 32 x 2 x 8 x (64 + 2 x 4) bytes, and 2 x 8 x 128 x 2 while a layer is read
    per_token = 32 * 2 * 8 * (64 + 8) + 2 * 8 * 128 * 2
    found = fit(preview(5 * GB), GPU, 0.5, "auto", kv_bits=4)
    assert found.state_bytes is not None
    assert found.state_bytes(131072) == 131072 * per_token
    assert list(found.lines())[1].startswith("context: 131072 tokens, the model's full context; up to 1 such requests")
    assert 131072 * per_token < 7 * GB < 131072 * 32 * 2 * 8 * 128 * 2


def test_the_context_is_the_one_that_the_engine_chooses(tmp_path: Path) -> None:
    """Of the miniature, whose own context a large memory holds and a small one does not."""
    files = read_files("miniature", MINIATURE)
    for memory_bytes in (24 * GB, 30_000_000):
        line = list(fit(preview_folder(files), Device("cpu", "c", memory_bytes, 8), 0.9, "stored").lines())[1]
        cost = estimate(files.config, 4)
        assert cost is not None
        context = int(line.split()[1])
        left = int(0.9 * memory_bytes) - (MINIATURE / "model.safetensors").stat().st_size
        assert cost.cost.num_bytes(context) <= left
        assert context == 16384 or cost.cost.num_bytes(context + CONTEXT_STEP) > left


def test_weights_that_a_cpu_widens_count_as_wide() -> None:
    large = Device("cpu", "Some CPU", 64 * GB, 8)
    assert next(fit(preview(5 * GB), large, 0.9, "auto").lines()).startswith(
        "fits: 5.00 GB of weights (32.12 GB in float32), 57.60 GB of memory"
    )


def test_what_each_rank_would_hold_of_a_split_model_is_foreseen_without_weights() -> None:
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336  # attention, with 8 of 32 heads for keys, and MLP
    whole = 2 * 128256 * 4096 + (2 * 32 + 1) * 4096  # embeddings, output and norms
    for num_ranks in (2, 4):
        split = estimate_split(preview(0).files, num_ranks)
        assert split.share == pytest.approx((whole + 32 * layer / num_ranks) / (whole + 32 * layer))
        assert [each.width for each in split.collectives] == [4096] * 64
    with pytest.raises(ModelError, match=r"m can't be split over 3 ranks: Attention has 32 heads"):
        estimate_split(preview(0).files, 3)


@pytest.mark.slow
def test_ranks_are_compared_and_their_link_is_measured() -> None:
    words = [sys.executable, "-m", "headrace", "doctor", "miniature", "--ranks", "2"]  # MLX connects a process once
    out = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert "ranks: 2 over ring" in out
    assert len(re.findall(r"^rank [01]: \S+, .* available; headrace .*, mlx-lm ", out, re.MULTILINE)) == 2
    assert re.search(r"^link: \d+ µs for a sum of 8 KiB, [\d.]+ GB/s in one of 16 MiB$", out, re.MULTILINE)
    assert re.search(r"^split: each rank holds .* \(\d+%\)$", out, re.MULTILINE)
    assert "collectives: 16 for a token" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["miniature", "--ranks", "5"], "headrace-miniature can't be split over 5 ranks: GatedDeltaNet has 2 heads"),
        (["--ranks", "nowhere.json"], "nowhere.json is no number, and no file can be read there"),
        (["--ranks-backend", "ring"], "--ranks-backend has no effect without --ranks"),
    ],
)
def test_a_layout_that_can_not_be_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *words]) == 2
    assert message in capsys.readouterr().err


def test_what_is_still_to_be_fetched_must_fit_on_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit_module.shutil, "disk_usage", lambda folder: SimpleNamespace(free=7 * GB))
    enough, little = (fit(preview(5 * GB, missing), GPU, 0.5, "auto") for missing in (5 * GB, 8 * GB))
    assert enough.fits
    assert "to fetch: 5.00 GB; 7.00 GB of disk are free" in list(enough.lines())[-1]
    assert not little.fits
    assert "does not fit on the disk" in list(little.lines())[-1]


def test_a_model_that_does_not_fit_ends_the_command_before_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("nothing may be loaded here")

    (tmp_path / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 1}')
    with (tmp_path / "model-1.safetensors").open("wb") as file:
        file.truncate(30 * GB)
    (tmp_path / "mtp.safetensors").write_bytes(b"not counted")
    monkeypatch.setattr("headrace.cli.doctor.current", lambda: CPU)
    monkeypatch.setattr("headrace.cli.doctor.machine_report", lambda numerics: [])
    monkeypatch.setattr("headrace.cli.doctor.Engine.launch", refuse)
    assert main(["doctor", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "does not fit: 30.00 GB of weights, 21.60 GB of memory may be used" in shown
    assert "all well" not in shown


def test_a_gguf_file_and_a_folder_of_them_are_told_what_to_do_instead(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for name in (tmp_path, tmp_path / "model.gguf"):
        assert main(["mtp", "check", str(name)]) == 2
        shown = capsys.readouterr().err
        assert "GGUF" in shown
        assert "mlx-community" in shown


def test_what_a_machine_lacks_becomes_advice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "compiler", lambda: "/usr/bin/g++")
    monkeypatch.setattr(doctor, "vision_advice", lambda: None)
    assert list(Resources(CPU, 9 * GB, 80 * GB, tmp_path).advice()) == []
    assert list(Resources(CPU, None, 80 * GB, tmp_path).advice()) == []
    monkeypatch.setattr(doctor, "compiler", lambda: None)
    monkeypatch.setattr(doctor, "vision_advice", lambda: "`pip install x`")
    advice = list(Resources(CPU, 1 * GB, 2 * GB, tmp_path).advice())
    assert [line.split()[0] for line in advice] == ["install", "`pip", "end", "free"]
    # A GPU needs no compiler.
    assert len(list(Resources(GPU, 9 * GB, 80 * GB, tmp_path).advice())) == 1


def test_resources_are_read_where_the_cache_will_be(tmp_path: Path) -> None:
    found = resources(CPU, tmp_path / "not" / "yet")
    assert found.free_disk_bytes > 0
    assert not (tmp_path / "not").exists()


def test_free_memory_is_what_the_kernel_says(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 99 kB\nMemFree: 1 kB\nMemAvailable:    2048 kB\n")
    assert available_memory_bytes(tmp_path / "meminfo") == 2 * 2**20
    assert available_memory_bytes(tmp_path / "none") is None


def test_a_busy_machine_is_told_how_to_share_its_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "compiler", lambda: "/usr/bin/g++")
    monkeypatch.setattr(doctor, "vision_advice", lambda: None)
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    one_core = Device("cpu", "Some CPU", 24 * GB, 1)
    advice = {
        (device.num_cores, load): list(Resources(device, 9 * GB, 80 * GB, tmp_path, load).advice())
        for device, load in ((CPU, 30.0), (CPU, 8.0), (one_core, 30.0))
    }
    assert "the load is 30 on 8 cores" in advice[8, 30.0][0]
    # One core has one thread anyway.
    assert advice[8, 8.0] == advice[1, 30.0] == []
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    assert not list(Resources(CPU, 9 * GB, 80 * GB, tmp_path, 30.0).advice())


CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 32,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}


def run_doctor(name: str, home: Path, endpoint: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home)}
    command = [sys.executable, "-m", "headrace", "doctor", name, "--dtype", "stored"]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)


def test_a_model_of_the_hub_is_judged_without_its_weights_and_named_without_a_network(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(50_000_000)
    with fake_hub({"owner/name": folder}) as hub:
        done = run_doctor("owner/name", tmp_path / "home", hub.url)
        assert done.returncode == 0, done.stderr
        assert "fits: 0.05 GB of weights, " in done.stdout
        assert "context: 4096 tokens, the model's full context" in done.stdout
        assert "to fetch: 0.05 GB; " in done.stdout
        assert "`headrace serve owner/name` fetches the weights" in done.stdout
        assert hub.downloaded == {"config.json"}
        endpoint = hub.url
    done = run_doctor("owner/other", tmp_path / "home", endpoint)
    assert done.returncode == 2
    assert "'owner/other' is not a folder here" in done.stderr
    assert "Hugging Face can't be reached" in done.stderr
    assert done.stderr.rstrip().count("\n") == 0
