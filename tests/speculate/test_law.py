"""Drafts change neither a text nor its distribution, and are right as often as arithmetic says.

The model is a table of logits, one row for each last token, so every probability can be enumerated. Its head is another
such table.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from sampling.distributions import distribution

from headrace.sampling.draw import NO_TOKEN, draw
from headrace.sampling.history import History
from headrace.sampling.rows import SamplingRow
from headrace.sampling.sampler import sample
from headrace.speculate.drafter import draw_drafts
from headrace.speculate.verify import gained_tokens, window_rows
from headrace.types.request import SamplingParams

Floats = npt.NDArray[np.float64]
Drafter = Callable[[list[SamplingRow], list[int], int], list[tuple[int, ...]]]
"""Rows, their last tokens and a depth in, drafts of each row out."""

NUM_TOKENS = 6
PROMPT = (1, 4)
STOP = frozenset({5})
TABLE = np.random.default_rng(5).normal(0, 1.5, (NUM_TOKENS, NUM_TOKENS))
HEAD = TABLE + np.random.default_rng(6).normal(0, 0.7, TABLE.shape)

PLAIN = SamplingParams(temperature=0.7, top_p=1, top_k=0, min_p=0, seed=0)
SETTINGS = {
    "temperature": PLAIN,
    "top_p": replace(PLAIN, temperature=1.2, top_p=0.75),
    "min_p and top_k": replace(PLAIN, temperature=1.5, min_p=0.2, top_k=4),
    "penalties": replace(PLAIN, repetition_penalty=1.4, frequency_penalty=0.5, presence_penalty=0.8),
    "bans": replace(PLAIN, banned_token_ids=frozenset({2}), banned_sequences=((4, 0), (0, 1, 3)), min_tokens=2),
    "greedy": replace(PLAIN, temperature=0, presence_penalty=0.9, banned_sequences=((3, 1),)),
}


def probabilities(params: SamplingParams, output: Sequence[int]) -> Floats:
    """What the next token is drawn from, computed plainly in float64."""
    text = [*PROMPT, *output]
    logits = TABLE[text[-1]].copy()
    for token_id in range(NUM_TOKENS):
        ends_word = any([*text, token_id][-len(word) :] == list(word) for word in params.banned_sequences)
        too_early = token_id in STOP and len(output) < params.min_tokens
        if token_id in params.banned_token_ids or ends_word or too_early:
            logits[token_id] = -np.inf
        if token_id in text:
            logits[token_id] *= params.repetition_penalty if logits[token_id] < 0 else 1 / params.repetition_penalty
        count = output.count(token_id)
        logits[token_id] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    if params.temperature == 0:
        return np.eye(NUM_TOKENS)[logits.argmax()]
    masses = np.exp((logits - logits.max()) / params.temperature)
    masses[masses < params.min_p] = 0
    order = np.argsort(-masses)
    if params.top_k:
        masses[order[params.top_k :]] = 0
    before = np.cumsum(masses[order]) - masses[order]
    masses[order[before >= params.top_p * masses.sum()]] = 0
    return np.asarray(masses / masses.sum())


def play(
    settings: Sequence[SamplingParams], length: int, depth: int, drafter: Drafter
) -> tuple[list[tuple[int, ...]], int, int]:
    """The first `length` tokens of each row's output, all rows stepping together; how many drafts there were and
    how many of them were right."""
    histories = [History(PROMPT, NUM_TOKENS) for _ in settings]
    outputs: list[list[int]] = [[] for _ in settings]
    num_drafts = num_accepted = 0
    while active := [number for number, output in enumerate(outputs) if len(output) < length]:
        rows = [SamplingRow(settings[each], len(outputs[each]), histories[each], STOP) for each in active]
        last = [[*PROMPT, *outputs[each]][-1] for each in active]
        drafts = drafter(rows, last, depth)
        windows = [window_rows(row, of_row) for row, of_row in zip(rows, drafts, strict=True)]
        places = [token for before, of_row in zip(last, drafts, strict=True) for token in (before, *of_row)]
        logits = mx.array(TABLE[places].astype(np.float32))
        drawn = iter(sample(logits, list(itertools.chain(*windows))).tolist())  # type: ignore[call-overload]
        for number, of_row in zip(active, drafts, strict=True):
            gained = gained_tokens(of_row, list(itertools.islice(drawn, len(of_row) + 1)))
            assert NO_TOKEN not in gained
            outputs[number] += gained
            histories[number].append(gained)
            num_drafts += min(len(gained), len(of_row))
            num_accepted += len(gained) - 1
    return [tuple(output[:length]) for output in outputs], num_drafts, num_accepted


def no_drafts(rows: list[SamplingRow], last: list[int], depth: int) -> list[tuple[int, ...]]:
    return [()] * len(rows)


def random_drafts(rows: list[SamplingRow], last: list[int], depth: int) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(sum(row.output_index for row in rows))
    return [tuple(rng.integers(0, NUM_TOKENS, rng.integers(0, depth + 1)).tolist()) for _ in rows]


def head_drafts(rows: list[SamplingRow], last: list[int], depth: int) -> list[tuple[int, ...]]:
    """Chained on the head's own drafts, as they come."""
    drafts: list[tuple[int, ...]] = [()] * len(rows)
    for _ in range(depth):
        later = [row.after(of_row) for row, of_row in zip(rows, drafts, strict=True)]
        logits = mx.array(HEAD[[[token, *of_row][-1] for token, of_row in zip(last, drafts, strict=True)]])
        ids = draw_drafts(logits, later)
        drafts = [(*of_row, token) for of_row, token in zip(drafts, ids.tolist(), strict=True)]  # type: ignore[arg-type]
    return drafts


