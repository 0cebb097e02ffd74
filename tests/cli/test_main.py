"""The command line: commands are found, errors are one line."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes import FakeEngine, describe, fake_session

import headrace
from headrace.backend.device import Device
from headrace.cli import chat, doctor, serve_models
from headrace.cli.doctor import Resources
from headrace.cli.fit import Fit
from headrace.cli.main import main
from headrace.config import Config
from headrace.errors import ModelError

QWEN = Path(__file__).parent.parent / "data" / "text" / "qwen35"


def stop_here(config: Config) -> None:
    raise ModelError("far enough")


def refuse_to_launch(config: Config) -> None:
    raise AssertionError("no model may be loaded here")


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"headrace {headrace.__version__}\n"


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["help"]])
def test_help_lists_all_commands(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert all(command in shown for command in ("serve", "chat", "doctor", "--version"))


@pytest.mark.parametrize("command", ["serve", "chat", "doctor"])
def test_every_command_has_help_of_its_own(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert main(["help", command]) == 0
    assert capsys.readouterr().out == shown
    assert "--max-num-seqs" in shown
    assert ("--port" in shown) == (command == "serve")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "a command is missing"),
        (["sevre"], "'sevre'"),
        (["--vresion"], "--vresion"),
        (["serve", "--prot", "80"], "--prot"),
        (["serve", "--port", "eighty"], "--port must be a whole number"),
        (["serve", "--host", "0.0.0.0", "--port", "0"], "--api-key"),
        (["serve", "--allowed-origin", "foo", "--port", "0"], "--allowed-origin takes origins like"),
        (["chat", "--port", "80"], "--port"),
        (["doctor", "--dtype", "int3"], "--dtype"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_models, "load_session", refuse_to_launch)
    monkeypatch.setattr(chat, "configured_text_pipeline", refuse_to_launch)
    monkeypatch.setattr(chat.Engine, "launch", refuse_to_launch)
    assert main(words) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("headrace: ")
    assert shown.err.count("\n") == 1
    assert said in shown.err
    assert shown.out == ""


def test_a_model_that_cannot_be_loaded_is_one_line_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(config: Config, *_: object) -> None:
        raise ModelError(f"{config.model} has no config.json")

    monkeypatch.setattr(serve_models, "_fetch", lambda *_: 0)
    monkeypatch.setattr(serve_models, "load_session", load)
    assert main(["serve", "some/where", "--port", "0"]) == 2
    assert capsys.readouterr().err == "headrace: some/where has no config.json\n"


def test_ctrl_c_while_a_model_is_loaded_ends_without_a_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(config: Config, constraints: None, **_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(chat, "configured_text_pipeline", lambda config: SimpleNamespace(constraints=None))
    monkeypatch.setattr(chat.Engine, "launch", launch)
    assert main(["chat"]) == 130
    assert capsys.readouterr().err == "headrace: interrupted\n"


def test_doctor_reports_on_the_machine_and_on_a_model_only_when_one_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, asked = FakeEngine(model=replace(describe(), report=("level of its layers",))), []
    gpu = Device("cuda", "Some GPU", 16_000_000_000, 4)
    monkeypatch.setattr(doctor, "resources", lambda *_: Resources(gpu, 9_000_000_000, 80_000_000_000, tmp_path))
    monkeypatch.setattr(doctor, "preview", lambda config: None)
    fitting = Fit(4_000_000_000, 4_000_000_000, 14_000_000_000, lambda num_tokens: 100_000 * num_tokens, 4096, 0, 1)
    monkeypatch.setattr(doctor, "fit", lambda *_, **__: fitting)
    monkeypatch.setattr(doctor, "machine_report", lambda numerics: [f"the machine, {numerics}"])
    words = SimpleNamespace(constraints=None)
    monkeypatch.setattr(doctor, "configured_text_pipeline", lambda config: asked.append(config) or words)
    monkeypatch.setattr(doctor.Engine, "launch", lambda *_: engine)
    monkeypatch.setattr(doctor, "configured_session", lambda config, engine, words: fake_session(engine))
    monkeypatch.delenv("HEADRACE_MODEL", raising=False)
    assert main(["doctor", "--numerics", "exact"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "the machine, exact"
    assert lines[1:] == ["memory: 9.00 GB free", f"disk: 80.00 GB free in {tmp_path}", "", "all well"]
    assert not engine.stopped
    assert main(["doctor", "some/where"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [config.model for config in asked] == ["some/where"]
    assert said[3:6] == [
        "fits: 4.00 GB of weights, 14.00 GB of memory may be used",
        "context: 4096 tokens, the model's full context; up to 24 such requests at a time, at least 0.41 GB each",
        "level of its layers",
    ]
    # What a session over the model has to say: the family, how it thinks, what its template takes.
    assert said[6:] == [*fake_session(engine).notes, "", "all well"]
    assert any("thinking" in line for line in said)
    assert engine.stopped


@pytest.mark.parametrize("command", ["serve", "chat", "doctor"])
@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        pytest.param("tokenizer.json", None, "no tokenizer could be loaded", marks=pytest.mark.slow),
        ("tokenizer.json", "{", "no tokenizer could be loaded"),
        ("chat_template.jinja", "{% if %}", "chat template is broken in line 1"),
        ("generation_config.json", "[", "not valid JSON"),
        ("generation_config.json", '{"temperature": "warm"}', "generation_config.json"),
        ("config.json", "{}", "names no model_type"),
    ],
)
def test_what_is_wrong_with_a_models_small_files_is_said_before_its_weights_are_loaded(
    command: str,
    file: str,
    content: str | None,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "machine_report", lambda numerics: [])
    for module in (serve_models, chat, doctor):
        monkeypatch.setattr(module.Engine, "launch", refuse_to_launch)
    folder = tmp_path / "model"
    shutil.copytree(QWEN, folder)
    (folder / "config.json").write_text('{"model_type": "qwen3_5"}')
    (folder / file).unlink(missing_ok=True)
    if content is not None:
        (folder / file).write_text(content)
    assert main([command, str(folder), *(("--port", "0") if command == "serve" else ())]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "chat", "doctor"])
def test_a_variable_that_is_no_knob_is_warned_of_by_name(
    command: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "machine_report", lambda numerics: [])
    for module in (serve_models, chat, doctor):
        monkeypatch.setattr(module, "configured_text_pipeline", stop_here)
    monkeypatch.setenv("HEADRACE_MAX_NUM_SEQ", "4")
    assert main([command, "some/where", *(("--port", "0") if command == "serve" else ())]) == 2
    assert "HEADRACE_MAX_NUM_SEQ is unknown" in caplog.text


def test_the_log_is_told_in_full_but_not_in_the_middle_of_a_conversation() -> None:
    ours = logging.getLogger("headrace")
    before, levels = ours.level, {}
    for word in ("chat", "serve"):
        ours.setLevel(logging.NOTSET)
        assert main([word, "--no-such-flag"]) == 2
        levels[word] = ours.level
    ours.setLevel(before)
    assert levels == {"chat": logging.NOTSET, "serve": logging.INFO}


SIMPLE = [
    ["--version"],
    ["--help"],
    ["serve", "--help"],
    ["chat", "--help"],
    ["mtp", "--help"],
    ["mtp", "extract", "--help"],
    ["sevre"],
    ["serve", "--prot", "80"],
    ["serve", "--port", "eighty"],
    ["chat", "--dtype", "int3"],
    ["mtp", "chek"],
    ["bench", "--peeer", "x"],
]


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["sevre"], "serve"),
        (["mtp", "chek"], "check"),
        (["serve", "--prot", "80"], "--port"),
        (["serve", "--max-num-seq=80"], "--max-num-seqs"),
        (["bench", "http://127.0.0.1:1", "--peeer", "a=b"], "--peer"),
        (["mtp", "extract", "a", "b", "--hepl"], "--help"),
    ],
)
def test_a_mistyped_word_is_told_with_the_one_that_was_meant(
    words: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert f"did you mean {meant}?" in capsys.readouterr().err


def test_a_mistyped_built_in_model_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(name: str) -> None:
        raise ModelError(f"{name!r} is neither a folder here nor a repository on Hugging Face") from OSError()

    monkeypatch.setattr("headrace.engine.model_files.locate", refuse)
    for name, meant in (("miniture", "; did you mean miniature?\n"), ("gpt2", "on Hugging Face\n")):
        for words in (["chat", name], ["serve", name, "--port", "0"]):
            assert main(words) == 2
            assert capsys.readouterr().err.endswith(meant)


def test_a_word_that_resembles_nothing_gets_no_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--zzzzzz", "1"]) == 2
    assert "did you mean" not in capsys.readouterr().err


def test_simple_answers_do_not_wait_for_heavy_imports() -> None:
    program = (
        "import sys; from headrace.cli.main import main; "
        f"assert [main(words) for words in {SIMPLE}] == [0] * 6 + [2] * 6; "
        "print(sorted({'mlx', 'transformers', 'starlette', 'pydantic', 'numpy', 'httpx'} & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("words", [["mtp", "extract", "no", "where"]])
def test_too_few_open_files_for_mlx_lm_are_one_line(words: list[str]) -> None:
    """Its import asks for 4096; without the privilege to raise the limit that fails."""
    program = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (600, 600)); "
        f"from headrace.cli.main import main; sys.exit(main({words!r}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    # with the privilege the limit is raised, and the command goes on to its own mistake
    assert done.stderr.startswith(
        ("headrace: this process may open 600 files at most (ulimit -Hn), and mlx-lm needs 4096\n", "headrace: 'no'")
    )


def test_another_failure_of_an_import_is_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(module: str) -> None:
        raise ValueError("something else")

    monkeypatch.setattr("headrace.cli.installed.import_module", fail)
    monkeypatch.setattr("headrace.cli.installed.resource.getrlimit", lambda kind: (5000, 5000))
    with pytest.raises(ValueError, match="something else"):
        main(["serve"])
