"""What files of embedding models and rerankers say, and which are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ModelError
from headrace.models.pooling.recipe import Output, Recipe, find_recipe
from headrace.types.pooling import PoolingTask

TRANSFORMER = {"path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}


def recipe(folder: Path, name: str = "m", **config: Any) -> Recipe | None:
    return find_recipe(name, folder, {"model_type": "bert", "hidden_size": 8, **config})


def with_modules(folder: Path, *modules: dict[str, str], pooling: dict[str, Any] | None = None) -> Path:
    (folder / "modules.json").write_text(json.dumps([TRANSFORMER, *modules]))
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [
        *(("qwen3", name) for name in ("Qwen3ForCausalLM", "GPT2LMHeadModel", "ChatGLMModel", "InternVLChatModel")),
        *(("qwen3", name) for name in ("Gemma3ForConditionalGeneration", "MiniCPMV", "RwkvForCausalLM")),
        ("gpt2", "GPT2LMHeadModel"),
    ],
)
def test_a_model_that_writes_text_has_no_recipe(model_type: str, architecture: str, tmp_path: Path) -> None:
    assert recipe(tmp_path, model_type=model_type, architectures=[architecture]) is None


@pytest.mark.parametrize(
    ("name", "output", "task"),
    [
        ("mlx-community/Qwen3-Embedding-0.6B-4bit-DWQ", Output.NONE, PoolingTask.EMBED),
        ("Qwen3-Embedding-8B", Output.NONE, PoolingTask.EMBED),
        ("Qwen/Qwen3-Reranker-4B", Output.YES_NO, PoolingTask.SCORE),
        ("my_reranker", Output.YES_NO, PoolingTask.SCORE),
    ],
)
def test_a_name_tells_where_the_files_name_a_chat_model(
    name: str, output: Output, task: PoolingTask, tmp_path: Path
) -> None:
    found = recipe(tmp_path, name, model_type="qwen3", architectures=["Qwen3ForCausalLM"])
    assert found is not None
    assert (found.output, found.traits.task, found.modes) == (output, task, ("lasttoken",))
    assert ("query" in found.traits.prompts) == (task is PoolingTask.EMBED)
    assert (found.traits.template is not None) == (task is PoolingTask.SCORE)
    for other in ("Qwen3-4B-4bit", "embedded-Qwen3", "Qwen3-Embedding/Qwen3-4B"):
        assert recipe(tmp_path, other, model_type="qwen3", architectures=["Qwen3ForCausalLM"]) is None


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"architectures": ["BertForTokenClassification"]}, "BertForTokenClassification has another task"),
        ({"architectures": ["BertForQuestionAnswering"]}, "BertForQuestionAnswering has another task"),
        ({"architectures": ["BertForSequenceClassification"], "id2label": {"0": "a", "1": "b"}}, "with 2 labels"),
        ({"architectures": ["BertForSequenceClassification"]}, "with 2 labels"),
        (
            {
                "architectures": ["BertForSequenceClassification"],
                "id2label": {"0": "a"},
                "sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Softmax"},
            },
            r"its activation torch\.nn\.modules\.activation\.Softmax is not",
        ),
        ({"model_type": "t5", "architectures": ["T5EncoderModel"]}, "models of type t5 are not; those of bert,"),
        ({"model_type": "qwen3", "architectures": ["Qwen3Model"], "is_causal": False}, "tokens to the right"),
        (
            {"model_type": "qwen3", "architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "a"}},
            "a classifier whose prompt is unknown",
        ),
    ],
)
def test_a_checkpoint_that_is_not_supported_is_refused_with_its_reason(
    config: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=f"m writes no text, and is not supported: .*{reason}"):
        recipe(tmp_path, **config)


@pytest.mark.parametrize(
    ("modules", "pooling", "reason"),
    [
        (["Pooling", "Normalize"], {"include_prompt": False}, "its pooling leaves out the prompt"),
        (["Pooling", "CNN"], {}, "its module CNN is not"),
        (["Dense", "Pooling"], {}, "its modules are Transformer, Dense, Pooling"),
        (["Normalize"], {}, "its modules are Transformer, Normalize"),
        (["Pooling"], {"pooling_mode": "attention"}, "its pooling 'attention' is not"),
    ],
)
def test_modules_of_sentence_transformers_that_are_not_supported_are_refused(
    modules: list[str], pooling: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    parts = [{"path": f"1_{kind}", "type": f"sentence_transformers.models.{kind}"} for kind in modules]
    with pytest.raises(ModelError, match=reason):
        recipe(with_modules(tmp_path, *parts, pooling=pooling))


def test_both_forms_of_a_pooling_are_read_and_joined_in_the_same_order(tmp_path: Path) -> None:
    flags = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True, "pooling_mode_max_tokens": False}
    (old := tmp_path / "old").mkdir()
    (new := tmp_path / "new").mkdir()
    found = recipe(with_modules(old, POOLING, pooling=flags))
    other = recipe(with_modules(new, POOLING, pooling={"pooling_mode": ["cls", "mean"]}))
    assert found is not None and other is not None
    assert found.modes == other.modes == ("cls", "mean")
    assert found.traits.dimensions == 16


def test_prompts_and_lengths_come_from_the_files(tmp_path: Path) -> None:
    with_modules(tmp_path, POOLING, pooling={})
    settings = {"prompts": {"query": "q: ", "odd": 3}, "default_prompt_name": "query"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(settings))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 10**30}))
    found = recipe(tmp_path)
    assert found is not None
    assert (found.traits.prompts, found.traits.default_prompt, found.max_length) == ({"query": "q: "}, "query", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 77}))
    assert (found := recipe(tmp_path)) is not None and found.max_length == 77
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 33}))
    assert (found := recipe(tmp_path)) is not None and found.max_length == 33
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({"default_prompt_name": "gone"}))
    with pytest.raises(ModelError, match="default_prompt_name names no prompt"):
        recipe(tmp_path)


@pytest.mark.parametrize("text", ["[", "3", "[3]"])
def test_a_broken_list_of_modules_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(ModelError, match=r"modules\.json"):
        recipe(tmp_path)


def test_without_modules_the_pooling_is_sentence_transformers_and_said_to_be_assumed(tmp_path: Path) -> None:
    found = recipe(tmp_path, architectures=["BertModel"])
    assert found is not None
    assert found.modes == ("mean",)
    assert "no modules.json" in (found.traits.assumed or "")
