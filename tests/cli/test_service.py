"""`headrace service`: the files that it writes, and what they run. Its agent for launchd was never loaded on a Mac."""

from __future__ import annotations

import json
import os
import plistlib
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from headrace.cli import service
from headrace.cli.commands import find_command
from headrace.cli.main import main
from headrace.cli.service_arguments import parse_install
from headrace.cli.service_files import Server, agent_file, launchd_files, log_file, systemd_files, unit_file
from headrace.errors import ConfigError

ODD = ["a b", 'say "x"', "50%", "$HOME ${x}", "back\\slash", "it's", "tab\tand\nline", "ünï", "%h", "`id`", "-x", ""]
KEY = 'k"ey $1`\\'


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    return tmp_path


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What was asked of launchctl and systemctl, which answer nothing."""
    found: list[list[str]] = []

    def run(words: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        found.append(list(words))
        return subprocess.CompletedProcess(words, 0, "", "")

    monkeypatch.setattr(service.subprocess, "run", run)
    return found


def unit_of(home: Path, command: list[str], variables: dict[str, str]) -> dict[str, str]:
    """The fields of the unit."""
    unit, _ = systemd_files(Server(command, variables, 5.0), home)
    return dict(line.partition("=")[::2] for line in unit.text.splitlines() if "=" in line)


def words_of(line: str) -> list[str]:
    """What systemd.service(5) makes of an ExecStart."""
    words = re.findall(r'"((?:[^"\\]|\\.)*)"', line)
    escapes = {"\\\\": "\\", '\\"': '"', "\\n": "\n", "\\t": "\t", "%%": "%", "$$": "$"}
    return [re.sub(r"\\[\\\"nt]|%%|\$\$", lambda match: escapes[match[0]], word) for word in words]


def test_an_agent_has_the_words_as_they_are_given(tmp_path: Path) -> None:
    (file,) = launchd_files(Server(ODD, {"HEADRACE_API_KEY": KEY}, 30.0), tmp_path)
    agent = plistlib.loads(file.text.encode())
    assert agent["ProgramArguments"][-len(ODD) :] == ODD
    assert agent["EnvironmentVariables"] == {"HEADRACE_API_KEY": KEY}
    assert agent["RunAtLoad"] is True
    assert agent["KeepAlive"] == {"SuccessfulExit": False}
    assert agent["ExitTimeOut"] > 30
    assert file.path == agent_file(tmp_path)


def test_an_agents_shell_becomes_the_server(tmp_path: Path) -> None:
    """With a program instead of caffeinate: the server has the process that launchd will signal, and its words."""
    (file,) = launchd_files(
        Server([sys.executable, "-c", "import os, sys; print(os.getpid(), sys.argv[1:])", *ODD], {}, 5), tmp_path
    )
    words = plistlib.loads(file.text.encode())["ProgramArguments"]
    assert words[2].startswith("/usr/bin/caffeinate ")
    watcher = tmp_path / "caffeinate"
    watcher.write_text(f'#!/bin/sh\necho "$*" >{tmp_path}/watched\n')
    watcher.chmod(0o755)
    words[2] = words[2].replace("/usr/bin/caffeinate", shlex.quote(str(watcher)))
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.read() == f"{process.pid} {ODD}\n"
    for _ in range(1000):
        if (tmp_path / "watched").exists() and (tmp_path / "watched").read_text():
            break
        time.sleep(0.01)
    assert (tmp_path / "watched").read_text() == f"-s -w {process.pid}\n"


def test_a_unit_has_the_words_as_they_are_given(tmp_path: Path) -> None:
    assert words_of(unit_of(tmp_path, ODD, {})["ExecStart"]) == ODD


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_finds_no_fault_in_a_unit(tmp_path: Path) -> None:
    for file in systemd_files(Server([sys.executable, "-m", "headrace", *ODD], {"A": KEY}, 5.0), tmp_path):
        file.path.parent.mkdir(parents=True, exist_ok=True)
        file.path.write_text(file.text)
    command = ["systemd-analyze", "verify", "--man=no", "--user", str(unit_file(tmp_path))]
    environ = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, [line for line in done.stderr.splitlines() if "headrace" in line]) == (0, [])


def test_a_file_of_variables_is_read_by_a_shell_alike(tmp_path: Path) -> None:
    values = {f"V{number}": value for number, value in enumerate([*ODD, KEY])}
    _, file = systemd_files(Server([], values, 5.0), tmp_path)
    file.path.parent.mkdir(parents=True)
    file.path.write_text(file.text)
    show = f"{sys.executable} -c 'import json, os; print(json.dumps(dict(os.environ)))'"
    script = f"set -a; . {shlex.quote(str(file.path))}; exec {show}"
    shown = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=60, check=True).stdout
    assert {name: value for name, value in json.loads(shown).items() if name in values} == values


def test_keys_become_variables_and_folders_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    environ = {
        "HEADRACE_MEDIA_ROOT": "pictures",
        "HEADRACE_PORT": "9000",
        "HEADRACE_CACHE_DIR": "unused",
        "HF_TOKEN": "hf",
        "https_proxy": "http://u:p@proxy",
        "LANG": "C",
    }
    words = [
        "model",
        "--api-key",
        KEY,
        "--cache-dir=kept",
        "--no-self-check",
        "--allowed-origin",
        "a",
        "--allowed-origin=b",
    ]
    found = parse_install(words, environ)
    assert sorted(found.words) == sorted(
        [
            str(tmp_path / "model"),
            "--no-self-check",
            f"--cache-dir={tmp_path / 'kept'}",
            "--allowed-origin=a",
            "--allowed-origin=b",
        ]
    )
    assert found.variables == {
        "HEADRACE_API_KEY": KEY,
        "HEADRACE_MEDIA_ROOT": str(tmp_path / "pictures"),
        "HEADRACE_PORT": "9000",
        "HF_TOKEN": "hf",
        "https_proxy": "http://u:p@proxy",
    }
    assert set(found.secrets) == {"HEADRACE_API_KEY", "HF_TOKEN", "https_proxy"}
    # and it is what `serve` would have been given
    command, rest = find_command(["serve", *found.words])
    assert command.parse(rest).config.engine.cache_dir == str(tmp_path / "kept")


def test_several_models_their_file_and_their_folders_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("local", "many/a"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "small").mkdir()  # the file's name precedes the folder's
    (tmp_path / "models.toml").write_text('drain-seconds = 7\n[models.small]\nmodel = "miniature"\n')
    given = [
        "small",
        "local",
        "org/name",
        "--models-file",
        "models.toml",
        "--models-dir=many",
        "--adapter",
        "x=adapter",
    ]
    found = parse_install(given, {"HEADRACE_DRAFT_MODEL": "local"})
    assert sorted(found.words) == sorted(
        [
            "small",
            f"{tmp_path / 'local'}",
            "org/name",
            f"--models-file={tmp_path / 'models.toml'}",
            f"--models-dir={tmp_path / 'many'}",
            f"--adapter=x={tmp_path / 'adapter'}",
        ]
    )
    assert found.variables == {"HEADRACE_DRAFT_MODEL": str(tmp_path / "local")}
    assert found.drain_s == 7
    # nothing is added to what a file or a folder names
    assert parse_install(["--models-file", "models.toml"], {}).words == [f"--models-file={tmp_path / 'models.toml'}"]
    of_environment = parse_install([], {"HEADRACE_MODELS_FILE": "models.toml"})
    assert (of_environment.words, of_environment.variables) == (
        [],
        {"HEADRACE_MODELS_FILE": str(tmp_path / "models.toml")},
    )
    assert parse_install([], {}).words == ["miniature"]
    with pytest.raises(ConfigError, match="no-such.toml: No such file"):
        parse_install(["--models-file", "no-such.toml"], {})


def test_a_flag_that_serve_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="--prot"):
        parse_install(["--prot", "1"], {})


@pytest.mark.parametrize("platform", ["darwin", "linux"])
def test_installing_and_removing_leave_what_they_say(
    platform: str,
    home: Path,
    calls: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(service.sys, "platform", platform)
    assert main(["service", "status"]) == 3
    assert main(["service", "remove"]) == 2
    for _ in range(2):  # a second time replaces the first
        assert main(["service", "install", "miniature", "--api-key", KEY]) == 0
    written = {path for path in home.rglob("*") if path.is_file()}
    own = (
        {agent_file(home), log_file(home)}
        if platform == "darwin"
        else {unit_file(home), home / ".config/headrace/service.env"}
    )
    assert written == own
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in written)
    capsys.readouterr()
    assert main(["service", "remove"]) == 0
    assert {path for path in home.rglob("*") if path.is_file()} == ({log_file(home)} if platform == "darwin" else set())
    domain = f"gui/{os.getuid()}"
    per_install = {
        "darwin": [
            ["/bin/launchctl", "bootout", f"{domain}/headrace"],
            ["/bin/launchctl", "bootstrap", domain, str(agent_file(home))],
        ],
        "linux": [
            ["systemctl", "--user", *words]
            for words in (["daemon-reload"], ["enable", "headrace"], ["restart", "headrace"])
        ],
    }[platform]
    assert calls[: 2 * len(per_install)] == 2 * per_install


@pytest.mark.parametrize("platform", ["darwin", "linux"])
def test_printing_writes_nothing_and_shows_no_key(
    platform: str,
    home: Path,
    calls: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(service.sys, "platform", platform)
    assert main(["service", "install", "--print", "--api-key", "secret", "--port", "9000"]) == 0
    shown = capsys.readouterr().out
    assert "--port=9000" in shown
    assert "HEADRACE_API_KEY" in shown
    assert "secret" not in shown
    assert list(home.iterdir()) == calls == []


@pytest.mark.parametrize(
    ("platform", "answer", "code"),
    [
        ("darwin", "headrace = {\n\tactive count = 1\n\tstate = running\n\tpid = 77\n}", 0),
        ("darwin", "headrace = {\n\tstate = not running\n}", 3),
        ("linux", "MainPID=77\nActiveState=active\n", 0),
        ("linux", "MainPID=0\nActiveState=failed\n", 3),
    ],
)
def test_the_status_is_what_the_system_says(
    platform: str,
    answer: str,
    code: int,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(service.sys, "platform", platform)
    installed = agent_file(home) if platform == "darwin" else unit_file(home)
    installed.parent.mkdir(parents=True)
    installed.write_text("")
    done = subprocess.CompletedProcess([], 0, answer, "")
    monkeypatch.setattr(service.subprocess, "run", lambda words, **_: done)
    assert main(["service", "status"]) == code
    assert ("running, process 77" in capsys.readouterr().out) == (code == 0)


def test_a_system_that_refuses_is_quoted(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = subprocess.CompletedProcess([], 1, "", "Failed to connect to bus: No medium found\n")
    monkeypatch.setattr(service.sys, "platform", "linux")
    monkeypatch.setattr(service.subprocess, "run", lambda words, **_: refused)
    assert main(["service", "install", "miniature"]) == 2
    assert "`systemctl --user daemon-reload` failed: Failed to connect to bus" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="the unit is systemd's")
def test_what_a_unit_runs_serves_and_asks_for_the_key(tmp_path: Path) -> None:
    asked = parse_install(["miniature", "--port", "0", "--no-self-check", "--api-key", KEY], {})
    command = [sys.executable, "-m", "headrace", "serve", *asked.words]
    unit, variables = systemd_files(Server(command, asked.variables, asked.drain_s), tmp_path)
    variables.path.parent.mkdir(parents=True)
    variables.path.write_text(variables.text)
    (line,) = re.findall("^ExecStart=(.*)$", unit.text, re.MULTILINE)
    script = f"set -a; . {shlex.quote(str(variables.path))}; exec {shlex.join(words_of(line))}"
    process = subprocess.Popen(["sh", "-c", script], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    timer = threading.Timer(120, process.kill)
    timer.start()
    try:
        assert process.stdout is not None
        url = next(match[1] for line in process.stdout if (match := re.search(r"is served at (http://\S+)/v1$", line)))
        assert httpx.get(f"{url}/v1/models").status_code == 401
        assert httpx.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {KEY}"}).status_code == 200
        process.send_signal(signal.SIGTERM)  # as systemd stops it
        assert process.wait(60) in (0, 143)
    finally:
        timer.cancel()
        process.kill()
        process.communicate()
