"""Questions depend on the seed, the level and the round alone, and never come twice."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

import headrace
from headrace.bench.plan import WORKLOADS, Plan
from headrace.bench.workloads import TOKENS_PER_WORD, WORDS, Questions, Round, build_round, num_requests, random_text

PLAN = Plan((), num_prompt_tokens=300, max_tokens=20)


def conversations(made: Round) -> list[Questions]:
    return [each for stream in made for each in stream.conversations]


def texts(made: Round) -> list[str]:
    return [text for each in conversations(made) for text in (each.system, *each.questions) if text is not None]


@pytest.mark.parametrize("workload", WORKLOADS)
def test_the_same_seed_asks_the_same(workload: str) -> None:
    assert build_round(PLAN, workload, 4, 1) == build_round(PLAN, workload, 4, 1)


def test_another_process_on_any_hash_seed_asks_the_same() -> None:
    program = (
        "from headrace.bench.plan import Plan; from headrace.bench.workloads import build_round;"
        "print(build_round(Plan((), num_prompt_tokens=300, max_tokens=20), 'mixed', 4, 1))"
    )
    source = str(Path(headrace.__file__).parents[1])
    environ = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": source}
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environ)
    assert ended.stdout == f"{build_round(PLAN, 'mixed', 4, 1)}\n"


@pytest.mark.parametrize("workload", [each for each in WORKLOADS if each != "repeated-prompt"])
def test_no_question_comes_twice_whatever_changes(workload: str) -> None:
    rounds = [
        build_round(PLAN, workload, 4, 0),
        build_round(PLAN, workload, 4, 1),
        build_round(PLAN, workload, 8, 0),
        build_round(replace(PLAN, seed=1), workload, 4, 0),
    ]
    asked = [question for made in rounds for each in conversations(made) for question in each.questions]
    assert len(set(asked)) == len(asked)


@pytest.mark.parametrize("workload", [each for each in WORKLOADS if each not in ("shared-prefix", "repeated-prompt")])
def test_long_texts_part_within_the_first_words(workload: str) -> None:
    long = [text for repeat in range(3) for text in texts(build_round(PLAN, workload, 4, repeat)) if len(text) > 500]
    assert len({" ".join(text.split()[:4]) for text in long}) == len(long)


@pytest.mark.parametrize("num_tokens", [16, 100, 2500])
def test_a_text_has_the_words_that_the_estimate_asks_for(num_tokens: int) -> None:
    words = random_text(Random(0), num_tokens).replace(".", "").split()
    assert len(words) == round(num_tokens / TOKENS_PER_WORD)
    assert {word.lower() for word in words} <= set(WORDS)


@pytest.mark.parametrize("streams", [1, 4])
@pytest.mark.parametrize("workload", ["short-chat", "long-prompt", "shared-prefix"])
def test_each_stream_has_two_conversations_of_one_question(workload: str, streams: int) -> None:
    made = build_round(PLAN, workload, streams, 0)
    assert [len(stream.conversations) for stream in made] == [2] * streams
    assert num_requests(made) == 2 * streams
    assert {each.max_tokens for each in conversations(made)} == {20}


def test_a_given_number_of_conversations_is_dealt_out_and_idle_streams_are_left_out() -> None:
    made = build_round(replace(PLAN, num_conversations=5), "short-chat", 3, 0)
    assert [len(stream.conversations) for stream in made] == [2, 2, 1]
    assert len(build_round(replace(PLAN, num_conversations=2), "short-chat", 3, 0)) == 2


def test_only_long_prompts_are_long() -> None:
    assert min(len(text.split()) for text in texts(build_round(PLAN, "long-prompt", 2, 0))) > 300 / TOKENS_PER_WORD
    assert max(len(text.split()) for text in texts(build_round(PLAN, "short-chat", 2, 0))) < 30


def test_a_shared_prefix_is_one_for_the_round_and_another_for_the_next() -> None:
    first, second = (conversations(build_round(PLAN, "shared-prefix", 4, repeat)) for repeat in range(2))
    assert len({each.system for each in first}) == 1
    assert first[0].system != second[0].system
    assert [each.kinds for stream in build_round(PLAN, "shared-prefix", 4, 0) for each in stream.conversations] == [
        ("first",),
        ("later",),
    ] * 4


def test_a_repeated_prompt_is_asked_cold_and_right_after_that_warm() -> None:
    made = build_round(PLAN, "repeated-prompt", 2, 0)
    assert len(made) == 2
    for stream in made:
        assert [chat.kinds for chat in stream.conversations] == [("cold",), ("warm",)] * 2
        cold, warm, other, _ = (chat.questions for chat in stream.conversations)
        assert cold == warm != other


@pytest.mark.parametrize("num_turns", [1, 5, 12])
def test_a_growing_conversation_has_a_long_turn_and_then_short_ones(num_turns: int) -> None:
    made = build_round(replace(PLAN, num_turns=num_turns), "growing-conversation", 3, 0)
    assert [len(stream.conversations) for stream in made] == [1] * 3
    for each in conversations(made):
        assert len(each.questions) == num_turns
        assert len(each.questions[0].split()) > 250
        assert all(len(question.split()) < 30 for question in each.questions[1:])
        assert each.kinds == tuple(f"turn {turn}" for turn in range(1, num_turns + 1))


def test_mixed_has_chats_on_all_streams_but_one_that_comes_late_with_long_prompts() -> None:
    *chatting, last = build_round(PLAN, "mixed", 4, 0)
    assert [stream.late for stream in chatting] == [False] * 3
    assert {each.kinds for stream in chatting for each in stream.conversations} == {("short",)}
    assert last.late
    assert {each.max_tokens for each in last.conversations} == {16}
    shorter = build_round(replace(PLAN, max_tokens=4), "mixed", 4, 0)
    assert {each.max_tokens for stream in shorter for each in stream.conversations} == {4}
    assert [each.kinds for each in last.conversations] == [("long",)] * 2


def test_mixed_is_left_out_where_there_is_one_stream_only() -> None:
    plan = replace(PLAN, workloads=("short-chat", "mixed"), streams=(1, 2))
    assert plan.levels() == (("short-chat", 1), ("short-chat", 2), ("mixed", 2))
