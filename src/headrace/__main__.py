"""The `headrace` command, also as `python -m headrace`."""

from __future__ import annotations

import os
import signal
from importlib import import_module

_INTERRUPTED = 130


def command() -> None:
    """Run the command; it ends the process."""
    # The command's modules take a while to import, and Ctrl-C in that time would print a traceback.
    signal.signal(signal.SIGINT, lambda *_: os._exit(_INTERRUPTED))
    import_module("headrace.cli.main").command()


if __name__ == "__main__":
    command()
