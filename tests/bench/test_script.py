"""`scripts/bench` starts a server, measures it, and leaves nothing behind. Both programs are stand-ins here."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench"
PATIENCE_S = 20

HEADRACE = """#!/usr/bin/env bash
root={root}
echo "$*" >> $root/calls
case $1 in
    serve)
        echo $$ > $root/server.pid
        {serve}
        ;;
    bench)
        {bench}
        ;;
esac
"""
LISTENS = "echo 'some model is served at http://127.0.0.1:4321/v1'; echo; echo 'curl …'; exec sleep 600"


def arrange(root: Path, serve: str = LISTENS, bench: str = "exit 0") -> list[str]:
    """A project with the script and with stand-ins; gives the command that runs the script."""
    for folder in ("scripts", ".venv/bin"):
        (root / folder).mkdir(parents=True)
    shutil.copy(SCRIPT, root / "scripts" / "bench")
    programs = {
        "scripts/setup": "#!/bin/sh\n",
        ".venv/bin/headrace": HEADRACE.format(root=root, serve=serve, bench=bench),
    }
    for name, text in programs.items():
        (root / name).write_text(text)
        (root / name).chmod(0o755)
    return [str(root / "scripts" / "bench")]


def calls(root: Path) -> list[str]:
    return (root / "calls").read_text().splitlines()


def server_is_gone(root: Path) -> bool:
    try:
        os.kill(int((root / "server.pid").read_text()), 0)
    except ProcessLookupError:
        return True
    return False


def test_the_server_is_measured_and_stopped(tmp_path: Path) -> None:
    words = arrange(tmp_path)
    subprocess.run([*words, "some/model", "--peer", "x=http://h", "--repeats", "2"], check=True, timeout=PATIENCE_S)
    serve, bench = calls(tmp_path)
    assert serve == "serve some/model --host 127.0.0.1 --port 0"
    assert bench.startswith("bench http://127.0.0.1:4321 --label headrace --workload all --json ")
    assert bench.endswith(".json --peer x=http://h --repeats 2")
    assert server_is_gone(tmp_path)


def test_without_a_model_the_default_one_is_served(tmp_path: Path) -> None:
    subprocess.run([*arrange(tmp_path), "--repeats", "2"], check=True, timeout=PATIENCE_S)
    assert calls(tmp_path)[0] == "serve --host 127.0.0.1 --port 0"


def test_a_failed_measurement_is_told_by_the_exit_code_and_the_server_is_stopped(tmp_path: Path) -> None:
    assert subprocess.run(arrange(tmp_path, bench="exit 2"), timeout=PATIENCE_S, check=False).returncode == 2
    assert server_is_gone(tmp_path)


def test_a_server_that_does_not_come_up_is_told_with_its_last_words(tmp_path: Path) -> None:
    words = arrange(tmp_path, serve="echo 'no such model' >&2; exit 2")
    ended = subprocess.run(words, timeout=PATIENCE_S, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "no such model\nThe server ended before it listened\n" in ended.stderr
    assert len(calls(tmp_path)) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_the_middle_ends_both_programs(number: signal.Signals, tmp_path: Path) -> None:
    words = arrange(tmp_path, bench="echo $$ > $root/bench.pid; echo measuring; exec sleep 600")
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "measuring\n"
        process.send_signal(number)
        try:
            assert process.wait(PATIENCE_S) == 128 + number
        finally:
            process.kill()
    assert server_is_gone(tmp_path)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "bench.pid").read_text()), 0)
