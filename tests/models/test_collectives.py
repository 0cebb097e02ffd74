"""The collectives of split models, counted by Megatron-LM's scheme: two sums of the hidden states in each layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
from models import tiny

from headrace.models.collectives import AbsentGroup, Collective, CollectiveTimes, collectives_of, time_collectives
from headrace.models.sharding import split
from headrace.models.source import read_files


def split_model(name: str, folder: Path, num_ranks: int) -> Any:
    """Of which only the shapes are right."""
    model = tiny.build(name)
    group = cast(mx.distributed.Group, AbsentGroup(num_ranks))
    split(model, read_files(name, tiny.save(name, folder / name)), group)
    return model


@pytest.mark.parametrize("name", ["llama_tied", "qwen3", "qwen3_moe", "qwen3_5", "gpt_oss"])
def test_each_layer_sums_the_hidden_states_after_its_mixer_and_after_its_mlp(name: str, tmp_path: Path) -> None:
    config = tiny.FAMILIES[name]
    config = config.get("text_config", config)
    found = collectives_of(split_model(name, tmp_path, 2))
    expected = [Collective("sum", config["hidden_size"], mx.float32)] * (2 * config["num_hidden_layers"])
    assert [each for each in found if each.kind == "sum"] == expected
    # of the output matrix, which Qwen3.5's `shard` splits over the vocabulary
    gathered = [each.width for each in found if each.kind == "gather"]
    assert gathered == ([config["vocab_size"] // 2] if name == "qwen3_5" else [])


def test_mlx_s_own_functions_are_back_afterwards(tmp_path: Path) -> None:
    before = mx.distributed.all_sum, mx.distributed.all_gather
    collectives_of(split_model("llama_tied", tmp_path, 2))
    with pytest.raises(TypeError):
        collectives_of(lambda: None)
    assert (mx.distributed.all_sum, mx.distributed.all_gather) == before


def test_times_grow_with_tokens_and_logits() -> None:
    assert CollectiveTimes(1.0, 0.5, 0.25).seconds(6, 4) == 1.0 + 3.0 + 1.0


def test_a_rank_alone_can_time_them() -> None:
    found = [Collective("sum", 64, mx.bfloat16), Collective("gather", 32, mx.float32)]
    assert [each.num_bytes for each in found] == [128, 128]
    times = time_collectives(found, mx.distributed.init())
    assert 0 < times.seconds(1, 1) <= times.seconds(2048, 64)
