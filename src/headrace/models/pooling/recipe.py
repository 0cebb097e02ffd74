"""How a checkpoint turns texts into vectors or scores, read from its files."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from headrace.errors import ModelError
from headrace.families.pooling import DECODERS, PoolingFamily
from headrace.models.json_file import read_json, read_object
from headrace.models.pooling.head import POOLINGS
from headrace.types.pooling import PoolingTask, PoolingTraits

ENCODERS = ("bert", "modernbert", "roberta", "xlm-roberta")
"""Model types of `models/pooling/`."""

_LEGACY_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""In the order in which sentence-transformers joins their results."""

_ENDLESS = 1_000_000_000
"""Tokenizers without a limit have a larger one than this."""

_NAMED = re.compile(r"(?:^|[-_.])(?P<score>rerank(er)?)|(?:^|[-_.])(?P<embed>embed(ding)?s?)(?:[-_.]|$)")
_CLASSIFIER = re.compile(r"ForSequenceClassification$")
_OTHER_TASKS = re.compile(r"For(Token|Question|Multiple|Next)\w+$")
_TRUNK = re.compile(r"^(?!.*(LMHead|Chat|Generation))\w+Model$")


class Output(StrEnum):
    """What follows pooling."""

    NONE = "none"
    CLASSIFIER = "classifier"
    """The layers of a sequence classifier."""
    YES_NO = "yes or no"
    """The difference of the logits of the tokens `yes` and `no`."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a checkpoint turns a text, or a pair of texts, into numbers.

    modes: of pooling; their results are joined. dense: folders of sentence-transformers' dense layers.
    max_length: tokens of an input, from the files beside config.json; None if they don't say.
    """

    traits: PoolingTraits
    modes: tuple[str, ...]
    output: Output = Output.NONE
    dense: tuple[str, ...] = ()
    max_length: int | None = None


def find_recipe(name: str, directory: Path, config: Mapping[str, Any]) -> Recipe | None:
    """None for a model that writes text. directory: its JSON files suffice.

    Raises ModelError for a checkpoint with another task, and for one that computes in a way that is not supported.
    """
    architectures = config.get("architectures")
    names = [str(each) for each in architectures] if isinstance(architectures, list) else []
    found = None
    if (directory / "modules.json").is_file():
        found = _of_modules(name, directory, config)
    elif any(map(_CLASSIFIER.search, names)):
        found = _of_classifier(name, config)
    elif (other := next((each for each in names if _OTHER_TASKS.search(each)), None)) is not None:
        raise _refusal(name, f"its architecture {other} has another task")
    elif any(map(_TRUNK.search, names)) or config.get("model_type") in ENCODERS:
        found = _of_trunk(config)
    elif (family := DECODERS.get(str(config.get("model_type")))) is not None:
        found = _by_name(name, family)
    if found is None:
        return None
    _check_type(name, config, found)
    return replace(found, max_length=_max_length(directory))


def _refusal(name: str, reason: str) -> ModelError:
    return ModelError(f"{name} writes no text, and is not supported: {reason}")


def _check_type(name: str, config: Mapping[str, Any], recipe: Recipe) -> None:
    model_type = str(config.get("model_type"))
    if model_type in ENCODERS:
        return
    if model_type not in DECODERS:
        supported = ", ".join(sorted((*ENCODERS, *DECODERS)))
        raise _refusal(name, f"models of type {model_type} are not; those of {supported} are")
    if config.get("is_causal") is False or config.get("use_bidirectional_attention"):
        raise _refusal(name, f"its {model_type} sees tokens to the right, and only causal ones are supported")
    if recipe.modes != ("lasttoken",):
        raise _refusal(name, f"a {model_type} pools its last token only, not {' and '.join(recipe.modes)}")


def _of_modules(name: str, directory: Path, config: Mapping[str, Any]) -> Recipe:
    """Of sentence-transformers' modules.json: the transformer, pooling, dense layers, normalization."""
    modules = read_json(directory / "modules.json")
    if not isinstance(modules, list) or not all(isinstance(each, dict) for each in modules):
        raise ModelError(f"{directory / 'modules.json'} holds no list of modules")
    kinds = [(str(each.get("type", "")).rpartition(".")[2], str(each.get("path", ""))) for each in modules]
    settings = read_object(directory / "config_sentence_transformers.json") or {}
    known = {"Transformer", "Pooling", "Dense", "Normalize", "Dropout", "LogitScore"}
    if (unknown := next((kind for kind, _ in kinds if kind not in known), None)) is not None:
        raise _refusal(name, f"its module {unknown} is not")
    order = [kind for kind, _ in kinds if kind != "Dropout"]
    if order == ["Transformer", "LogitScore"]:
        return _of_logits(name, config)
    if order == ["Transformer"] and settings.get("model_type") == "CrossEncoder":
        return _of_classifier(name, config, settings)
    expected = ["Transformer", "Pooling", *["Dense"] * order.count("Dense"), *["Normalize"] * order.count("Normalize")]
    if order != expected or order.count("Normalize") > 1:
        raise _refusal(name, f"its modules are {', '.join(order)}")
    pooling = read_object(directory / dict(kinds)["Pooling"] / "config.json") or {}
    if pooling.get("include_prompt") is False:
        raise _refusal(name, "its pooling leaves out the prompt")
    dense = tuple(path for kind, path in kinds if kind == "Dense")
    modes = _modes(name, pooling)
    width = int(config.get("hidden_size", 0)) * len(modes)
    if dense:
        width = int((read_object(directory / dense[-1] / "config.json") or {}).get("out_features", 0))
    prompts = settings.get("prompts")
    prompts = {key: text for key, text in prompts.items() if isinstance(text, str)} if isinstance(prompts, dict) else {}
    default = settings.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise ModelError(f"{directory / 'config_sentence_transformers.json'}: default_prompt_name names no prompt")
    traits = PoolingTraits(
        PoolingTask.EMBED,
        width,
        prompts,
        default,
        normalizes="Normalize" in order,
        lower_cases=(read_object(directory / "sentence_bert_config.json") or {}).get("do_lower_case") is True,
    )
    return Recipe(traits, modes, dense=dense)


