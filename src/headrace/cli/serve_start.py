"""`headrace serve [MODEL]`: starts the engines' process, which imports MLX while this one imports the server."""

from __future__ import annotations

from contextlib import closing

from headrace.cli.installed import import_command
from headrace.cli.serve_plan import ServePlan
from headrace.engine.remote import EngineProcess


def run(plan: ServePlan) -> None:
    """See `headrace.cli.serve.run`."""
    with closing(EngineProcess()) as process:
        import_command("headrace.cli.serve").run(plan, process)
