"""Each fenced command of README and docs that needs no network runs here as it is written, with the miniature as MODEL.

A folder stands for the repository's root, and a hub on this machine for Hugging Face.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import yaml
from fake_hub import fake_hub
from pages import ROOT, Block, blocks, without_options

from headrace.models.built_in import MINIATURE

PATIENCE_S = 240
SHELL, PROGRAMS, DATA = ("", "sh"), ("python",), ("json", "yaml", "toml", "dotenv")

CANNOT = {
    "scripts/test": "long: it runs these tests",
    "scripts/bench MODEL --peer": "network: its peers are other packages; tests/bench/test_script.py runs the script",
    "pip install": "network; tests/first_minutes runs it",
    "npm install": "network",
    "npx promptfoo": "network: not installed here",
    "HF_HUB_OFFLINE=1 guidellm": "network: not installed here",
    "lm_eval run": "network: not installed here",
    "python3 -m venv a ": "network: it installs a peer",
    "python3 -m venv b ": "network: it installs a peer",
    "HF_HUB_OFFLINE=1 a/bin/mlx_lm.server": "network: not installed here",
    "HF_HUB_OFFLINE=1 b/bin/vllm-mlx": "network: not installed here",
    "python -m benchmarks.model --shape qwen3.5": "long: billions of weights",
    ".venv/bin/python -m benchmarks.model --shape qwen3.5": "long: billions of weights",
    ".venv/bin/python -m benchmarks.kernels": "long; tests/perf runs its cases",
    "claude": "a program of another maker",
    "codex": "a program of another maker",
    "OPENCODE_CONFIG": "a program of another maker",
    "QWEN_CODE": "a program of another maker",
    "CLINE_": "a program of another maker",
    "CONTINUE_": "a program of another maker",
    "aider": "a program of another maker",
    "LLM_USER_PATH": "a program of another maker",
    "headrace serve Qwen/Qwen3-8B Qwen/Qwen3-Embedding": "network: gigabytes",
    "headrace launch claude": "a program of another maker; tests/cli/test_launch_clients.py runs it if it is there",
    ".venv/bin/headrace launch claude": "a program of another maker",
    "headrace launch codex": "a program of another maker",
}
"""How commands begin that are not run, and why."""

STANDS_FOR = {
    "MODEL": "miniature",
    "DRAFT": "miniature-draft",
    "SOURCE": "miniature",
    "OUT": "head",
    "NAME": "headrace-miniature",
    "FILE": "report.json",
}


SHORTER = " --repeats 1 --prompt-tokens 200"


def commands() -> list[tuple[str, str]]:
    """Page and command, in the order of the pages; one that is written on several lines is joined.

    Variables that a block sets for a program of another maker are no commands.
    """
    shells = [block for block in blocks() if block.language in SHELL]
    lines = [(each.page, line.strip()) for each in shells for line in each.text.replace("\\\n", " ").splitlines()]
    return list(
        dict.fromkeys(
            (page, re.sub(r"\s+#.*| +(?= )", "", line))
            for page, line in lines
            if line and not line.startswith("export ")
        )
    )


def reason_against(line: str) -> str | None:
    return next((reason for start, reason in CANNOT.items() if line.startswith(start)), None)


@dataclass(frozen=True)
class Sandbox:
    """url: of a server with the miniature."""

    folder: Path
    url: str
    environ: dict[str, str]

    def start(self, line: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", "-ec", line],
            cwd=self.folder,
            env=self.environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    folder = tmp_path_factory.mktemp("root")
    shutil.copytree(ROOT / "scripts", folder / "scripts")
    # The real one would install.
    (folder / "scripts" / "setup").write_text("#!/bin/sh\n")
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name, module in (("headrace", "-m headrace"), ("python", "")):
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {module} "$@"\n')
        (programs / name).chmod(0o755)
    (folder / "benchmarks").symlink_to(ROOT / "benchmarks")
    (folder / "models").mkdir()
    (folder / "models" / "small").symlink_to(MINIATURE)
    (folder / "models.toml").write_text("[models.miniature]\n")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("HEADRACE_", "HF_"))}
    environ |= {"HOME": str(folder), "PATH": f"{programs}:{environ['PATH']}", "HEADRACE_PORT": "0"}
    with fake_hub({"mlx-community/Qwen3-4B-4bit": MINIATURE}) as hub:
        environ |= {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        started = Sandbox(folder, "", environ).start("exec headrace serve")
        with stopped(started):
            yield Sandbox(folder, address(started), environ)


@contextmanager
def stopped(server: subprocess.Popen[str]) -> Iterator[None]:
    """Ends a server with Ctrl-C in the end, and holds it to an orderly exit."""
    timer = threading.Timer(PATIENCE_S, os.killpg, (server.pid, signal.SIGKILL))
    timer.start()
    try:
        yield
        os.killpg(server.pid, signal.SIGINT)
        output, _ = server.communicate()
        assert server.returncode == 0, output
    finally:
        timer.cancel()
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
            server.communicate()


def variables(text: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in shlex.split(text))


def address(server: subprocess.Popen[str]) -> str:
    """Where a server listens, once it does."""
    assert server.stdout is not None
    shown = []
    for line in server.stdout:
        shown.append(line)
        if (match := re.search(r"(?:is|are) served at (http://\S+)/v1(?:;|$)", line)) is not None:
            return match[1]
    raise AssertionError("".join(shown))


def filled_in(line: str, url: str) -> str:
    """With a model, a server and files for the names in capitals."""
    line = without_options(line).replace("http://127.0.0.1:8080", url).replace("--port 9000", "--port 0")
    line = re.sub(r"\bURL\b", url, line) + (SHORTER if "headrace bench" in line else "")
    return re.sub(r"\b[A-Z]{3,}\b(?![=_])", lambda match: STANDS_FOR.get(match[0], match[0]), line)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "line"), [each for each in commands() if reason_against(each[1]) is None], ids=lambda value: value[:70]
)
def test_a_command_does_what_the_page_says(page: str, line: str, sandbox: Sandbox) -> None:
    process = sandbox.start(filled_in(line, sandbox.url))
    if re.search(r"(headrace|scripts/)\s?serve\b", line):
        with stopped(process):
            assert httpx.get(f"{address(process)}/health").status_code == 200
        return
    said = "Hello!\n/bye\n" if "headrace chat" in line else ""
    try:
        output, _ = process.communicate(said, timeout=PATIENCE_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output
    if said:
        assert "tokens/s" in output


def test_every_reason_against_a_command_is_needed() -> None:
    lines = [line for _, line in commands()]
    assert [start for start in CANNOT if not any(line.startswith(start) for line in lines)] == []


@pytest.mark.parametrize(
    "block", [each for each in blocks() if each.language in DATA], ids=lambda block: f"{block.page}-{block.language}"
)
def test_a_settings_file_parses(block: Block) -> None:
    parsers = {"json": json.loads, "yaml": yaml.safe_load, "toml": tomllib.loads, "dotenv": variables}
    parse = parsers[block.language]
    assert parse(block.text)


@pytest.mark.parametrize(
    "block", [each for each in blocks() if each.language in PROGRAMS], ids=lambda block: f"{block.page}"
)
def test_a_program_runs(block: Block) -> None:
    exec(compile(block.text, block.page, "exec"), {})


def test_no_block_is_of_a_kind_that_is_left_out() -> None:
    assert {each.language for each in blocks()} <= {*SHELL, *PROGRAMS, *DATA, "mermaid"}
