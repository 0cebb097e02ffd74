"""Finds the configured model, in a folder, inside the package, or on Hugging Face, and what it would take in memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.backend import device
from headrace.config import Config
from headrace.config_loading import with_suggestion
from headrace.errors import ModelError
from headrace.models.built_in import IN_PACKAGE, built_in_folder
from headrace.models.hub import local_copy
from headrace.models.in_use import mark_in_use
from headrace.models.preview import Preview, estimate, preview_folder, preview_on_hub
from headrace.models.smollm2 import fetch, is_fetched
from headrace.models.source import ModelFiles, is_hub_id, locate, read_files

logger = logging.getLogger(__name__)


def model_files(config: Config, name: str | None = None) -> ModelFiles:
    """A model's folder and what its files say; fetches it if need be. Raises ModelError.

    name: of a model, as on the command line; None for the configured one.
    """
    name = config.model if name is None else name
    is_path = Path(name).expanduser().is_dir()
    if (built_in := built_in_folder(name)) is not None:
        return read_files(f"headrace-{name}", built_in)
    if name == "smollm2" and not is_path:
        folder = fetch(Path(config.models.model_folder).expanduser(), logger.info)
        mark_in_use(folder, name)
        return read_files("SmolLM2-135M-Instruct", folder)
    with built_in_suggested(name):
        directory = locate(name)
    return read_files(directory.name if is_path else name, directory)


def model_name(word: str) -> str:
    """The name of a model, as `model_files` gives it, before its files are there."""
    if Path(word).expanduser().is_dir():
        return Path(word).expanduser().resolve().name
    if built_in_folder(word) is not None:
        return f"headrace-{word}"
    return "SmolLM2-135M-Instruct" if word == "smollm2" else word


def local_files(config: Config) -> ModelFiles | None:
    """As `model_files`, of a model that is on this machine already; asks no network. Raises ModelError."""
    word = config.model
    if Path(word).expanduser().is_dir() or built_in_folder(word) is not None:
        return model_files(config)
    if word == "smollm2":
        folder = Path(config.models.model_folder).expanduser()
        return model_files(config) if is_fetched(folder) else None
    found = local_copy(word) if is_hub_id(word) else None
    return None if found is None else read_files(word, found)


@contextmanager
def built_in_suggested(name: str) -> Iterator[None]:
    """Names the built-in model that a mistyped name resembles."""
    try:
        yield
    except ModelError as error:
        message = with_suggestion(error.message, name, (*IN_PACKAGE, "smollm2"))
        if message == error.message or not is_hub_id(name):
            raise
        raise ModelError(message) from error.__cause__


def preview(config: Config) -> Preview:
    """What the configured model would take, before any weight of a Hugging Face id is fetched. Raises ModelError."""
    name = config.model
    if name != "smollm2" and built_in_folder(name) is None and is_hub_id(name):
        with built_in_suggested(name):
            return preview_on_hub(name)
    return preview_folder(model_files(config))


def held_weights_bytes(config: Config) -> int:
    """Bytes that the configured model's weights will take in memory, as far as its files tell."""
    files, here = model_files(config), device.current()
    stored = preview_folder(files).weights_bytes
    estimated = estimate(files.config, item_bytes=4)
    return stored if estimated is None else estimated.held_bytes(stored, config.models.dtype, here)
