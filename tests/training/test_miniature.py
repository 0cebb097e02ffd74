"""The shipped files: mlx-lm and mlx-vlm load them unchanged and agree with the recipe's model; the jobs come out."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from tokenizers import Tokenizer

from training.chat import encode
from training.jobs import copying, recall, thinking, tools
from training.sample import Sample

FOLDER = Path(__file__).parents[2] / "src" / "headrace" / "miniature"
REFERENCE = Path(__file__).parent / "data" / "reference.npz"
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def text_model() -> Iterator[Any]:
    from mlx_lm.utils import load_model

    model, _ = load_model(FOLDER)
    model.set_dtype(mx.float32)
    yield model


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@pytest.fixture(scope="module")
def reference() -> dict[str, np.ndarray]:
    with np.load(REFERENCE) as arrays:
        return dict(arrays)


def choices(model: Any, ids: np.ndarray) -> np.ndarray:
    """The model's first choice after each token."""
    return np.array(mx.argmax(model(mx.array(ids)[None])[0], -1))


def num_exact(model: Any, tokenizer: Tokenizer, samples: list[Sample]) -> int:
    """Samples whose every learned token is the model's first choice, which greedy decoding would then say."""
    total = 0
    for sample in samples:
        encoded = encode(sample, tokenizer)
        said = choices(model, encoded.ids)[:-1]
        total += bool(((said == encoded.ids[1:]) | ~encoded.learned[1:]).all())
    return total


def test_mlx_lm_agrees_on_text(text_model: Any, reference: dict[str, np.ndarray]) -> None:
    logits = np.array(text_model(mx.array(reference["text.ids"])[None])[0])
    rows = reference["text.logits"]
    assert np.abs(logits[-len(rows) :] - rows).max() < TOLERANCE


@pytest.mark.parametrize("case", ["text", "picture", "two_pictures", "clip"])
def test_mlx_vlm_agrees_on_text_pictures_and_clips(case: str, reference: dict[str, np.ndarray]) -> None:
    from mlx_vlm.utils import load_model

    model = load_model(FOLDER)
    model.set_dtype(mx.float32)
    media: dict[str, mx.array] = {}
    if case != "text":
        pixels = mx.array(reference[f"{case}.pixels"].astype(np.float32) / 127.5 - 1)
        kind = ("pixel_values_videos", "video_grid_thw") if case == "clip" else ("pixel_values", "image_grid_thw")
        media = {kind[0]: pixels, kind[1]: mx.array(reference[f"{case}.grid"])}
    output = model(mx.array(reference[f"{case}.ids"])[None], mask=None, **media)
    rows = reference[f"{case}.logits"]
    assert np.abs(np.array(output.logits[0])[-len(rows) :] - rows).max() < TOLERANCE


@pytest.mark.parametrize(("job", "least"), [("thinking", 7), ("copying", 5), ("tools", 2), ("recall", 2)])
def test_a_sample_of_the_held_out_jobs_comes_out_to_the_letter(
    job: str, least: int, text_model: Any, tokenizer: Tokenizer
) -> None:
    stream = random.Random("sample")
    made = {
        "thinking": lambda: [thinking.make(stream, True) for _ in range(8)],
        "copying": lambda: [copying.make(stream, True) for _ in range(6)],
        "tools": lambda: [tools.make(stream, True, "call") for _ in range(3)],
        "recall": lambda: [recall.make(stream, True, 300, depth) for depth in (0.2, 0.8)],
    }
    assert num_exact(text_model, tokenizer, made[job]()) >= least


@pytest.mark.parametrize(
    ("question", "expected"), [("hello", "Hello!"), ("Who are you?", "Headrace"), ("What can you do?", "I can")]
)
def test_the_first_words_of_a_stranger_get_a_sensible_answer(
    question: str, expected: str, text_model: Any, tokenizer: Tokenizer
) -> None:
    prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    end = tokenizer.token_to_id("<|im_end|>")
    cache = text_model.make_cache()
    answer = [int(mx.argmax(text_model(mx.array(ids)[None], cache=cache)[0, -1]))]
    while len(answer) < 60 and answer[-1] != end:
        answer.append(int(mx.argmax(text_model(mx.array(answer[-1:])[None], cache=cache)[0, -1])))
    assert answer[-1] == end and expected in tokenizer.decode(answer)
