"""`headrace service install | remove | status`: a server in the background, for this user, from login on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from headrace.cli.service_arguments import ServiceInstall
from headrace.cli.service_files import LABEL, Server, ServiceFile, agent_file, launchd_files, log_file, systemd_files
from headrace.errors import ConfigError

_NOT_RUNNING = 3
"""Exit code of `status`, as systemctl's."""


def run_install(asked: ServiceInstall) -> None:
    """Write the service's files and start it, replacing an earlier one. Raises ConfigError."""
    command = [sys.executable, "-m", "headrace", "serve", *asked.words]
    variables = dict.fromkeys(asked.secrets, "…") if asked.shows else {}
    server, home = Server(command, {**asked.variables, **variables}, asked.drain_s), Path.home()
    files = launchd_files(server, home) if _has_launchd() else systemd_files(server, home)
    if asked.shows:
        for file in files:
            print(f"# {file.path}\n{file.text}")
        return
    for file in files:
        _write(file)
        print(f"written: {file.path}")
    if _has_launchd():
        _make_private(log_file(home))
        _launchctl("bootout", f"{_domain()}/{LABEL}", may_fail=True)
        _launchctl("bootstrap", _domain(), str(agent_file(home)))
        print(f"started; it logs to {log_file(home)}")
        return
    _systemctl("daemon-reload")
    _systemctl("enable", LABEL)
    _systemctl("restart", LABEL)
    print(
        f"started; `journalctl --user -u {LABEL}` shows its log, `loginctl enable-linger` lets it outlive the session"
    )


def run_remove(_: None) -> None:
    """Stop the service and delete its files; its log stays. Raises ConfigError if there is none."""
    files = [file for file in _files(Path.home()) if file.exists()]
    if not files:
        raise ConfigError("no service is installed")
    if _has_launchd():
        _launchctl("bootout", f"{_domain()}/{LABEL}", may_fail=True)
    else:
        _systemctl("disable", "--now", LABEL)
    for file in files:
        file.unlink()
        print(f"removed: {file}")
    if not _has_launchd():
        _systemctl("daemon-reload")


def run_status(_: None) -> None:
    """Print whether it is installed and runs. Raises SystemExit with 3 if it doesn't run."""
    installed = _files(Path.home())[0]
    if not installed.exists():
        print("not installed")
        raise SystemExit(_NOT_RUNNING)
    print(f"installed: {installed}")
    process = _launchd_process() if _has_launchd() else _systemd_process()
    print("not running" if process is None else f"running, process {process}")
    if process is None:
        raise SystemExit(_NOT_RUNNING)


def _has_launchd() -> bool:
    return sys.platform == "darwin"


def _files(home: Path) -> list[Path]:
    """All that an installation writes, but for the log; the first is what the system reads."""
    if _has_launchd():
        return [agent_file(home)]
    return [file.path for file in systemd_files(Server((), {}, 0.0), home)]


def _write(file: ServiceFile) -> None:
    """At once, and readable by the user alone."""
    file.path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.path.with_name(f"{file.path.name}.new")
    unfinished.unlink(missing_ok=True)
    with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as stream:
        stream.write(file.text)
    unfinished.replace(file.path)


def _make_private(log: Path) -> None:
    """Before launchd makes one that everybody can read."""
    log.parent.mkdir(parents=True, exist_ok=True)
    log.touch()
    log.chmod(0o600)


def _domain() -> str:
    return f"gui/{os.getuid()}"


def _launchctl(*words: str, may_fail: bool = False) -> str:
    return _call("/bin/launchctl", *words, may_fail=may_fail)


def _systemctl(*words: str) -> str:
    return _call("systemctl", "--user", *words)


def _call(*words: str, may_fail: bool = False) -> str:
    """What a command prints. Raises ConfigError if it fails."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{words[0]} can't be used: {error}") from error
    if done.returncode and not may_fail:
        told = (done.stderr or done.stdout).strip().partition("\n")[0]
        raise ConfigError(f"`{' '.join(words)}` failed: {told}")
    return done.stdout


def _launchd_process() -> int | None:
    fields = _fields(_launchctl("print", f"{_domain()}/{LABEL}", may_fail=True), " = ")
    return int(fields["pid"]) if fields.get("pid", "").isdecimal() else None


def _systemd_process() -> int | None:
    fields = _fields(_systemctl("show", LABEL, "--property=MainPID,ActiveState"), "=")
    is_running = fields.get("ActiveState") == "active" and fields.get("MainPID", "0") != "0"
    return int(fields["MainPID"]) if is_running else None


def _fields(text: str, separator: str) -> Mapping[str, str]:
    """Of lines `name = value`, the first of each name."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        name, is_field, value = line.strip().partition(separator)
        if is_field:
            found.setdefault(name, value)
    return found
