"""What the configuration becomes: a model's text pipeline, defaults of requests, media policy and limits."""

from __future__ import annotations

import logging
from dataclasses import fields, replace
from pathlib import Path

from headrace.cli.installed import vision_advice
from headrace.config import Config, DefaultsConfig, MediaConfig
from headrace.engine.engine import Engine
from headrace.engine.model_files import model_files
from headrace.errors import ConfigError, ModelError
from headrace.session.embeddings import AnySession, EmbeddingSession
from headrace.session.models import Models
from headrace.session.session import Session
from headrace.session.settings import Defaults, model_defaults
from headrace.session.text_pipeline import TextPipeline, load_text_pipeline
from headrace.types.media import MediaLimits, MediaPolicy


def server_defaults(config: DefaultsConfig) -> Defaults:
    given = {field.name.removeprefix("default_"): getattr(config, field.name) for field in fields(config)}
    return {name: value for name, value in given.items() if value is not None}


def media_policy(config: MediaConfig) -> MediaPolicy:
    """Where media may come from. Raises ConfigError for a media folder that does not exist."""
    root = None if config.media_root is None else Path(config.media_root).expanduser()
    if root is not None and not root.is_dir():
        raise ConfigError(f"--media-root: there is no folder {root}")
    return MediaPolicy(config.media_hosts, root, config.media_max_bytes, config.media_timeout_s)


def media_limits(config: MediaConfig) -> MediaLimits:
    return MediaLimits(
        image_pixels=config.image_max_pixels,
        video_s=config.video_max_s,
        sampled_frames=config.video_max_frames,
        fps=config.video_fps,
    )


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


def configured_text_pipeline(config: Config) -> TextPipeline | None:
    """The text pipeline of the configured model, which is downloaded if necessary; None for one that writes no text.

    Finds the model exactly as the engine will, and checks its sampling defaults as the session will. Raises ModelError.
    """
    files = model_files(config)
    if files.recipe is not None:
        return None
    model_defaults(files.generation_config)
    return load_text_pipeline(
        files.directory,
        files.model_type,
        history=config.engine.history,
        system_notes="hoist" if config.engine.system_notes == "hoist" else "stable",
        tool_format=config.models.tool_format,
    )


def configured_session(config: Config, engine: Engine, text: TextPipeline | None) -> AnySession:
    """text: None for a model that writes none."""
    if text is None:
        return EmbeddingSession.for_engine(engine)
    session = Session.for_engine(
        engine,
        text,
        prepares_turns=config.engine.prefix_cache == "on",
        media=(media_policy(config.media), media_limits(config.media)),
        defaults=server_defaults(config.defaults),
    )
    if session.takes_chats and not session.takes_tools:
        log.warning(
            "the chat template of %s shows tools, but the syntax of its calls is unknown: calls stay plain text unless "
            "--tool-format names their syntax",
            engine.model.name,
        )
    return session


def models_of_session(config: Config, session: AnySession) -> Models:
    server = config.server
    return Models.of(
        session,
        server.served_model_name,
        spec=config.model,
        takes_any_name=server.takes_any_name,
        needs_name=server.needs_name,
    )


def no_chat_model(config: Config) -> ModelError:
    return ModelError(f"{config.model} writes no text: it gives vectors or scores, which `headrace serve` serves")
