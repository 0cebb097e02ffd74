"""Real weights, the real command, the official SDK: what a person meets on a fresh machine."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import openai
import pytest

MOST_LINES = 60
"""Start-up lines to read before giving up."""


@pytest.fixture(scope="module")
def server_url() -> Iterator[str]:
    """The address of `headrace serve` with its default model, which is fetched on first use."""
    command = [sys.executable, "-m", "headrace", "serve", "smollm2", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        assert server.stdout is not None
        said = []
        for line in server.stdout:
            said.append(line)
            if (found := re.search(r"is served at (\S+)", line)) or len(said) > MOST_LINES:
                break
        try:
            assert found, "".join(said)
            yield found[1]
        finally:
            server.send_signal(signal.SIGINT)
            server.communicate(timeout=60)
    assert server.returncode == 0


def test_the_capital_of_france_is_paris(server_url: str) -> None:
    with openai.OpenAI(base_url=server_url, api_key="none") as client:
        stream = client.chat.completions.create(
            model="SmolLM2-135M-Instruct",
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            temperature=0,
            max_tokens=24,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
    pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    assert "Paris" in "".join(piece for piece in pieces if piece)
    assert sum(bool(piece) for piece in pieces) > 3
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens == sum(bool(piece) for piece in pieces) + 1  # and the end token


def test_a_conversation_goes_on(server_url: str) -> None:
    messages = [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "The capital of France is Paris."},
        {"role": "user", "content": "And of Italy?"},
    ]
    with openai.OpenAI(base_url=server_url, api_key="none") as client:
        answer = client.chat.completions.create(
            model="SmolLM2-135M-Instruct", messages=messages, temperature=0, max_tokens=24
        )
    assert "Rome" in (answer.choices[0].message.content or "")
