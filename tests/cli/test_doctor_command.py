"""`headrace doctor owner/name`, as a user runs it, with a hub on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from fake_hub import fake_hub

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


def doctor(name: str, home: Path, endpoint: str) -> subprocess.CompletedProcess[str]:
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
        done = doctor("owner/name", tmp_path / "home", hub.url)
        assert done.returncode == 0, done.stderr
        assert "fits: 0.05 GB of weights, " in done.stdout
        assert "context: 4096 tokens, all of its own" in done.stdout
        assert "to fetch: 0.05 GB; " in done.stdout
        assert "`headrace serve owner/name` fetches the weights" in done.stdout
        assert hub.downloaded == {"config.json"}
        endpoint = hub.url
    done = doctor("owner/other", tmp_path / "home", endpoint)
    assert done.returncode == 2
    assert "'owner/other' is not a folder here" in done.stderr
    assert "Hugging Face can't be reached" in done.stderr
    assert done.stderr.rstrip().count("\n") == 0
