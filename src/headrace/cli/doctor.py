"""`headrace doctor [MODEL]`."""

from __future__ import annotations

from headrace.backend.doctor import machine_report
from headrace.cli.text_pipeline import configured_text_pipeline, without_missing_vision
from headrace.config import Config, warn_of_unknown_variables
from headrace.engine.engine import Engine
from headrace.session.session import Session


def run(config: Config) -> None:
    """Prints what the machine can do and, for a model, how it would run. Raises ConfigError and ModelError."""
    warn_of_unknown_variables()
    for line in machine_report(config.models.numerics):
        print(line, flush=True)
    if config.model:
        for line in _model_report(config):
            print(line, flush=True)


def _model_report(config: Config) -> list[str]:
    """Load the model as the server would and report on it."""
    config = without_missing_vision(config)
    text = configured_text_pipeline(config)
    engine = Engine.launch(config, text.constraints)
    try:
        return [*engine.model.report, *Session.over(engine, text).notes]
    finally:
        engine.stop()
