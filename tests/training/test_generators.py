"""The jobs' generators: the same seed gives the same data, the splits are disjoint, the answers are right."""

import json
import random
import re
from collections.abc import Callable
from itertools import islice

import pytest

from training.jobs import clips, copying, pictures, recall, talk, thinking, tools
from training.mixture import samples
from training.sample import Sample, is_held_out
from training.words import ADJECTIVES, SHIP_NOUNS

MAKERS: dict[str, Callable[..., Sample]] = {
    "recall": recall.make,
    "tools": tools.make,
    "thinking": thinking.make,
    "pictures": pictures.make,
    "clips": clips.make,
    "copying": copying.make,
    "talk": talk.make,
}


def several(make: Callable[..., Sample], count: int, **options: object) -> list[Sample]:
    stream = random.Random("test")
    return [make(stream, **options) for _ in range(count)]


@pytest.mark.parametrize("job", MAKERS)
def test_the_same_seed_gives_the_same_samples(job: str) -> None:
    assert several(MAKERS[job], 20) == several(MAKERS[job], 20)


@pytest.mark.parametrize("kind", ["long", "short", "media"])
def test_different_seeds_give_different_streams(kind: str) -> None:
    assert list(islice(samples(kind, "1"), 5)) == list(islice(samples(kind, "1"), 5))
    assert list(islice(samples(kind, "1"), 5)) != list(islice(samples(kind, "2"), 5))


def test_an_unknown_kind_is_named() -> None:
    with pytest.raises(ValueError, match="'sounds'"):
        next(samples("sounds", "1"))


@pytest.mark.parametrize("job", ["thinking", "copying", "talk", "pictures", "clips"])
def test_held_out_questions_never_occur_in_training(job: str) -> None:
    def questions(sample: Sample) -> str:
        return str((sample.drawings, sample.clip, [turn.text for turn in sample.turns if turn.role == "user"]))

    trained = {questions(sample) for sample in several(MAKERS[job], 400)}
    kept = {questions(sample) for sample in several(MAKERS[job], 100, held_out=True)}
    assert not trained & kept


def test_only_ships_of_the_right_split_are_asked_about() -> None:
    for held_out in (False, True):
        for sample in several(recall.make, 30, held_out=held_out, num_tokens=600):
            assert all(is_held_out(ship) == held_out for ship in sample.facts["ships"])


def test_held_out_tools_do_what_no_trained_tool_does() -> None:
    def deeds(held_out: bool) -> set[str]:
        return {
            tool["function"]["description"]
            for sample in several(tools.make, 150, held_out=held_out)
            for tool in sample.tools
        }

    assert not deeds(False) & deeds(True)


def test_one_key_in_eight_is_held_out() -> None:
    names = [f"{adjective} {noun}" for adjective in ADJECTIVES for noun in SHIP_NOUNS]
    assert 0.10 < sum(map(is_held_out, names)) / len(names) < 0.15
    assert len(set(names)) == len(names)


def test_a_recall_answer_stands_in_the_one_line_of_its_ship() -> None:
    for sample in several(recall.make, 30, num_tokens=900):
        log = "\n".join(turn.text for turn in sample.turns[:1])
        for ship, turn in zip(
            sample.facts["ships"], [t for t in sample.turns if t.role == "assistant"][-1:], strict=False
        ):
            line = [row for row in log.splitlines() if ship in row and "?" not in row]
            assert len(line) == 1
            if ship in turn.text:
                numbers = re.findall(r"\d+", turn.text)
                assert all(number in re.findall(r"\d+", line[0]) for number in numbers)


def test_a_recall_thought_begins_with_the_ship_and_says_the_fact_of_the_answer() -> None:
    for sample in several(recall.make, 30, num_tokens=600, thinking=True):
        ship, fact = (sample.turns[-1].thought or "").rstrip(".").split(": ")
        assert sample.turns[-1].text.startswith(f"The {ship} ") and sample.turns[-1].text.endswith(f" {fact}.")
    assert all(t.thought is None for s in several(recall.make, 30, num_tokens=600, thinking=False) for t in s.turns)


def test_depth_puts_the_answer_where_it_says() -> None:
    first, last = (recall.make(random.Random(5), num_tokens=2000, depth=depth) for depth in (0.0, 1.0))
    for sample, low, high in ((first, 0.0, 0.1), (last, 0.9, 1.0)):
        text = sample.turns[0].text if len(sample.turns) == 2 else sample.turns[0].text + sample.turns[2].text
        assert low <= text.index(sample.facts["ships"][0]) / len(text) <= high


def test_written_steps_and_answers_add_up() -> None:
    for sample in several(thinking.make, 300, thinking=True):
        thought = sample.turns[1].thought or ""
        for left, sign, right, result in re.findall(r"(\d+) ([+*-]) (\d+) = (\d+)", thought):
            a, b = int(left), int(right)
            assert int(result) == {"+": a + b, "-": a - b, "*": a * b}[sign]
        steps = re.findall(r"= (\d+)", thought)
        if " than " not in thought:
            assert re.findall(r"\d+", sample.turns[1].text)[-1] == steps[-1]


