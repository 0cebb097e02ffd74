"""`headrace mtp`: what is printed about a head, and with which exit code."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx
import pytest
from models import tiny, tiny_head

import headrace
from headrace.cli import mtp
from headrace.cli.main import main
from headrace.engine import head_check
from headrace.engine.head_check import HeadCheck
from headrace.models.mtp_head import MtpHead
from headrace.models.mtp_weights import HeadWeights, NormGroup
from headrace.models.packed import PackedModel
from headrace.speculate.acceptance import Acceptance
from headrace.types.model import TokenIds

MINIATURE = Path(headrace.__file__).parent / "miniature"
NORMS = (NormGroup("layer", frozenset({"q_norm.weight"}), True), NormGroup("outer", frozenset({"norm.weight"}), False))


def test_a_head_is_extracted_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head = tiny_head.prefixed(tiny_head.draw("qwen3_5"))
    source = tiny_head.save_with_head("qwen3_5", tmp_path / "source", head)
    assert main(["mtp", "extract", str(source), str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert f"{tmp_path / 'model-mtp.safetensors'}: {len(head)} tensors" in said
    assert main(["mtp", "extract", str(source), str(tmp_path)]) == 2
    assert "exists already" in capsys.readouterr().err


def test_the_names_of_models_inside_the_package_are_known(tmp_path: Path) -> None:
    assert main(["mtp", "extract", "miniature", str(tmp_path)]) == 0
    stored = cast(dict[str, mx.array], mx.load(str(MINIATURE / "model.safetensors")))
    made = cast(dict[str, mx.array], mx.load(str(tmp_path / "model-mtp.safetensors")))
    assert len(made) == sum("mtp." in name for name in stored) > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "a command of mtp is missing"),
        (["chek"], "'chek'"),
        (["extract", "only-one"], "OUT"),
        (["check", "--port", "80"], "--port"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mtp", *words]) == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert shown.count("\n") == 1


@pytest.mark.parametrize("words", [["--help"], ["extract", "--help"], ["check", "--help"]])
def test_help_is_printed(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mtp", *words]) == 0
    assert "usage: headrace mtp" in capsys.readouterr().out


def test_a_model_without_a_head_is_refused_before_its_weights_are_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("no weights may be loaded here")

    monkeypatch.setattr(head_check, "load", refuse)
    folder = tiny.save("qwen3_5", tmp_path / "bare")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MINIATURE / file, folder)
    assert main(["mtp", "check", str(folder)]) == 2
    said = capsys.readouterr().err
    assert "bare has no prediction head" in said
    assert "mtp extract" in said


class Trunk:
    """Knows which hidden rows it hands on."""

    is_normed = True

    def keep_hidden(self, is_wanted: bool, is_normed: bool = True) -> None:
        self.is_normed = is_normed


class Head:
    """A head by how its norms are read."""

    report = "made up"

    def __init__(self, weights: HeadWeights) -> None:
        self.reading = weights.conventions


Rule = Callable[[Trunk, Head], float]


def stand_in(patch: pytest.MonkeyPatch, rule: Rule, is_quantised: bool = False) -> Trunk:
    """A loaded head of which `rule` says how often its first draft is right; a second one half as often."""
    arrays = {name: mx.ones(2) for group in NORMS for name in group.names}
    weights = HeadWeights({**arrays, **({"fc.scales": mx.ones(2)} if is_quantised else {})}, "file", NORMS)
    trunk = Trunk()

    def measure(trunk: Any, head: Any, texts: object, num_tokens: int, depth: int) -> Acceptance:
        first = round(1000 * rule(trunk, head))
        return Acceptance(1000, tuple(first // 2**number for number in range(depth)))

    def build(form: HeadWeights) -> MtpHead:
        return cast(MtpHead, Head(form))

    patch.setattr(head_check, "measure_acceptance", measure)
    check = HeadCheck(cast(PackedModel, trunk), weights, build(weights), build, ())
    patch.setattr(mtp, "load_head_check", lambda config, texts, tokens: check)
    patch.setattr(
        mtp,
        "configured_text_pipeline",
        lambda config: SimpleNamespace(tokenizer=SimpleNamespace(encode_document=list, token_ids=TokenIds(128))),
    )
    return trunk


def test_a_good_head_is_told_in_a_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, lambda trunk, head: 0.8)
    assert main(["mtp", "check", "some/where"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "head: made up"
    assert [line.split() for line in said[3:]] == [
        ["1", "0.80", "1.80"],
        ["2", "0.50", "2.20"],
        ["3", "0.50", "2.40"],
        ["4", "0.50", "2.50"],
    ]


@pytest.mark.parametrize(
    ("rule", "is_quantised", "said"),
    [
        (lambda trunk, head: 0.7 * ("outer norms zero-centred" in head.reading), False, "form than it seems: outer"),
        (lambda trunk, head: 0.7 * ("layer norms plain" in head.reading), False, "form than it seems: layer"),
        (lambda trunk, head: 0.7 * (not trunk.is_normed), False, "trained on hidden rows from before"),
        (lambda trunk, head: 0.01, True, "quantised, like the trunk"),
        (lambda trunk, head: 0.01, False, "belongs to another model"),
    ],
)
def test_a_useless_head_is_explained(
    rule: Rule, is_quantised: bool, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trunk = stand_in(monkeypatch, rule, is_quantised)
    assert main(["mtp", "check", "some/where"]) == 1
    shown = capsys.readouterr().out
    assert said in shown
    assert ("mtp extract" in shown) == ("before" not in said)
    assert trunk.is_normed


@pytest.mark.slow
def test_the_miniatures_head_is_usable_and_an_untrained_one_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mtp, "_NUM_TOKENS", 8)
    monkeypatch.setattr(
        mtp, "TEXTS", ("<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",)
    )
    monkeypatch.setattr(head_check, "_NUM_TRIED", 2)
    folder = tmp_path / "miniature"
    shutil.copytree(MINIATURE, folder, ignore=shutil.ignore_patterns("draft"))
    assert main(["mtp", "extract", str(folder), str(folder)]) == 0
    assert main(["mtp", "check", str(folder), "--no-self-check"]) == 0
    assert "head: model-mtp.safetensors" in capsys.readouterr().out
    untrained: Any = mx.load(str(folder / "model-mtp.safetensors"))
    mx.random.seed(0)
    noise = {
        name: mx.random.normal(array.shape) / array.shape[-1] ** 0.5 if array.ndim == 2 else array
        for name, array in untrained.items()
    }
    mx.save_safetensors(str(folder / "model-mtp.safetensors"), noise)
    assert main(["mtp", "check", str(folder), "--no-self-check"]) == 1
    assert "not usable" in capsys.readouterr().out
