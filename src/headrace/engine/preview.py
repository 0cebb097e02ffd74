"""Estimates the configured model's memory."""

from __future__ import annotations

from headrace.backend import device
from headrace.config import Config
from headrace.engine.model_files import built_in_suggested, model_files
from headrace.models.built_in import built_in_folder
from headrace.models.preview import Preview, estimate, preview_folder, preview_on_hub
from headrace.models.source import is_hub_id


def preview(config: Config) -> Preview:
    """The configured model's estimate, before any weight of a Hugging Face id is fetched. Raises ModelError."""
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
