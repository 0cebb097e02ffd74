"""A model's words before its weights: what can't be served is known before minutes go into loading."""

from __future__ import annotations

from headrace.config import Config
from headrace.engine.engine import model_files
from headrace.session.settings import model_defaults
from headrace.session.words import Words, load_words


def configured_words(config: Config) -> Words:
    """The words of the configured model, which is fetched if need be. Raises ModelError.

    Finds the model exactly as the engine will, and looks at its sampling defaults as the session will.
    """
    files = model_files(config)
    model_defaults(files.generation_config)
    return load_words(
        files.directory,
        files.model_type,
        history=config.engine.history,
        system_notes="hoist" if config.engine.system_notes == "hoist" else "stable",
        tool_format=config.models.tool_format,
    )
