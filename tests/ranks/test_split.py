"""Models split over two ranks compute what they compute whole."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from models import tiny

from headrace.config_loading import environment_for
from headrace.ranks.layout import read_layout

TESTS = Path(__file__).parent.parent
TOLERANCE = 1e-4

NAMED = ["llama_tied", "qwen3_5", "qwen3_moe", "gpt_oss"]
"""Dense and tied, hybrid, experts, windows with sinks."""

ALSO_SPLIT = [
    *("deepseek_v2", "deepseek_v3", "exaone_moe", "glm4_moe", "glm4_moe_lite", "kimi_k25", "kimi_k3", "llama"),
    *("llama_sliding", "minimax", "ministral3", "mistral", "qwen2", "qwen3", "qwen3_5_deep", "qwen3_5_moe"),
    *("qwen3_yarn", "solar_open", "step3p5"),
]


def on_two_ranks(names: list[str], folder: Path, device: str = "cpu") -> dict[str, dict[str, Any]]:
    """What logits.py says of each family."""
    layout = read_layout("2", "ring")
    connections = folder / "connections.json"
    connections.write_text(json.dumps(layout.connections), encoding="utf-8")
    command = [sys.executable, str(TESTS / "ranks" / "logits.py"), str(folder), device, *names]
    processes = [
        subprocess.Popen(
            command,
            env=environment_for({**layout.variables(rank, connections), "PYTHONPATH": str(TESTS)}),
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            text=True,
        )
        for rank in range(layout.size)
    ]
    try:
        output, _ = processes[0].communicate(timeout=900)
        assert [process.wait(60) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    return {found["family"]: found for found in map(json.loads, output.splitlines())}


def check_all(names: list[str], folder: Path, device: str = "cpu") -> dict[str, dict[str, Any]]:
    found = on_two_ranks(names, folder, device)
    assert list(found) == names
    assert [name for name in names if "refused" in found[name]] == []
    assert [name for name in names if not found[name]["same_ids"]] == []
    assert {name: found[name]["difference"] for name in names if found[name]["difference"] > TOLERANCE} == {}
    # the sums that are timed at start-up are those of a packed step
    assert [name for name in names if not found[name]["foresees_collectives"]] == []
    # embeddings, norms and routers stay whole, and are most of so small models
    assert max(each["share_of_weights"] for each in found.values()) < 0.9
    return found


def test_two_ranks_compute_what_one_does(tmp_path: Path) -> None:
    found = check_all(NAMED, tmp_path)
    assert {name: found[name]["layers"] for name in NAMED} == {
        "llama_tied": ["layers: Attention: adapter"],
        "qwen3_5": ["layers: GatedDeltaNet: packed, Qwen3NextAttention: adapter"],
        "qwen3_moe": ["layers: Attention: adapter"],
        "gpt_oss": ["layers: AttentionBlock: adapter"],
    }


FUSED = ["qwen3", "qwen3_5_moe", "gpt_oss"]
"""Dense; hybrid with experts of ours and a split output matrix; biases that are added once."""

ALSO_FUSED = ["glm4_moe", "llama", "llama_sliding", "ministral3", "qwen3_5", "qwen3_moe", "qwen3_yarn"]


def check_fused(names: list[str], folder: Path) -> None:
    found = check_all(names, folder, "cuda")
    for name in names:
        assert found[name]["lowered"] == []
        assert re.search(r"^kernels: \d.*, steps of few tokens compiled$", found[name]["layers"][1])


@pytest.mark.slow
def test_two_ranks_with_cudas_layers_compute_what_one_does(tmp_path: Path) -> None:
    check_fused(FUSED, tmp_path)


@pytest.mark.slow
def test_two_ranks_with_cudas_layers_compute_what_one_does_in_other_families(tmp_path: Path) -> None:
    check_fused(ALSO_FUSED, tmp_path)


@pytest.mark.slow
def test_two_ranks_compute_what_one_does_in_all_families_that_are_split(tmp_path: Path) -> None:
    check_all(ALSO_SPLIT, tmp_path)


def test_families_and_sizes_that_can_not_be_split_are_refused_by_name(tmp_path: Path) -> None:
    found = on_two_ranks(["phi3", "lfm2"], tmp_path)
    for name in ("phi3", "lfm2"):
        model_type = tiny.FAMILIES[name]["model_type"]
        assert found[name]["refused"] == f"{name} can't run on 2 ranks: mlx-lm does not split {model_type}"


def program(model: str, seed: int, num_requests: int, kernels: str = "cpu") -> dict[str, Any]:
    command = [sys.executable, str(TESTS / "ranks" / "program.py"), kernels, model, str(seed), str(num_requests)]
    ended = subprocess.run(
        command, env=environment_for({"PYTHONPATH": str(TESTS)}), stdout=subprocess.PIPE, text=True, timeout=1800
    )
    assert ended.returncode == 0
    found: dict[str, Any] = json.loads(ended.stdout)
    assert found["different"] == []
    assert found["num_running"] == 0
    assert found["num_cached"] > 0
    assert found["num_drafted"] > 0
    # steps with drafts, grammars and prompts; a grammar is sent with its request
    assert found["most_step_bytes"] < 2000
    assert found["most_request_bytes"] < 2000
    return found


@pytest.mark.slow
def test_a_random_program_gives_the_answers_of_one_rank() -> None:
    found = program("miniature", 1, 8)
    assert found["num_compared"] > 4


@pytest.mark.slow
def test_a_random_program_with_cudas_layers_gives_the_answers_of_one_rank() -> None:
    """Steps are launched ahead and warmed up, on both ranks in the same order."""
    found = program("miniature", 1, 8, "cuda")
    assert found["num_compared"] > 4
    assert found["kernels"] == ["kernels: 6 GatedDeltaNet and 2 Qwen3NextAttention, steps of few tokens compiled"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 5, 6])
def test_longer_random_programs_give_the_answers_of_one_rank(seed: int) -> None:
    found = program("miniature", seed, 40)
    assert found["num_compared"] > 20
