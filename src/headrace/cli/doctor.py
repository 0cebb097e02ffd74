"""`headrace doctor [MODEL]`."""

from __future__ import annotations

from pathlib import Path

from headrace.backend.device import current
from headrace.backend.doctor import machine_report
from headrace.cli.text_pipeline import configured_text_pipeline, without_missing_vision
from headrace.cli.verdict import Resources, fit, resources
from headrace.config import Config, warn_of_unknown_variables
from headrace.engine.engine import Engine
from headrace.engine.prepare import preview
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
        _report_model(config, found)
    advice = list(found.advice())
    print("\n".join(["", "what to do:", *(f"- {line}" for line in advice)]) if advice else "\nall well")


def _report_model(config: Config, here: Resources) -> None:
    """Loads the model only if it fits and its weights are on this machine."""
    fitting = fit(preview(config), here.device, config.engine.gpu_memory_utilization, config.models.dtype)
    for line in fitting.lines():
        print(line, flush=True)
    if not fitting.fits:
        raise SystemExit(_UNUSABLE)
    if fitting.missing_bytes:
        print(f"`headrace serve {config.model}` fetches the weights; after that, doctor also says how each layer runs")
        return
    for line in _loaded_report(config):
        print(line, flush=True)


def _loaded_report(config: Config) -> list[str]:
    """Load the model as the server would and report on it."""
    config = without_missing_vision(config)
    text = configured_text_pipeline(config)
    engine = Engine.launch(config, text.constraints)
    try:
        return [*engine.model.report, *Session.over(engine, text).notes]
    finally:
        engine.stop()
