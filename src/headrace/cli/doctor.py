"""`headrace doctor [MODEL]`."""

from __future__ import annotations

from pathlib import Path

from headrace.backend.device import current
from headrace.backend.doctor import machine_report
from headrace.cli.text_pipeline import configured_text_pipeline, without_missing_vision
from headrace.cli.verdict import fit, resources
from headrace.config import Config, warn_of_unknown_variables
from headrace.engine.engine import Engine, model_files
from headrace.session.session import Session

_UNUSABLE = 1


def run(config: Config) -> None:
    """Prints what the machine can do, how a model would run on it, and what to do for the better.

    Raises ConfigError and ModelError, and SystemExit with 1 for a model that can't fit.
    """
    warn_of_unknown_variables()
    for line in machine_report(config.models.numerics):
        print(line, flush=True)
    found = resources(current(), Path(config.models.model_folder).expanduser())
    for line in found.lines():
        print(line, flush=True)
    if config.model:
        files = model_files(config)
        fitting = fit(files, found.device, config.engine.gpu_memory_utilization)
        for line in fitting.lines():
            print(line, flush=True)
        if not fitting.fits:
            print("take a model in fewer bits, a smaller one, or a larger --gpu-memory-utilization")
            raise SystemExit(_UNUSABLE)
        for line in _model_report(config):
            print(line, flush=True)
    advice = list(found.advice())
    print("\n".join(["", "what to do:", *(f"- {line}" for line in advice)]) if advice else "\nall well")


def _model_report(config: Config) -> list[str]:
    """Load the model as the server would and report on it."""
    config = without_missing_vision(config)
    text = configured_text_pipeline(config)
    engine = Engine.launch(config, text.constraints)
    try:
        return [*engine.model.report, *Session.over(engine, text).notes]
    finally:
        engine.stop()
