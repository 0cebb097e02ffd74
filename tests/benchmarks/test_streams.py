"""Streamed messages cost the event loop few calls."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_message_takes_few_calls() -> None:
    words = "-m benchmarks.streams --profile --streams 16 --steps 50 --rounds 1 --dialect chat-tools".split()
    run = subprocess.run([sys.executable, *words], cwd=ROOT, check=True, capture_output=True, text=True)
    found = re.search(r"^all .* ([0-9.]+) calls a message$", run.stdout, re.MULTILINE)
    assert found is not None
    # one call for the socket, at least; it was 227 with a search for markers in each token
    assert 1 < float(found[1]) < 140
