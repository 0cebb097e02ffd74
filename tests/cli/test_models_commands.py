"""`headrace pull`, `list`, `show` and `remove`, with a hub on this machine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pexpect
import pytest
from fake_hub import FakeHub, fake_hub, use_hub

from headrace.backend.device import Device
from headrace.cli import fit as fit_module
from headrace.cli import local_models, pull, show
from headrace.cli.download_progress import bar
from headrace.cli.main import main
from headrace.models import hub as hub_module
from headrace.models.built_in import MINIATURE
from headrace.models.hub import cache_of, local_copy

GB = 1_000_000_000
SMALL = Device("cpu", "Some CPU", 10_000_000, 8)
PATIENCE_S = 60
EMBEDDING = Path(__file__).parents[1] / "data" / "embedding" / "bert_dense"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Holds a copy of the miniature; the cache is empty, and Headrace's folder."""
    folder = tmp_path / "model"
    shutil.copytree(MINIATURE, folder, ignore=shutil.ignore_patterns("draft"))
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    (folder / "pytorch_model.bin").write_bytes(bytes(1000))
    bert = tmp_path / "bert"
    bert.mkdir()
    (bert / "config.json").write_text(json.dumps({"model_type": "no_such_model"}))
    (bert / "model.safetensors").write_bytes(bytes(1000))
    with fake_hub({"owner/name": folder, "owner/unknown": bert}) as hub:
        use_hub(monkeypatch, hub.url, tmp_path / "cache")
        monkeypatch.setenv("HEADRACE_MODEL_FOLDER", str(tmp_path / "own"))
        yield hub