def _modes(name: str, pooling: Mapping[str, Any]) -> tuple[str, ...]:
    found = pooling.get("pooling_mode")
    if found is None:
        modes: Sequence[Any] = [mode for key, mode in _LEGACY_MODES.items() if pooling.get(key)] or ["mean"]
    else:
        modes = found if isinstance(found, list) else [found]
    if (unknown := next((mode for mode in modes if mode not in POOLINGS), None)) is not None:
        raise _refusal(name, f"its pooling {unknown!r} is not")
    return tuple(map(str, modes))


def _of_logits(name: str, config: Mapping[str, Any]) -> Recipe:
    family = DECODERS.get(str(config.get("model_type")))
    if family is None:
        raise _refusal(name, f"no prompt is known for a reranker of type {config.get('model_type')}")
    return _of_yes_no(family)


def _of_yes_no(family: PoolingFamily) -> Recipe:
    traits = PoolingTraits(PoolingTask.SCORE, 1, is_probability=True, template=family.template)
    return Recipe(traits, ("lasttoken",), Output.YES_NO)


def _of_classifier(name: str, config: Mapping[str, Any], settings: Mapping[str, Any] | None = None) -> Recipe:
    labels = config.get("id2label")
    num_labels = len(labels) if isinstance(labels, dict) else int(config.get("num_labels", 2))
    if num_labels != 1:
        raise _refusal(name, f"it is a classifier with {num_labels} labels, and rerankers have one")
    stored = config.get("sentence_transformers")
    activation = (settings or {}).get("activation_fn") or (
        stored.get("activation_fn") if isinstance(stored, dict) else config.get("sbert_ce_default_activation_function")
    )
    kind = str(activation or "sigmoid").rpartition(".")[2].lower()
    if kind not in ("identity", "sigmoid"):
        raise _refusal(name, f"its activation {activation} is not")
    traits = PoolingTraits(PoolingTask.SCORE, 1, is_probability=kind == "sigmoid")
    model_type = str(config.get("model_type"))
    if model_type in DECODERS:
        if not _says(name, "score"):
            raise _refusal(name, "it is a classifier whose prompt is unknown")
        return Recipe(replace(traits, template=DECODERS[model_type].template), ("lasttoken",), Output.CLASSIFIER)
    # ModernBERT's may pool otherwise
    mode = config.get("classifier_pooling", "cls")
    return Recipe(traits, _modes(name, {"pooling_mode": mode}), Output.CLASSIFIER)


def _of_trunk(config: Mapping[str, Any]) -> Recipe:
    """Without sentence-transformers' files, which converters often leave out."""
    family = DECODERS.get(str(config.get("model_type")))
    if family is not None:
        return _embedding(family)
    assumed = "mean pooling, as in sentence-transformers, since the checkpoint has no modules.json"
    return Recipe(PoolingTraits(PoolingTask.EMBED, int(config.get("hidden_size", 0)), assumed=assumed), ("mean",))


def _by_name(name: str, family: PoolingFamily) -> Recipe | None:
    """Qwen's embedding models and rerankers name the class of its chat models."""
    if _says(name, "score"):
        return _of_yes_no(family)
    return _embedding(family) if _says(name, "embed") else None


def _embedding(family: PoolingFamily) -> Recipe:
    assumed = "the prompts and the pooling of its family, since the checkpoint has no modules.json"
    traits = PoolingTraits(PoolingTask.EMBED, 0, family.prompts, normalizes=True, assumed=assumed)
    return Recipe(traits, ("lasttoken",))


def _says(name: str, task: str) -> bool:
    return any(found[task] for found in _NAMED.finditer(name.rpartition("/")[2].lower()))


def _max_length(directory: Path) -> int | None:
    own = (read_object(directory / "sentence_bert_config.json") or {}).get("max_seq_length")
    if own is None:
        own = (read_object(directory / "tokenizer_config.json") or {}).get("model_max_length")
    return own if isinstance(own, int) and 0 < own < _ENDLESS else None
