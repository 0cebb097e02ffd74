"""The reference draft-verify loop: it says what greedy decoding says, and counts only drafts that were reached."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the recipe's own requirements are not installed")

NUM_ROWS, LENGTH, VOCABULARY = 3, 64, 12


@pytest.fixture(scope="module")
def model() -> Any:
    from training.model import Miniature, TextShape, initialise

    torch.manual_seed(0)
    shape = TextShape(
        vocabulary_size=VOCABULARY,
        hidden_size=32,
        mlp_size=32,
        num_layers=2,
        attention_interval=2,
        num_heads=2,
        num_kv_heads=1,
        head_size=32,
        linear_head_size=16,
    )
    model = Miniature(shape, None)
    initialise(model, 3)
    with torch.no_grad():
        model.model.language_model.embed_tokens.weight.mul_(20)  # so that choices are clear
    return model.eval()


@pytest.fixture(scope="module")
def placed() -> Any:
    from training.forward import Placed

    ids = torch.from_numpy(np.random.default_rng(1).integers(0, VOCABULARY, NUM_ROWS * LENGTH))
    positions = torch.arange(LENGTH).repeat(3, NUM_ROWS)
    nothing = torch.zeros(NUM_ROWS * LENGTH, dtype=torch.bool)
    return Placed(ids, nothing, nothing, positions, None, (32, 32), NUM_ROWS)


def greedy(model: Any, placed: Any, row: int, known: int, limit: int, end: int) -> list[int]:
    """One row's ids by the plainest decoding: the whole row again for every token."""
    from training.model import layout_of

    ids = placed.ids.reshape(NUM_ROWS, -1)[row].clone()
    while known < limit:
        layout = layout_of(placed.positions[:, :LENGTH], 1, model.shape)
        hidden = model.model.language_model(model.embed(ids), layout)
        ids[known] = model.logits(hidden[known - 1]).argmax()
        known += 1
        if ids[known - 1] == end:
            break
    return ids[:known].tolist()


def test_the_loop_says_what_greedy_decoding_says(model: Any, placed: Any) -> None:
    from training.speculation import DEPTH, speculate

    known, limits = torch.tensor([5, 20, 11]), torch.tensor([40, 50, 13])
    with torch.no_grad():
        free = [greedy(model, placed, row, int(known[row]), int(limits[row]), -1) for row in range(NUM_ROWS)]
        end = free[0][14]  # a token that the first row does say
        for stop in (-1, end):
            answers = speculate(model, placed, known, limits, stop)
            for row in range(NUM_ROWS):
                expected = greedy(model, placed, row, int(known[row]), int(limits[row]), stop)
                said = answers.ids[row, : int(answers.ends[row])].tolist()
                assert said[: len(expected)] == expected
                assert len(said) - len(expected) <= (DEPTH if expected[-1] != stop else 0)


def test_a_perfect_head_has_every_draft_accepted_and_a_wrong_one_none(
    model: Any, placed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from training import speculation

    known, limits = torch.tensor([5, 20, 11]), torch.tensor([35, 50, 41])
    truth = speculation.speculate(model, placed, known, limits + 3, -1).ids

    def knows(offset: int) -> Any:
        def drafts(_: Any, __: Any, ___: Any, ____: Any, known: Any, newest: Any) -> Any:
            rows = torch.arange(NUM_ROWS)
            return tuple((truth[rows, known + depth] + offset) % VOCABULARY for depth in (1, 2))

        return drafts

    monkeypatch.setattr(speculation, "drafts", knows(0))
    right = speculation.speculate(model, placed, known, limits, -1)
    assert right.reached == right.accepted == (30, 30)  # 3 rows of 30 tokens, 3 tokens a step
    monkeypatch.setattr(speculation, "drafts", knows(1))
    wrong = speculation.speculate(model, placed, known, limits, -1)
    assert wrong.reached == (90, 0) and wrong.accepted == (0, 0)  # one token a step


def test_the_loops_second_draft_is_the_one_that_training_makes(model: Any, placed: Any) -> None:
    from training.forward import following, run
    from training.speculation import drafts

    known = torch.tensor([9, 30, 44])
    rows = torch.arange(NUM_ROWS) * LENGTH
    with torch.no_grad():
        hidden, layout = run(model, placed)
        first = model.logits(hidden.first).argmax(-1)[rows + known - 1]
        ids = placed.ids.clone()
        ids[rows + known + 1] = first  # training feeds the row's own tokens, here the head's
        table = model.model.language_model.embed_tokens
        folded, keys, values = model.mtp.fold(hidden.trunk, table(following(placed.ids, 1, layout)), layout)
        from training.model import layout_of

        further = layout_of(placed.positions + 1, NUM_ROWS, model.shape)
        second = model.mtp.chain(folded, table(following(ids, 2, layout)), further, keys, values)
        expected = model.logits(second).argmax(-1)[rows + known - 1]
        found = drafts(model, placed, hidden.trunk, layout, known, placed.ids[rows + known])
    assert found[0].tolist() == first.tolist()
    assert found[1].tolist() == expected.tolist()
