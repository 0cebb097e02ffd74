"""What a terminal shows while a model is loaded."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import mlx.core as mx
import pexpect
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes

from headrace.models.built_in import MINIATURE

PATIENCE_S = 120

CONFIG = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": 4096,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough that loading takes a second: 205 million parameters, 0.82 GB in float32, random, in one file."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(MINIATURE / name, folder / name)
    model_class, arguments = _get_classes(dict(CONFIG))
    weights = dict(tree_flatten(model_class(arguments.from_dict(dict(CONFIG))).parameters()))
    mx.save_safetensors(
        str(folder / "model.safetensors"), {name: array.astype(mx.float16) for name, array in weights.items()}
    )
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("command", "ready"), [("serve", "is served at"), ("chat", ">>>")])
def test_loading_shows_share_size_and_time(command: str, ready: str, model: Path, tmp_path: Path) -> None:
    words = ["-m", "headrace", command, str(model), *(("--port", "0") if command == "serve" else ())]
    environ = {**os.environ, "TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1", "HOME": str(tmp_path)}
    with pexpect.spawn(
        sys.executable, words, encoding="utf-8", dimensions=(24, 200), timeout=PATIENCE_S, env=environ
    ) as child:
        child.expect(r"\r\x1b\[K(loading [^\r]*\d+% of 0\.8\d GB, \d+ s)")
        child.expect(r"\r\x1b\[Kloading [^\r]*0\.8\d GB in memory, checking")
        child.expect(ready)
        if command == "serve":
            child.sendintr()
        else:
            child.sendline("/bye")
        child.expect(pexpect.EOF)
    assert child.exitstatus == 0