def test_a_model_is_pulled_listed_shown_and_removed(
    hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pull", "owner/name"]) == 0
    shown = capsys.readouterr().out
    assert "owner/name: 0.02 GB in " in shown or "owner/name: 0.01 GB in " in shown
    assert "fits: 0.01 GB of weights" in shown
    assert "to fetch: 0.01 GB; " in shown
    folder = local_copy("owner/name")
    assert f"owner/name is here: {folder}" in shown
    assert "pytorch_model.bin" not in hub.downloaded

    hub_module._found.clear()
    hub.asked.clear()
    assert main(["pull", "owner/name"]) == 0
    assert capsys.readouterr().out == f"owner/name is here: {folder}\n"
    assert len(hub.asked) == 1

    assert main(["list", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert set(rows) == {"miniature", "miniature-draft", "owner/name"}
    row = rows["owner/name"]
    assert (row["state"], row["kind"], row["context"], row["fits"]) == ("complete", "vision", 16384, True)
    assert main(["list"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("owner/name"))
    assert line.split()[1:] == [f"{row['bytes'] / 1e6:.1f}", "MB", "vision", "16384", "yes", "today"]

    assert main(["show", "owner/name", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["family"], facts["tool_format"], facts["licence"]) == ("qwen3.5", "qwen_xml", "apache-2.0")
    assert facts["modalities"] == ["text", "images", "videos"]
    assert (facts["missing_bytes"], facts["weights_bytes"]) == (0, (MINIATURE / "model.safetensors").stat().st_size)
    assert facts["layers"] == {"GatedDeltaNet": "packed", "Qwen3NextAttention": "adapter"}


def test_of_a_model_that_is_not_here_only_small_files_are_shown(
    hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", "owner/name"]) == 0
    shown = capsys.readouterr().out
    assert "family: qwen3.5" in shown
    assert "0.01 GB to fetch" in shown
    assert "licence: apache-2.0" in shown
    assert "model.safetensors" not in hub.downloaded
    assert main(["list"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("owner/name"))
    assert "incomplete" in line
    assert "`headrace pull owner/name` completes it" in line


def test_what_does_not_fit_is_fetched_by_force_only(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pull, "current", lambda: SMALL)
    assert main(["pull", "owner/name"]) == 2
    shown = capsys.readouterr()
    assert "does not fit: 0.01 GB of weights" in shown.out
    assert "owner/name does not fit this machine, so it is not fetched; --force does" in shown.err
    assert "model.safetensors" not in hub.downloaded
    assert main(["pull", "--force", "owner/name"]) == 0
    assert local_copy("owner/name") is not None


def test_a_disk_without_room_is_named_before_anything_is_fetched(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fit_module.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1_000_000))
    assert main(["pull", "owner/name"]) == 2
    shown = capsys.readouterr()
    assert "does not fit on the disk" in shown.out
    assert "model.safetensors" not in hub.downloaded


def test_all_models_together_must_have_room(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = hub.repositories["owner/name"].with_name("other")
    shutil.copytree(hub.repositories["owner/name"], other)
    hub.repositories["owner/other"] = other
    size = (MINIATURE / "model.safetensors").stat().st_size
    for module in (fit_module.shutil, pull):
        monkeypatch.setattr(module, "disk_usage", lambda folder: SimpleNamespace(free=size * 3 // 2))
    assert main(["pull", "owner/name", "owner/other"]) == 2
    assert "the disk has no room for all of them" in capsys.readouterr().err
    assert "model.safetensors" not in hub.downloaded


def test_a_model_that_nothing_can_run_is_refused_by_its_type(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "owner/unknown"]) == 2
    assert "mlx-lm has no model of type no_such_model" in capsys.readouterr().err
    assert "model.safetensors" not in hub.downloaded


def test_an_embedding_model_is_pulled_with_the_files_of_its_modules(
    hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.repositories["owner/bert"] = EMBEDDING
    assert main(["pull", "owner/bert"]) == 0
    folder = local_copy("owner/bert")
    assert folder is not None
    assert (folder / "2_Dense" / "model.safetensors").is_file()
    assert (folder / "1_Pooling" / "config.json").is_file()
    capsys.readouterr()
    assert main(["list", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert (rows["owner/bert"]["kind"], rows["owner/bert"]["state"]) == ("embedding", "complete")


def test_what_is_here_anyway_is_not_fetched(hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "miniature", str(tmp_path / "model")]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"miniature is here: {MINIATURE}",
        f"{tmp_path / 'model'} is here: {tmp_path / 'model'}",
    ]
    assert hub.asked == []
    assert main(["pull", "owner/none"]) == 2
    assert "neither a folder here nor a repository" in capsys.readouterr().err


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "headrace", *words]


def environment(hub: FakeHub, tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "cache"), "TERM": "xterm-256color"}


def parts(folder: Path) -> list[Path]:
    """Of large files; those of small ones have longer names and may end meanwhile."""
    return [path for path in folder.glob("cache/*/blobs/*.incomplete") if path.name.count(".") == 1]


def test_an_interrupted_pull_says_how_to_continue(hub: FakeHub, tmp_path: Path) -> None:
    hub.pauses_at = 12_000_000
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command("pull", "owner/name"), env=environment(hub, tmp_path), stdout=pipe, stderr=pipe, text=True
    ) as process:
        end = time.monotonic() + PATIENCE_S
        while not any(part.stat().st_size > 5_000_000 for part in parts(tmp_path)):
            assert time.monotonic() < end
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert err == "headrace: interrupted; 0.01 GB came and stay, `headrace pull owner/name` continues\n"
    hub.goes_on.set()
    assert main(["pull", "owner/name"]) == 0
    assert len(hub.ranges) == 1


def test_a_terminal_shows_a_bar(hub: FakeHub, tmp_path: Path) -> None:
    hub.pauses_at = 12_000_000
    words = command("pull", "owner/name")
    with pexpect.spawn(
        words[0], words[1:], encoding="utf-8", timeout=PATIENCE_S, env=environment(hub, tmp_path)
    ) as child:
        child.expect(r"\[#+ *\] \d+% of 0\.01 GB(, \d+\.\d MB/s, \d+:\d\d left)?: owner/name")
        hub.goes_on.set()
        child.expect("owner/name is here: ")


def test_a_bar_grows_with_the_share() -> None:
    assert bar(0, 10) == "[                    ] 0%"
    assert bar(5, 10) == "[##########          ] 50%"
    assert bar(10, 10) == bar(0, 0) == "[####################] 100%"


def test_nothing_is_removed_without_a_yes(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    subprocess.run(command("pull", "owner/name"), env=environment(hub, tmp_path), capture_output=True, check=True)
    assert main(["remove", "owner/name"]) == 2
    shown = capsys.readouterr()
    assert "owner/name: 1" in shown.out
    assert "confirm with --yes" in shown.err
    monkeypatch.setattr(local_models.sys.stdin, "isatty", lambda: True)
    for answer, is_gone in (("", False), ("no", False), ("y", True)):
        monkeypatch.setattr("builtins.input", lambda question, answer=answer: answer)
        assert (main(["remove", "owner/name"]) == 0) is is_gone
        assert cache_of("owner/name").exists() is not is_gone
    assert " bytes) freed" in capsys.readouterr().out


def test_a_list_imports_no_model_code() -> None:
    program = (
        "import sys\nfrom headrace.cli.main import main\nmain(['list'])\n"
        "print([name for name in ('mlx_lm', 'transformers', 'starlette', 'mlx_vlm') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("words", [["pull"], ["show"], ["remove"], ["list", "x"], ["pull", "--forse", "a/b"]])
def test_mistakes_are_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_show_says_what_does_not_fit(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(show, "current", lambda: SMALL)
    assert main(["show", "miniature"]) == 0
    assert "fits: no" in capsys.readouterr().out


def test_a_folder_without_weights_is_said_to_have_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "half"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MINIATURE / name, folder)
    (folder / "pytorch_model.bin").write_bytes(b"0" * 1000)
    assert main(["show", str(folder)]) == 0
    assert "weights: none (no model*.safetensors), in " in capsys.readouterr().out
    assert main(["show", "--json", str(folder)]) == 0
    assert json.loads(capsys.readouterr().out)["fits"] is None
    assert main(["doctor", str(folder)]) == 2
    said = capsys.readouterr()
    assert "its weights are not there" in said.out and "such requests" not in said.out
    assert "no model*.safetensors" in said.err
