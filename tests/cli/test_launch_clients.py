"""`headrace launch` with the real clients, where they are installed: each gets an answer from the given server."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from clients.recording import ONE_SHOT, PATH, launch, recording
from clients.served import ANSWER, served

from headrace.clients.registry import CLIENTS

QUICK = {"llm"}


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in ONE_SHOT]
)
def test_a_real_client_gets_an_answer(name: str, tmp_path: Path) -> None:
    client = CLIENTS[name]
    if shutil.which(client.command, path=PATH) is None:
        pytest.skip(f"{client.title} is not installed: {client.install}")
    with served("right", name='odd "name"') as url, recording(url) as proxy:
        ended = launch(name, proxy.url, "right", tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ANSWER in ended.stdout
    asked = [each for each in proxy.requests if each["method"] == "POST"]
    assert {each["fields"]["model"] for each in asked} == {'odd "name"'}
    assert {each["status"] for each in asked} == {200}
