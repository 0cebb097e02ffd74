"""`headrace serve --ranks FILE` with a second host, which is this one by ssh. Skipped where no sshd is installed."""

from __future__ import annotations

import getpass
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks.test_server import PATIENCE_S, serving, wait_for

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")

pytestmark = [pytest.mark.slow, pytest.mark.skipif(SSHD is None, reason="sshd is not installed")]


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file of two hosts, the second one reached by a separate server."""
    assert SSHD is not None
    for name in ("host", "key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)], check=True)
    shutil.copy(tmp_path / "key.pub", tmp_path / "authorized")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = {
        "Port": port,
        "ListenAddress": "127.0.0.1",
        "HostKey": tmp_path / "host",
        "UsePAM": "no",
        "AuthorizedKeysFile": tmp_path / "authorized",
        "PidFile": tmp_path / "pid",
        "StrictModes": "no",
    }
    client = {
        "Host": "other",
        "HostName": "127.0.0.1",
        "Port": port,
        "User": getpass.getuser(),
        "IdentityFile": tmp_path / "key",
        "UserKnownHostsFile": tmp_path / "known",
        "StrictHostKeyChecking": "accept-new",
    }
    for name, options in (("server", server), ("client", client)):
        (tmp_path / name).write_text("".join(f"{option} {value}\n" for option, value in options.items()))
    program = tmp_path / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {tmp_path / "client"} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    found = tmp_path / "hosts.json"
    found.write_text(json.dumps([{"ssh": "localhost", "ips": ["127.0.0.1"]}, {"ssh": "other", "ips": ["127.0.0.1"]}]))
    with subprocess.Popen([SSHD, "-D", "-e", "-f", str(tmp_path / "server")], stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        try:
            process.stderr.readline()  # it listens, or says why not
            if process.poll() is not None:
                pytest.skip("sshd does not start here")
            yield found
        finally:
            process.kill()


def ranks_here() -> list[Path]:
    pattern = f"^{re.escape(sys.executable)} -m headrace.cli.rank$"
    listed = subprocess.run(["pgrep", "-f", pattern], stdout=subprocess.PIPE, text=True)
    return [Path("/proc") / each for each in listed.stdout.split()]


def test_a_rank_on_another_host_answers_and_ends_with_the_server(hosts: Path, tmp_path: Path) -> None:
    before = ranks_here()
    with serving(tmp_path / "log", "--ranks", str(hosts)) as server:
        (other,) = [each for each in ranks_here() if each not in before]
        assert server.ask()["choices"][0]["message"]["content"]
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE_S) == 0
        wait_for(lambda: not other.exists(), server)


def test_when_a_rank_on_another_host_is_killed_the_server_ends(hosts: Path, tmp_path: Path) -> None:
    before = ranks_here()
    with serving(tmp_path / "log", "--ranks", str(hosts)) as server:
        (other,) = [each for each in ranks_here() if each not in before]
        os.kill(int(other.name), signal.SIGKILL)
        assert server.process.wait(PATIENCE_S) == 2
        assert "headrace: the engine is not running: rank 1 has ended" in server.log
