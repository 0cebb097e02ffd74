"""`headrace bench` from the command line to the tables and the report."""

from __future__ import annotations

import asyncio
import json
import platform
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from bench.fake_openai import Body, FakeOpenAI, question, running, spoken
from fakes import FakeEngine, fake_session
from loopback import serving
from starlette.responses import JSONResponse, Response

from headrace.bench.measure import measure
from headrace.bench.plan import WORKLOADS, Plan, Target
from headrace.bench.table import tables
from headrace.cli.main import main

QUICK = ["--streams", "1,2", "--repeats", "2", "--prompt-tokens", "30", "--max-tokens", "4"]


def echo(body: Body) -> list[bytes]:
    return spoken("you ", "said ", question(body), num_tokens=6)


def test_a_server_is_measured_and_everything_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / "report.json"
    with running(FakeOpenAI(echo)) as url:
        words = ["bench", f"{url}/v1", *QUICK, "--workload", "all", "--json", str(file), "--api-key", "secret"]
        assert main([*words, "--api-key=secret2"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    for title in (*WORKLOADS, "first text ms", "same again", "turn 5", str(file)):
        assert title in shown.out
    text = file.read_text("utf-8")
    assert "secret" not in text
    report = json.loads(text)
    assert report["command"][:4] == ["headrace", "bench", f"{url}/v1", "--streams"]
    assert datetime.fromisoformat(report["date"]).utcoffset() is not None
    assert report["versions"]["python"] == platform.python_version()
    assert report["machine"]["usable_cores"] > 0
    assert report["targets"] == [{"label": "server", "url": url, "model": "fake", "server": "uvicorn"}]
    assert report["settings"]["num_prompt_tokens"] == 30
    levels = [(level["workload"], level["streams"]) for level in report["levels"]]
    assert levels == [(name, streams) for name in WORKLOADS for streams in (1, 2) if (name, streams) != ("mixed", 1)]


def test_every_column_says_how_the_answers_of_a_round_make_its_figure(capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeOpenAI(echo)) as url:
        assert (
            main(["bench", url, "--peer", f"other={url}", "--streams", "2", "--repeats", "1", "--max-tokens", "4"]) == 0
        )
    blocks = [block.splitlines() for block in capsys.readouterr().out.split("\n\n")]
    _, table, ratios = blocks[:3]
    for lines, marks in (
        (table, "median sum median median maximum median sum sum sum"),
        (ratios, "median median maximum median sum sum"),
    ):
        assert lines[2].split() == marks.split()
        # Right-aligned below the titles that they belong to.
        assert all(lines[1][end - 1] != " " for end in (match.end() for match in re.finditer(r"\S+", lines[2])))
    # Two streams have two conversations each, and each answer 6 tokens: their sum.
    assert table[3].split()[3] == "24.0"


def test_the_report_holds_the_raw_numbers_that_its_figures_come_from(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    with running(FakeOpenAI(echo)) as url:
        assert main(["bench", url, *QUICK, "--json", str(file)]) == 0
    level = json.loads(file.read_text("utf-8"))["levels"][1]
    assert (level["streams"], level["figures"]["num_answers"], level["figures"]["num_failed"]) == (2, 8, 0)
    assert (level["same_when_asked_again"]["num_same"], level["same_as_first_target"]) == (4, None)
    first = level["rounds"][0]
    ttfts = sorted(each["arrivals_s"][0] - each["started_s"] for each in first["answers"])
    assert first["figures"]["ttft_s"] == pytest.approx((ttfts[1] + ttfts[2]) / 2, abs=1e-5)
    assert first["figures"]["output_tokens_per_s"] == pytest.approx(4 * 6 / first["wall_s"], rel=1e-2)
    medians = [played["figures"]["ttft_s"] for played in level["rounds"]]
    spread = level["figures"]["ttft_s"]
    assert [spread["minimum"], spread["maximum"]] == pytest.approx(sorted(medians), abs=1e-5)
    assert all(each["content"].startswith("you said ") for each in level["again"]["answers"])


def test_peers_are_compared_in_ratios_and_by_their_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def other(body: Body) -> list[bytes]:
        assert body["model"] == "other"
        return spoken("something else", num_tokens=3)

    file = tmp_path / "report.json"
    words = ["--workload", "short-chat,shared-prefix", "--label", "ours", "--json", str(file), *QUICK]
    with running(FakeOpenAI(echo)) as url, running(FakeOpenAI(other)) as peer:
        assert main(["bench", url, "--peer", f"theirs={peer},other", *words]) == 0
    shown = capsys.readouterr().out
    compared = shown[shown.index("Others over ours") :].splitlines()
    assert [line.split()[:3] for line in compared[3:6]] == [
        ["short-chat", "theirs", "1"],
        ["short-chat", "theirs", "2"],
        ["shared-prefix", "theirs", "1"],
    ]
    assert [line.split()[-1] for line in compared[3:6]] == ["0/2", "0/4", "0/2"]
    assert [line.split()[0] for line in compared[6:8]] == ["first", "later"]
    levels = json.loads(file.read_text("utf-8"))["levels"]
    assert [level["target"] for level in levels] == ["ours", "theirs"] * 4
    assert levels[0]["same_as_first_target"] is None
    difference = levels[1]["same_as_first_target"]["difference"]
    assert (difference["first"][:9], difference["second"]) == ("you said ", "something else")


def test_answers_that_fail_are_listed_and_the_exit_code_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[Body] = []

    def sometimes(body: Body) -> list[bytes] | Response:
        calls.append(body)
        return JSONResponse({"error": {"message": "too busy"}}, 429) if len(calls) % 3 == 0 else echo(body)

    with running(FakeOpenAI(sometimes)) as url:
        assert main(["bench", url, *QUICK, "--streams", "3"]) == 2
    shown = capsys.readouterr()
    assert "6 answers failed:" in shown.out  # every third of 18, and the first request of all
    assert "server, short-chat, 3 streams: status 429: too busy" in shown.out
    assert shown.err == "headrace: 6 answers failed\n"


def test_answers_that_change_are_shown_where_they_part(capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[Body] = []

    def drifting(body: Body) -> list[bytes]:
        calls.append(body)
        return spoken("It was a dark night, " + ("and it rained" if len(calls) < 4 else "and it snowed"))

    with running(FakeOpenAI(drifting)) as url:
        assert main(["bench", url, "--streams", "1", "--repeats", "1"]) == 0
    shown = capsys.readouterr().out
    assert "0/2" in shown
    assert (
        "First answer that differs when asked again: server, short-chat, 1 streams; stream 0, conversation 0" in shown
    )
    assert shown.count("at character 28:") == 2
    assert "it snowed" in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "URL"),
        (["h:80"], "URL must be like"),
        (["http://h", "--workload", "chess"], "--workload"),
        (["http://h", "--streams", "1,x"], "--streams"),
        (["http://h", "--streams", "0"], "--streams"),
        (["http://h", "--repeats", "0"], "--repeats"),
        (["http://h", "--peer", "http://h"], "--peer"),
        (["http://h", "--peer", "server=http://h"], "label"),
        (["http://h", "--json", "/dev/null/x.json"], "--json"),
        (["http://h", "--turbo"], "--turbo"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_asked(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *words]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert said in shown.err
    assert shown.err.count("\n") == 1


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    shown = capsys.readouterr().out
    options = (
        "model workload streams requests repeats seed max-tokens prompt-tokens turns json api-key label peer tokenizer"
    )
    assert all(f"--{option}" in shown for option in options.split())


@pytest.mark.parametrize("former", ["model", "kernels"])
def test_a_former_command_says_what_to_run_instead(former: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", former, "--shape", "qwen3.5-4b"]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1
    assert f"python -m benchmarks.{former}" in shown.err
    assert (Path(__file__).parents[2] / "benchmarks" / f"{former}.py").is_file()


def test_our_own_server_is_measured() -> None:
    async def measured() -> tuple[str, dict[str, Any]]:
        async with serving(fake_session(FakeEngine("Grü", "ße ", "🎉"))) as url:
            plan = Plan(
                (Target("ours", url),),
                ("short-chat", "growing-conversation"),
                (1, 2),
                num_repeats=2,
                num_prompt_tokens=20,
            )
            levels, report = await measure(plan, ["test"], lambda *_: None)
            return tables(plan, levels), report

    shown, report = asyncio.run(measured())
    assert report["faults"] == []
    assert report["targets"][0]["model"] == "fake-model"
    for level in report["levels"]:
        answers = [each for played in level["rounds"] for each in played["answers"]]
        assert {(each["content"], each["num_output_tokens"]) for each in answers} == {("Grüße 🎉", 12)}
        assert {each["token_source"] for each in answers} == {"usage"}
        assert level["same_when_asked_again"]["num_same"] == level["same_when_asked_again"]["num_compared"] > 0
    assert "turn 5" in shown
