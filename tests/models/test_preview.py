"""What a model will take is foreseen without its weights, and a model of no use here is refused before they come."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_hub import FakeHub, fake_hub, use_hub
from models.tiny import FAMILIES, build
from models.tiny_parts import WINDOW

from headrace.backend.device import Device
from headrace.backend.kernels import Kernels
from headrace.engine.memory import sample_state
from headrace.errors import ModelError
from headrace.models.levels import choose_levels
from headrace.models.packed import PackedModel
from headrace.models.preview import estimate, preview_on_hub
from headrace.models.purpose import purpose_by_name
from headrace.models.source import locate
from headrace.state.sequence import StateCost

GB = 1_000_000_000

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}
GPT_OSS_20B: dict[str, Any] = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 24,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "vocab_size": 201088,
    "rms_norm_eps": 1e-5,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "head_dim": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "sliding_window": 128,
    "rope_theta": 150000,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
}


def of_tokens(config: dict[str, Any], num_tokens: int) -> int:
    found = estimate(config, 2)
    assert found is not None
    return found.cost.record_bytes(num_tokens)


def test_bytes_of_a_state_follow_from_the_architecture() -> None:
    # Keys and values of 8 heads of 128 numbers in 32 layers, 2 bytes each.
    assert of_tokens(LLAMA_8B, 1000) == 1000 * 2 * 32 * 8 * 128 * 2
    # Table 1 of "Insights into DeepSeek-V3" (arXiv 2505.09343) has 70.272 KB a token.
    assert of_tokens(DEEPSEEK_V3, 1) == 70_272
    # 12 layers keep all tokens, and 12 keep the last 128.
    assert of_tokens(GPT_OSS_20B, 1000) == 2 * 8 * 64 * 2 * 12 * (1000 + 128)


def test_parameters_are_counted() -> None:
    found = estimate(LLAMA_8B, 2)
    assert found is not None
    # As its model card has it: 8.03 billion.
    assert round(found.num_parameters / 1e9, 2) == 8.03


def test_a_cpu_holds_weights_in_float32_if_they_leave_room() -> None:
    found = estimate(LLAMA_8B, 4)
    assert found is not None
    whole = 4 * found.num_parameters
    small, large = (Device("cpu", "Some CPU", size * GB, 8) for size in (40, 64))
    assert [found.held_bytes(5 * GB, "auto", each) for each in (small, large)] == [5 * GB, whole]
    assert found.held_bytes(5 * GB, "stored", large) == 5 * GB
    assert found.held_bytes(5 * GB, "float32", small) == whole
    assert found.held_bytes(5 * GB, "auto", Device("cuda", "Some GPU", 64 * GB, 8)) == 5 * GB


def test_a_model_that_cannot_be_built_is_not_foreseen() -> None:
    assert estimate({"model_type": "no_such_model"}, 2) is None
    assert estimate({"model_type": "llama"}, 2) is None


@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3", "qwen3_next", "mamba2", "gemma3_text", "gpt_oss"])
def test_it_is_what_a_loaded_model_takes(name: str) -> None:
    foreseen, loaded = _foreseen(name), _loaded(name)
    more = loaded.record_bytes(100) - foreseen.record_bytes(100)
    assert more == loaded.record_bytes(4096) - foreseen.record_bytes(4096)
    # Beside the window itself, a layer with one keeps the tokens that a rejected draft may bring back.
    windowed = sum(layer.per_token * WINDOW for layer in loaded.layers if layer.max_tokens is not None)
    assert 0 <= more <= windowed


def _foreseen(name: str) -> StateCost:
    found = estimate(FAMILIES[name], 4)
    assert found is not None
    return found.cost


def _loaded(name: str) -> StateCost:
    model = build(name)
    return sample_state(PackedModel(model, choose_levels(model), Kernels("fast", "cpu")), None).cost()


def write(folder: Path, config: dict[str, Any], **sizes: int) -> Path:
    """A repository's folder; its weights are zeros of these sizes."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    for name, size in sizes.items():
        with (folder / f"{name}.safetensors").open("wb") as file:
            file.truncate(size)
    return folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """With an empty cache."""
    llama = write(
        tmp_path / "llama", LLAMA_8B, **{"model-00001-of-00002": 3000, "model-00002-of-00002": 2000, "mtp": 9}
    )
    bert = write(tmp_path / "bert", {"model_type": "bert", "architectures": ["BertForTokenClassification"]}, model=1000)
    (gguf := tmp_path / "gguf").mkdir()
    (gguf / "model-Q4_K_M.gguf").write_bytes(b"GGUF")
    with fake_hub({"owner/llama": llama, "owner/bert": bert, "owner/gguf": gguf}) as hub:
        use_hub(monkeypatch, hub.url, tmp_path / "cache")
        yield hub


def test_a_repository_is_weighed_without_its_weights(hub: FakeHub) -> None:
    found = preview_on_hub("owner/llama")
    assert (found.weights_bytes, found.missing_bytes) == (5000, 5009)
    assert found.files.context_length == 131072
    assert hub.downloaded == {"config.json"}
    folder = locate("owner/llama")
    assert (folder / "mtp.safetensors").is_file()
    found = preview_on_hub("owner/llama")
    assert (found.weights_bytes, found.missing_bytes) == (5000, 0)


def test_a_model_with_another_task_is_refused_before_its_weights_are_fetched(hub: FakeHub) -> None:
    for look in (locate, preview_on_hub):
        with pytest.raises(ModelError, match=r"owner/bert writes no text.*BertForTokenClassification has another task"):
            look("owner/bert")
    assert hub.downloaded == {"config.json"}


def test_a_repository_of_gguf_files_says_what_to_take_instead(hub: FakeHub) -> None:
    for look in (locate, preview_on_hub):
        with pytest.raises(ModelError, match=r"owner/gguf holds no config.json: but GGUF files: .*mlx-community"):
            look("owner/gguf")
    assert not hub.downloaded


def test_an_unknown_repository_is_named(hub: FakeHub) -> None:
    with pytest.raises(ModelError, match="'owner/other' is neither a folder here nor a repository"):
        preview_on_hub("owner/other")


@pytest.mark.parametrize(
    ("name", "purpose"),
    [
        ("mlx-community/Qwen3-Embedding-0.6B-4bit", "embedding"),
        ("embeddinggemma-300m", "embedding"),
        ("Qwen/Qwen3-Reranker-4B", "reranker"),
        ("Qwen3-4B-Base-4bit", "base"),
        *((name, None) for name in ("Qwen3-4B-4bit", "codebase-7b", "headrace-miniature", "base/Qwen3-4B")),
    ],
)
def test_a_name_tells_where_files_do_not(name: str, purpose: str | None) -> None:
    found = purpose_by_name(name)
    assert found is None if purpose is None else purpose in (found or "")
