"""Loads a model's text pipeline before its weights, so that an unusable model is reported before minutes of loading."""

from __future__ import annotations

import logging
from dataclasses import replace

from headrace.cli.installed import vision_advice
from headrace.config import Config
from headrace.engine.prepare import model_files
from headrace.session.settings import model_defaults
from headrace.session.text_pipeline import TextPipeline, load_text_pipeline

log = logging.getLogger(__name__)


def without_missing_vision(config: Config) -> Config:
    """The configuration with `--vision off`, and a warning, for a model with a vision tower that nothing can load."""
    if config.models.vision == "off" or (advice := vision_advice()) is None:
        return config
    files = model_files(config)
    if not files.config.get("vision_config"):
        return config
    log.warning("images and videos are refused, because mlx-vlm is not installed; %s adds it", advice)
    return replace(config, models=replace(config.models, vision="off"))


def configured_text_pipeline(config: Config) -> TextPipeline:
    """The text pipeline of the configured model, which is downloaded if necessary. Raises ModelError.

    Finds the model exactly as the engine will, and checks its sampling defaults as the session will.
    """
    files = model_files(config)
    model_defaults(files.generation_config)
    return load_text_pipeline(
        files.directory,
        files.model_type,
        history=config.engine.history,
        system_notes="hoist" if config.engine.system_notes == "hoist" else "stable",
        tool_format=config.models.tool_format,
    )