def test_comparisons_name_the_right_person() -> None:
    checked = 0
    for sample in several(thinking.make, 400, thinking=True):
        found = re.match(
            r"(\w+) has (\d+) \w+ and (\w+) has (\d+) \w+\. \w+ gets (\d+) more\. Who has (more|fewer)",
            sample.turns[0].text,
        )
        if found:
            first, a, second, b, c, word = found.groups()
            first_has_more = int(a) + int(c) > int(b)
            winner = first if first_has_more == (word == "more") else second
            assert sample.turns[1].text.startswith(f"{winner} has {word}")
            checked += 1
    assert checked > 20


def test_calls_fit_their_schemas_and_the_request_says_every_value() -> None:
    kinds = {"string": str, "integer": int, "number": float, "boolean": bool, "array": list, "object": dict}
    for sample in several(tools.make, 200, kind="parallel"):
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in sample.tools}
        request = next(turn.text for turn in sample.turns if turn.role == "user")
        for call in next(turn for turn in sample.turns if turn.calls).calls:
            schema = schemas[call.name]
            assert set(schema["required"]) <= set(call.arguments) <= set(schema["properties"])
            for name, value in call.arguments.items():
                assert isinstance(value, kinds[schema["properties"][name]["type"]])
                assert value in schema["properties"][name].get("enum", [value])
                if isinstance(value, str):
                    assert value in request


def test_a_declined_request_fits_no_tool() -> None:
    for sample in several(tools.make, 100, kind="decline"):
        deed = re.search(r"no tool to (\w+ an? \w+\.)", sample.turns[-1].text)
        assert deed is not None
        assert deed[1] not in [tool["function"]["description"].lower() for tool in sample.tools]
        json.dumps(sample.tools)


def test_many_declined_requests_share_a_verb_or_a_thing_with_a_tool() -> None:
    near = 0
    for sample in several(tools.make, 200, kind="decline"):
        verb, _, thing = sample.turns[-1].text.removeprefix("I have no tool to ").rstrip(".").split()
        deeds = [tool["function"]["description"].lower().rstrip(".").split() for tool in sample.tools]
        near += any(verb == deed[0] or thing == deed[2] for deed in deeds)
    assert near > 120


def test_described_shapes_are_where_the_drawing_has_them() -> None:
    for sample in several(pictures.make, 200):
        for shape in (shape for drawing in sample.drawings for shape in drawing.shapes):
            place = pictures.PLACES[pictures.cell_of(shape)]
            assert ("left" in place) == (shape.x < 1 / 3) and ("right" in place) == (shape.x > 2 / 3)
            assert ("top" in place) == (shape.y < 1 / 3) and ("bottom" in place) == (shape.y > 2 / 3)
            assert shape.color != sample.drawings[0].ground or len(sample.drawings) > 1


def test_counts_are_the_number_of_shapes() -> None:
    for sample in several(pictures.make, 300):
        for asked, answered in zip(sample.turns[::2], sample.turns[1::2], strict=True):
            if "How many shapes" in asked.text or "Count the shapes" in asked.text:
                assert pictures.NUMBERS[len(sample.drawings[0].shapes)] in answered.text


def test_a_moving_shape_goes_where_the_answer_says() -> None:
    checked = 0
    for sample in several(clips.make, 300):
        found = re.match(r"The (\w+) (\w+) moves (.+)\.", sample.turns[1].text)
        if found:
            color, kind, way = found.groups()
            first, last = (
                next(s for s in frame.shapes if (s.kind, s.color) == (kind, color))
                for frame in (sample.clip.frames[0], sample.clip.frames[-1])
            )
            dx, dy = clips.DIRECTIONS[way]
            assert (last.x - first.x) * dx + (last.y - first.y) * dy > 0.3
            checked += 1
    assert checked > 50


def test_shapes_appear_in_the_order_that_is_told() -> None:
    for sample in several(clips.make, 300):
        if ", then " in sample.turns[1].text:
            seen: list[str] = []
            for frame in sample.clip.frames:
                name = f"{frame.shapes[0].color} {frame.shapes[0].kind}"
                if name not in seen:
                    seen.append(name)
            told = [
                re.sub(r"^(First comes )?an? ", "", part) for part in sample.turns[1].text.rstrip(".").split(", then ")
            ]
            assert seen == told


def test_copies_are_in_their_question_or_differ_by_the_asked_word() -> None:
    for sample in several(copying.make, 300):
        question, answer = sample.turns[0].text, sample.turns[1].text
        edit = re.match(r"(?:Replace|Change) (\S+) (?:with|to) (\S+) in this text:\n(.*)", question)
        if edit:
            old, new, text = edit.groups()
            assert answer.split() == [new if word == old else word for word in text.split()]
        elif not question.startswith("Put "):
            assert answer in question


def test_talk_answers_the_first_words_of_every_user() -> None:
    asked = {
        turn.text.lower().rstrip("?!.")
        for sample in several(talk.make, 3000)
        for turn in sample.turns
        if turn.role == "user"
    }
    assert {"hello", "who are you", "what can you do"} <= asked
