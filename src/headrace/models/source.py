"""Finds a model and reads its files, before any weight is read."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import ModelError
from headrace.models.download import fetch, fetch_small
from headrace.models.hub import Repository, cache_of, find, hub_errors, remember
from headrace.models.in_use import mark_in_use
from headrace.models.json_file import read_object
from headrace.models.pooling.recipe import ENCODERS, Recipe, find_recipe

logger = logging.getLogger(__name__)

NESTED_TEXT_CONFIGS = ("text_config", "language_model", "language_config", "llm_config")
"""Keys of the text model's config in vision-language checkpoints."""

CONTEXT_FIELDS = ("max_position_embeddings", "max_sequence_length", "n_positions", "seq_length", "n_ctx")

_NO_GGUF = (
    "take the same model in MLX's format (many are at https://huggingface.co/mlx-community), or convert the original "
    "with `python -m mlx_lm convert --hf-path ORIGINAL -q`"
)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A checkpoint's folder and its parsed JSON files.

    config: as stored, but with the `model_type` and the rotary fields that mlx-lm knows. text_config: the text model's
    part of it.
    recipe: of an embedding model or a reranker; None for a model that writes text.
    """

    name: str
    directory: Path
    config: Mapping[str, Any]
    text_config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    recipe: Recipe | None = None

    @property
    def model_type(self) -> str:
        """Of the text model."""
        return str(self.text_config.get("model_type", self.config["model_type"])).removesuffix("_text")

    @property
    def is_encoder(self) -> bool:
        return self.config["model_type"] in ENCODERS

    @property
    def context_length(self) -> int | None:
        """The longest sequence that the checkpoint was made for, in tokens; None if the files don't say."""
        for config in (self.text_config, self.config):
            for field in CONTEXT_FIELDS:
                if isinstance(length := config.get(field), int) and length > 0:
                    return length
        return None

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an output: of generation_config.json, else of config.json."""
        for config in (self.generation_config, self.config, self.text_config):
            ids = config.get("eos_token_id")
            if ids is not None:
                return tuple(ids) if isinstance(ids, list) else (int(ids),)
        return ()


def locate(name: str) -> Path:
    """The folder of a model: a local directory, or a snapshot of a Hugging Face repository (downloaded if need be).

    name: a path, or `owner/name`, which may be followed by `@` and a branch, tag or commit.

    Raises ModelError if there is neither, saying what was tried.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.suffix == ".gguf" and path.is_file():
        raise ModelError(f"{path} is a GGUF file: {_NO_GGUF}")
    if path.is_file():
        raise ModelError(f"{path} is a file, not a model folder")
    if not is_hub_id(name):
        raise ModelError(f"there is no folder {path}")
    with hub_errors(name):
        found = find(name)
        if isinstance(found, Repository):
            # A model that can't be served is refused before its weights are fetched.
            read_small_files(found)
            logger.info("fetching %s: %.2f GB", name, (found.num_bytes - found.fetched_bytes) / 1e9)
            found = remember(name, fetch(found))
    mark_in_use(cache_of(name), name)
    return found


def read_small_files(repository: Repository) -> ModelFiles:
    """Of a Hugging Face repository, without fetching its weights. Raises ModelError and the hub's errors."""
    if all(file.name != "config.json" for file in repository.files):
        raise ModelError(f"{repository.name} holds no config.json: {_without_config(repository.has_gguf)}")
    if not any(file.name.endswith(".safetensors") for file in repository.files):
        raise ModelError(f"{repository.name} holds no weights in safetensors files, and no others are read")
    return read_files(repository.name, fetch_small(repository))


def weights_bytes(folder: Path) -> int:
    return loaded_bytes({file.name: file.stat().st_size for file in folder.glob("*.safetensors")})


def loaded_bytes(sizes: Mapping[str, int]) -> int:
    """Bytes of the files that mlx-lm loads, of all in a folder."""
    return sum(size for name, size in sizes.items() if name.startswith("model") and name.endswith(".safetensors"))


def is_hub_id(name: str) -> bool:
    """Whether a name can only mean a Hugging Face repository."""
    path = Path(name).expanduser()
    return not (path.exists() or path.is_absolute() or name.startswith((".", "~")))


def read_files(name: str, directory: Path) -> ModelFiles:
    """Parse the folder's JSON files. Raises ModelError if config.json is missing or unusable."""
    config = read_object(directory / "config.json")
    if config is None:
        raise ModelError(f"{directory} holds no config.json: {_without_config(any(directory.glob('*.gguf')))}")
    if not isinstance(config.get("model_type"), str):
        raise ModelError(f"{directory / 'config.json'} names no model_type")
    recipe = find_recipe(name, directory, config)
    config["model_type"] = _known_model_type(config["model_type"])
    text_config = next((config[key] for key in NESTED_TEXT_CONFIGS if isinstance(config.get(key), dict)), config)
    for one in (config, text_config):
        _add_rope(one)
    generation_config = read_object(directory / "generation_config.json") or {}
    for one in (config, text_config, generation_config):
        ids = one.get("eos_token_id")
        if not all(isinstance(id, int) for id in (ids if isinstance(ids, list) else [] if ids is None else [ids])):
            raise ModelError(f"{directory}: eos_token_id is neither a token's id nor a list of such")
    return ModelFiles(name, directory, config, text_config, generation_config, recipe)


def _add_rope(config: dict[str, Any]) -> None:
    """Add the older fields for transformers 5's `rope_parameters`: most of mlx-lm's models read only these.

    Without them such a model would rotate by its family's default, and answer wrongly.
    """
    found = config.get("rope_parameters")
    if not isinstance(found, dict):
        return
    # Gemma 3 and others have one set for each kind of attention
    whole = found.get("full_attention", found)
    local = found.get("sliding_attention")
    if isinstance(whole, dict) and "rope_theta" in whole:
        config.setdefault("rope_theta", whole["rope_theta"])
        if whole.get("rope_type", "default") != "default":
            config.setdefault("rope_scaling", whole)
        if "partial_rotary_factor" in whole:
            config.setdefault("partial_rotary_factor", whole["partial_rotary_factor"])
    if isinstance(local, dict) and "rope_theta" in local:
        config.setdefault("rope_local_base_freq", local["rope_theta"])


def _without_config(has_gguf: bool) -> str:
    return f"but GGUF files: {_NO_GGUF}" if has_gguf else "it is not a model folder"


def _known_model_type(model_type: str) -> str:
    """`qwen3_5_text` at the root is Qwen3.5's text part on its own: mlx-lm knows it without the suffix."""
    bare = model_type.removesuffix("_text")
    if bare != model_type and not _has_module(model_type) and _has_module(bare):
        return bare
    return model_type


def _has_module(model_type: str) -> bool:
    """Whether mlx-lm has a module for it; looked for as a file, because the search for a module imports its package."""
    spec = importlib.util.find_spec("mlx_lm")
    folders = () if spec is None else spec.submodule_search_locations or ()
    return model_type.isidentifier() and any((Path(each) / "models" / f"{model_type}.py").is_file() for each in folders)
