"""Sends inputs to a server, several at once, and finds out what went wrong.

A stall of /health counts only if it comes back: the inputs that were under way are sent again, together, twice.
On a machine that others use too, a probe may wait for a core for long; that does not come back with the inputs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from attack.health import probed
from attack.inputs import Input
from attack.running import RunningServer

STALL_S = 0.5
NUM_AT_ONCE = 4
NUM_REPEATS = 2


@dataclass
class Findings:
    """What came of an attack. worst_s: the longest that /health took. faults, stalls: a line each."""

    worst_s: float = 0.0
    faults: list[str] = field(default_factory=list)
    stalls: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Sent:
    """An input that was sent, and when. faults: what was wrong with what came back."""

    input: Input
    began: float
    ended: float
    faults: list[str]


def attack(server: RunningServer, inputs: Sequence[Input], *, num_at_once: int = NUM_AT_ONCE) -> Findings:
    findings, suspects = _attack_once(server, inputs, num_at_once)
    for repeated in suspects:
        again = [_attack_once(server, repeated, num_at_once)[0].worst_s for _ in range(NUM_REPEATS)]
        if server.is_alive and min(again) > STALL_S:
            names = ", ".join(each.name for each in repeated)
            findings.stalls.append(f"/health took {', '.join(f'{each:.2f}' for each in again)} s during: {names}")
    return findings


def _attack_once(
    server: RunningServer, inputs: Sequence[Input], num_at_once: int
) -> tuple[Findings, list[Sequence[Input]]]:
    """What came of it, and for each time that /health stalled the inputs under way."""
    with probed(server.address) as health, ThreadPoolExecutor(num_at_once) as pool:
        sent = list(pool.map(lambda each: _send(server, each), inputs))
    findings = Findings(health.worst_s, [fault for each in sent for fault in each.faults])
    if not server.is_alive:
        findings.faults.append(f"the server ended with {server.process.returncode}: {server.log_text()[-1500:]}")
    suspects = {
        tuple(each.input for each in sent if each.began < stall.sent + stall.latency_s and each.ended > stall.sent)
        for stall in health.stalls(STALL_S)
    }
    return findings, [each for each in suspects if each]


def _send(server: RunningServer, each: Input) -> _Sent:
    began = time.monotonic()
    try:
        faults = each.faults(each.act(server))
    except OSError as error:
        faults = [f"{each.name}: {error!r}"]
    took_s = time.monotonic() - began
    return _Sent(each, began, began + took_s, faults)
