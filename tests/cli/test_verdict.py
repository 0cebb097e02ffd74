"""What `headrace doctor` concludes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.backend.device import Device, available_memory_bytes
from headrace.cli import verdict
from headrace.cli.main import main
from headrace.cli.verdict import Resources, fit, resources
from headrace.models.source import ModelFiles

GB = 1_000_000_000
GPU = Device("cuda", "Some GPU", 24 * GB, 8)
CPU = Device("cpu", "Some CPU", 24 * GB, 8)

LLAMA_8B = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "max_position_embeddings": 131072,
}
DEEPSEEK_V3 = {"num_hidden_layers": 61, "num_attention_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
QWEN3_NEXT = {
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "full_attention_interval": 4,
}


def files(folder: Path, config: dict[str, Any], num_bytes: int = 1000) -> ModelFiles:
    with (folder / "model-1.safetensors").open("wb") as file:
        file.truncate(num_bytes)
    (folder / "mtp.safetensors").write_bytes(b"not counted")
    return ModelFiles("m", folder, {"model_type": "x"}, config, {})


@pytest.mark.parametrize(
    ("config", "num_bytes"),
    [
        # 32 layers, keys and values of 8 heads of 128, 2 bytes: 128 KiB.
        (LLAMA_8B, 128 * 1024),
        # Table 1 of "Insights into DeepSeek-V3" (arXiv 2505.09343) has 70.272 KB a token.
        (DEEPSEEK_V3, 70_272),
        # 12 of 48 layers, 2 heads of 256, keys and values, 2 bytes.
        (QWEN3_NEXT, 12 * 2 * 2 * 256 * 2),
        (
            {**QWEN3_NEXT, "full_attention_interval": None, "layer_types": ["linear_attention", "full_attention"] * 24},
            24 * 2 * 2 * 256 * 2,
        ),
        ({}, 0),
    ],
)
def test_bytes_of_a_token_are_those_of_the_architecture(config: dict[str, Any], num_bytes: int, tmp_path: Path) -> None:
    assert fit(files(tmp_path, config), GPU, 0.9).token_bytes == num_bytes
    # In float32, as a CPU computes.
    assert fit(files(tmp_path, config), CPU, 0.9).token_bytes == 2 * num_bytes


def test_a_model_that_fits_leaves_room_for_so_many_tokens(tmp_path: Path) -> None:
    lines = list(fit(files(tmp_path, LLAMA_8B, 5 * GB), GPU, 0.5).lines())
    # 12 GB may be used and 5 are weights: 7 GB / 131,072.
    assert lines == [
        "fits: 5.00 GB of weights, 12.00 GB of memory may be used",
        "room for about 53405 tokens of all requests together; its own context is 131072 tokens",
    ]


def test_a_model_that_does_not_fit_ends_the_command_before_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("nothing may be loaded here")

    (tmp_path / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 1}')
    files(tmp_path, {}, 30 * GB)
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
    monkeypatch.setattr(verdict, "compiler", lambda: "/usr/bin/g++")
    monkeypatch.setattr(verdict, "vision_advice", lambda: None)
    assert list(Resources(CPU, 9 * GB, 80 * GB, tmp_path).advice()) == []
    assert list(Resources(CPU, None, 80 * GB, tmp_path).advice()) == []
    monkeypatch.setattr(verdict, "compiler", lambda: None)
    monkeypatch.setattr(verdict, "vision_advice", lambda: "`pip install x`")
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
    monkeypatch.setattr(verdict, "compiler", lambda: "/usr/bin/g++")
    monkeypatch.setattr(verdict, "vision_advice", lambda: None)
    one_core = Device("cpu", "Some CPU", 24 * GB, 1)
    advice = {
        (device.num_cores, load): list(Resources(device, 9 * GB, 80 * GB, tmp_path, load).advice())
        for device, load in ((CPU, 30.0), (CPU, 8.0), (one_core, 30.0))
    }
    assert "30 programs share 8 cores" in advice[8, 30.0][0]
    # One core has one thread anyway.
    assert advice[8, 8.0] == advice[1, 30.0] == []
