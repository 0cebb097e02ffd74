"""What a rank holds while it takes its part of the weights. Several ranks are in tests/ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from models import tiny

from benchmarks.shapes import config_of, planned_model, random_model
from headrace.errors import ModelError
from headrace.models.collectives import AbsentGroup
from headrace.models.sharding import shard
from headrace.models.source import ModelFiles

LAYER = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 4}
CONFIG = {**config_of("tiny-qwen3"), **LAYER, "num_hidden_layers": 6, "head_dim": 64, "vocab_size": 1024}

HELD = """
import sys
from pathlib import Path
import mlx.core as mx
from headrace.models.collectives import AbsentGroup
from headrace.models.sharding import shard
from headrace.models.source import read_files
from headrace.models.weights import load_weights
files = read_files("model", Path(sys.argv[1]))
loaded = load_weights(files)
shard(loaded.model, files, AbsentGroup(int(sys.argv[2]), int(sys.argv[2]) - 1))
print(mx.get_active_memory(), mx.get_peak_memory())
"""


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_rank_holds_its_part_and_one_tensor_more_at_most(num_ranks: int, tmp_path: Path) -> None:
    weights = dict(tree_flatten(random_model(CONFIG).parameters()))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights, metadata={"format": "mlx"})
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    ended = subprocess.run(
        [sys.executable, "-c", HELD, str(tmp_path), str(num_ranks)], stdout=subprocess.PIPE, text=True
    )
    active, peak = map(int, ended.stdout.split())
    split = sum(array.nbytes for name, array in weights.items() if "_proj" in name)
    whole = sum(array.nbytes for array in weights.values()) - split
    largest = max(array.nbytes for array in weights.values())
    assert active == pytest.approx(whole + split / num_ranks, rel=0.01)
    assert peak < active + 1.1 * largest


def test_fewer_heads_of_keys_than_ranks_are_refused_where_mlx_lm_does_not_repeat_them(tmp_path: Path) -> None:
    config = {**tiny.FAMILIES["qwen2"], "num_attention_heads": 4, "num_key_value_heads": 2}
    files = ModelFiles("small", tmp_path, config, config, {})
    model = planned_model(config, dtype="float32")
    with pytest.raises(ModelError, match="small can't be split over 4 ranks: Attention has fewer heads of keys"):
        shard(model, files, AbsentGroup(4))  # type: ignore[arg-type]