def right_drafts(texts: dict[int, tuple[int, ...]], corrupted: float) -> Drafter:
    """Drafts from the very text, by seed, with a share of the tokens changed."""

    def draft(rows: list[SamplingRow], last: list[int], depth: int) -> list[tuple[int, ...]]:
        drafts = []
        for row in rows:
            rng = np.random.default_rng((row.params.seed, row.output_index))
            right = texts[row.params.seed][row.output_index : row.output_index + depth]
            drafts.append(tuple((token + (rng.random() < corrupted)) % NUM_TOKENS for token in right))
        return drafts

    return draft


@pytest.mark.parametrize("depth", [1, 2, 3, 7])
@pytest.mark.parametrize("num_rows", [1, 4, 24])
def test_a_text_is_the_same_with_any_drafts(num_rows: int, depth: int) -> None:
    kinds = list(SETTINGS.values())
    settings = [replace(kinds[seed % len(kinds)], seed=seed) for seed in range(num_rows)]
    plain, _, _ = play(settings, 20, 0, no_drafts)
    texts = dict(enumerate(plain))
    assert len(set(plain)) > num_rows / 2
    for drafter in (random_drafts, head_drafts, right_drafts(texts, 0.3)):
        text, num_drafts, num_accepted = play(settings, 20, depth, drafter)
        assert text == plain
        assert 0 <= num_accepted < num_drafts
    text, num_drafts, num_accepted = play(settings, 20, depth, right_drafts(texts, 0.0))
    assert text == plain
    assert num_accepted == num_drafts


@pytest.mark.parametrize("drafter", [head_drafts, random_drafts])
def test_greedy_text_is_the_most_likely_one(drafter: Drafter) -> None:
    params = SETTINGS["greedy"]
    output: list[int] = []
    for _ in range(30):
        output.append(int(probabilities(params, output).argmax()))
    (text,), _, _ = play([params], 30, 3, drafter)
    assert text == tuple(output)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "depth"), [("temperature", 2), ("top_p", 1), ("min_p and top_k", 3), ("penalties", 2), ("bans", 3)]
)
def test_texts_come_as_often_as_the_model_says(kind: str, depth: int) -> None:
    params, length, num_texts = SETTINGS[kind], 3, 3000
    texts, _, num_accepted = play([replace(params, seed=seed) for seed in range(num_texts)], length, depth, head_drafts)
    counts = Counter(texts)
    variation = spread = 0.0
    for text in itertools.product(range(NUM_TOKENS), repeat=length):
        chances = [probabilities(params, text[:place])[token] for place, token in enumerate(text)]
        share = math.prod(chances)
        assert share > 0 or not counts[text]
        variation += abs(counts[text] / num_texts - share) / 2
        spread += math.sqrt(share * (1 - share) / num_texts) / 2
    # One text moves the variation by 1 / N at most: it lies further above its mean than this once in a million times
    # (McDiarmid), and the mean is at most `spread`.
    assert variation < spread + math.sqrt(math.log(1e6) / (2 * num_texts))
    assert num_accepted > 0


def overlap(first: Floats, second: Floats) -> float:
    """How much of the line from 0 to 1 belongs to the same token under both."""
    ends, other_ends = np.cumsum(first), np.cumsum(second)
    common = np.minimum(ends, other_ends) - np.maximum(ends - first, other_ends - second)
    return float(np.maximum(common, 0).sum())


def softmax(logits: Floats, temperature: float) -> Floats:
    masses = np.exp((logits - logits.max()) / temperature)
    return np.asarray(masses / masses.sum())


@pytest.mark.parametrize("kind", SETTINGS)
def test_a_draft_of_the_head_is_right_as_often_as_the_shares_of_the_line_overlap(kind: str) -> None:
    """A million draws, and a million drafts with the same numbers."""
    num_draws, output = 1_000_000, (2, 0)
    history = History(PROMPT, NUM_TOKENS)
    history.append(output)
    row = SamplingRow(SETTINGS[kind], 2, history, STOP)
    own = distribution(mx.array(TABLE[[0]].astype(np.float32)), [row])
    of_head = distribution(mx.array(HEAD[[0]].astype(np.float32)), [row])
    places = np.random.default_rng(9).random(num_draws)
    tokens = np.array(draw(mx.broadcast_to(own, (num_draws, NUM_TOKENS)), places))
    drafts = np.array(draw(mx.broadcast_to(of_head, (num_draws, NUM_TOKENS)), places))
    expected = probabilities(SETTINGS[kind], output)
    shares = np.bincount(tokens, minlength=NUM_TOKENS) / num_draws
    spread = np.sqrt(expected * (1 - expected) / num_draws)
    assert np.abs(shares - expected).sum() / 2 < 2 * spread.sum() + 1e-6
    right = overlap(expected, np.array(of_head[0], dtype=np.float64))
    assert abs((drafts == tokens).mean() - right) < 4 * math.sqrt(right * (1 - right) / num_draws) + 1e-6
    # A certain draft owes nothing to the drawn number: it is right as often as speculative sampling can reach.
    for draft in range(NUM_TOKENS):
        reachable = np.minimum(expected, np.eye(NUM_TOKENS)[draft]).sum()
        assert abs((tokens == draft).mean() - reachable) < 5 * math.sqrt(0.25 / num_draws)


def test_a_row_without_a_distribution_gets_a_draft_all_the_same() -> None:
    logits = mx.array([[math.nan, 1.0], [0.0, 1.0], [-math.inf, -math.inf]])
    ids = draw_drafts(logits, [SamplingRow(replace(PLAIN, temperature=0), 0)] * 3)
    assert ids.tolist() == [0, 1, 0]
