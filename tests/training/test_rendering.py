"""Rendering and packing: equal to the shipped template and tokenizer, positions by hand, pixels where they belong."""

import itertools
import json
import random
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from training.batches import BUDGET, collate, row_length
from training.chat import encode, expand_media, group_times, joined, render, rope_positions
from training.jobs import clips
from training.mixture import samples
from training.sample import IMAGE_MARK, VIDEO_MARK, Clip, Drawing, Sample, Turn

FOLDER = Path(__file__).parents[2] / "src" / "headrace" / "miniature"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def template() -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.globals["raise_exception"] = refuse
    return environment.from_string((FOLDER / "chat_template.jinja").read_text())


def messages(sample: Sample) -> list[dict[str, Any]]:
    rows = []
    for turn in sample.turns:
        row: dict[str, Any] = {"role": turn.role, "content": turn.text}
        if turn.thought is not None:
            row["reasoning_content"] = turn.thought
        if turn.calls:
            row["tool_calls"] = [{"function": {"name": c.name, "arguments": dict(c.arguments)}} for c in turn.calls]
        rows.append(row)
    return rows


@pytest.mark.parametrize("kind", ["short", "long", "media"])
def test_rendering_equals_the_shipped_template(kind: str) -> None:
    written = template()
    for sample in itertools.islice(samples(kind, "render"), 120 if kind == "short" else 15):
        expected = written.render(messages=messages(sample), tools=list(sample.tools) or None)
        assert "".join(text for text, _ in render(sample)) == expected


def test_the_generation_prompt_is_how_a_learned_turn_begins() -> None:
    for sample in itertools.islice(samples("short", "prompt"), 60):
        if sample.turns[-1].role != "assistant":
            continue
        prompt = template().render(
            messages=messages(sample)[:-1],
            tools=list(sample.tools) or None,
            add_generation_prompt=True,
            enable_thinking=sample.thinking,
        )
        if sample.turns[-2].role == "tool" or sample.turns[-2].role == "user":
            assert "".join(text for text, _ in render(sample)).startswith(prompt)


def test_a_late_system_message_raises() -> None:
    rows = [{"role": "user", "content": "hello"}, {"role": "system", "content": "be brief"}]
    with pytest.raises(jinja2.TemplateError, match="first message"):
        template().render(messages=rows)


def test_earlier_thinking_is_dropped_once_the_user_speaks_again() -> None:
    rows = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "deep"},
        {"role": "user", "content": "c"},
    ]
    text = template().render(messages=rows, add_generation_prompt=True)
    assert "deep" not in text and text.endswith("<|im_start|>assistant\n<think>\n")


def test_pieces_tokenize_as_the_whole_text_does(tokenizer: Tokenizer) -> None:
    for kind in ("short", "media"):
        for sample in itertools.islice(samples(kind, "pieces"), 80):
            text = expand_media("".join(text for text, _ in render(sample)), sample, outer_pair=False)
            assert encode(sample, tokenizer).ids.tolist() == tokenizer.encode(text, add_special_tokens=False).ids


def test_learned_tokens_are_what_the_assistant_says_and_its_end_mark(tokenizer: Tokenizer) -> None:
    sample = Sample("talk", (Turn("user", "hello"), Turn("assistant", "Hi there.", "Easy.")), thinking=True)
    encoded = encode(sample, tokenizer)
    said = tokenizer.decode(encoded.ids[encoded.learned].tolist(), skip_special_tokens=False)
    assert said == "Easy.\n</think>\n\nHi there.<|im_end|>"
    assert [learned for _, learned in joined(render(sample))] == [False, True, False]


def test_an_unknown_role_is_named() -> None:
    with pytest.raises(ValueError, match="'robot'"):
        render(Sample("talk", (Turn("user", "hello"), Turn("robot", "beep"))))


def test_positions_of_text_image_text_by_hand() -> None:
    ids = [1, 9, 9, 9, 9, 9, 9, 2]
    expected = [[0, 1, 1, 1, 1, 1, 1, 4], [0, 1, 1, 1, 2, 2, 2, 4], [0, 1, 2, 3, 1, 2, 3, 4]]
    assert rope_positions(ids, [9], (2, 3)).tolist() == expected


def test_placeholders_that_fill_no_grid_are_an_error() -> None:
    with pytest.raises(ValueError, match="token 1"):
        rope_positions([1, 9, 9, 2], [9], (2, 2))


def test_a_video_has_a_time_and_marks_around_every_pair_of_frames() -> None:
    blank = Drawing("white", ())
    sample = Sample("clips", (Turn("user", VIDEO_MARK),), clip=Clip((blank,) * 3, (0.0, 0.5, 1.0)), size=(32, 64))
    pair = "<|vision_start|><|video_pad|><|video_pad|><|vision_end|>"
    assert group_times(sample.clip) == [0.25, 1.0]
    assert expand_media(VIDEO_MARK, sample, False) == f"<0.2 seconds>{pair}<1.0 seconds>{pair}"
    assert expand_media(VIDEO_MARK, sample, True).startswith("<|vision_start|><0.2 seconds><|vision_start|>")
    assert expand_media(IMAGE_MARK, sample, False).count("<|image_pad|>") == 2


def test_rows_are_padded_on_the_right_and_padding_is_never_learned(tokenizer: Tokenizer) -> None:
    sample = next(samples("short", "pad"))
    encoded = encode(sample, tokenizer)
    length = row_length(len(encoded.ids))
    assert length is not None and BUDGET % length == 0
    batch = collate("short", [(encoded, sample)], length, 2, sample.size)
    count = len(encoded.ids)
    assert batch.ids[0, :count].tolist() == encoded.ids.tolist()
    assert not batch.learned[0, count:].any() and not batch.learned[1].any()
    assert np.array_equal(batch.positions[:, 0, :count], encoded.positions)


def test_clips_never_exceed_the_preprocessors_pixel_budget() -> None:
    stream = random.Random(3)
    limit = json.loads((FOLDER / "video_preprocessor_config.json").read_text())["size"]["longest_edge"]
    for _ in range(200):
        sample = clips.make(stream)
        assert len(sample.clip.frames) * sample.size[0] * sample.size[1] <= limit
