"""What runs `headrace serve` in the background: an agent for launchd on macOS, a user's unit for systemd on Linux."""

from __future__ import annotations

import plistlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

LABEL = "headrace"
"""The service's name, to launchd and to systemd."""

_AWAKE = '/usr/bin/caffeinate -s -w $$ & exec "$@"'
"""A shell's line that keeps a Mac on mains power awake for as long as the program runs that takes the shell's place."""

_STOP_S = 15
"""Beyond `--drain-seconds`, until a server that has not ended is killed."""


@dataclass(frozen=True, slots=True)
class ServiceFile:
    """For the user's eyes only: it may hold keys."""

    path: Path
    text: str


@dataclass(frozen=True, slots=True)
class Server:
    """A process to run. command: with absolute paths. variables: its environment beside what the system sets."""

    command: Sequence[str]
    variables: Mapping[str, str]
    drain_s: float


def launchd_files(server: Server, home: Path) -> tuple[ServiceFile, ...]:
    """It starts at login, and again after a crash; what it prints goes to `log_file`."""
    log = str(log_file(home))
    agent = {
        "Label": LABEL,
        "ProgramArguments": ["/bin/sh", "-c", _AWAKE, LABEL, *server.command],
        "EnvironmentVariables": dict(server.variables),
        "WorkingDirectory": str(home),
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ExitTimeOut": int(server.drain_s) + _STOP_S,
        # launchd throttles the processor and the disk of other types
        "ProcessType": "Interactive",
        "StandardOutPath": log,
        "StandardErrorPath": log,
    }
    return (ServiceFile(agent_file(home), plistlib.dumps(agent, sort_keys=False).decode()),)


def agent_file(home: Path) -> Path:
    return home / "Library" / "LaunchAgents" / f"{LABEL}.plist"


def log_file(home: Path) -> Path:
    """Of launchd's agent; systemd keeps a journal."""
    return home / "Library" / "Logs" / f"{LABEL}.log"


def systemd_files(server: Server, home: Path) -> tuple[ServiceFile, ...]:
    """It starts at login, and again after a crash; what it prints goes to the journal."""
    variables = home / ".config" / "headrace" / "service.env"
    unit = f"""[Unit]
Description=Headrace, an inference server for MLX models

[Service]
ExecStart={" ".join(map(_quoted, server.command))}
EnvironmentFile={_specifier_free(str(variables))}
WorkingDirectory={_specifier_free(str(home))}
Restart=on-failure
RestartSec=10
TimeoutStopSec={int(server.drain_s) + _STOP_S}

[Install]
WantedBy=default.target
"""
    lines = [f"{name}={_quoted_value(value)}\n" for name, value in server.variables.items()]
    return ServiceFile(unit_file(home), unit), ServiceFile(variables, "".join(lines))


def unit_file(home: Path) -> Path:
    return home / ".config" / "systemd" / "user" / f"{LABEL}.service"


def _quoted(word: str) -> str:
    """A word of ExecStart, see systemd.service(5): C-like escapes, `%` and `$` doubled."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
    return f'"{_specifier_free(escaped).replace("$", "$$")}"'


def _specifier_free(text: str) -> str:
    return text.replace("%", "%%")


def _quoted_value(value: str) -> str:
    """A value of an EnvironmentFile, see systemd.exec(5); a shell reads it alike."""
    return '"' + re.sub(r'(["\\`$])', r"\\\1", value) + '"'
