"""`headrace doctor [MODEL]`."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.backend.doctor import machine_report
from headrace.config import load_config
from headrace.engine.engine import diagnose


def run(argv: Sequence[str]) -> None:
    """Prints what the machine can do and, for a model, how it would run. Raises ConfigError and ModelError."""
    config = load_config(
        argv,
        program="headrace doctor",
        about="Say what this machine can do and, with MODEL, how that model would run on it.",
        sections=("models", "engine"),
        default_model="",
    )
    for line in machine_report(config.models.numerics):
        print(line, flush=True)
    if config.model:
        for line in diagnose(config):
            print(line, flush=True)
