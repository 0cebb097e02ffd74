"""`headrace doctor [MODEL]`."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.backend.doctor import machine_report
from headrace.cli.text_pipeline import configured_text_pipeline
from headrace.config import Config, load_config, warn_of_unknown_variables
from headrace.engine.engine import Engine
from headrace.session.session import Session


def run(argv: Sequence[str]) -> None:
    """Prints what the machine can do and, for a model, how it would run. Raises ConfigError and ModelError."""
    config = load_config(
        argv,
        program="headrace doctor",
        about="Say what this machine can do and, with MODEL, how that model would run on it.",
        sections=("models", "engine"),
        default_model="",
    )
    warn_of_unknown_variables()
    for line in machine_report(config.models.numerics):
        print(line, flush=True)
    if config.model:
        for line in _model_report(config):
            print(line, flush=True)


def _model_report(config: Config) -> list[str]:
    """Loads the model as the server would and says what came of it."""
    text = configured_text_pipeline(config)
    engine = Engine.launch(config, text.constraints)
    try:
        return [*engine.model.report, *Session.over(engine, text).notes]
    finally:
        engine.stop()
