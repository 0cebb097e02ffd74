"""The reference draft-verify loop: the MTP head drafts two tokens on its own outputs, and the trunk verifies them.

Nothing is cached: every step runs whole rows anew, so that no figure depends on a cache being right.
"""

import random
from dataclasses import dataclass, replace

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from training.batches import collate, grouped
from training.chat import Encoded, encode
from training.forward import Placed, following, place, run
from training.model import Layout, Miniature, layout_of
from training.sample import Sample

DEPTH = 2
LONGER = 16  # tokens by which an answer may outgrow its reference


@dataclass(frozen=True, slots=True)
class Answers:
    """Token ids [R, T] of prompts and answers, where each answer ends [R], and drafts by depth, summed over rows."""

    ids: Tensor
    ends: Tensor
    reached: tuple[int, ...]
    accepted: tuple[int, ...]


def drafts(
    model: Miniature, placed: Placed, trunk: Tensor, layout: Layout, known: Tensor, newest: Tensor
) -> tuple[Tensor, Tensor]:
    """The two tokens [R] that the head expects after `newest`, which follows the `known` first tokens of each row."""
    table = model.model.language_model.embed_tokens
    last = torch.arange(layout.num_rows, device=known.device) * layout.length + known - 1
    ids = placed.ids.clone()
    ids[last + 1] = newest
    folded, keys, values = model.mtp.fold(trunk, table(following(ids, 1, layout)), layout)
    first = model.logits(folded[last]).argmax(-1)
    further = layout_of(placed.positions[:, last] + 1, layout.num_rows, model.shape)
    extended = model.mtp.extend(folded[last], table(first), further, keys, values, known)
    return first, model.logits(extended).argmax(-1)


@torch.no_grad()
def speculate(model: Miniature, placed: Placed, known: Tensor, limits: Tensor, end: int) -> Answers:
    """Greedy answers to the prompts, the first `known` [R] tokens of each row, up to `limits` [R] or the token `end`.

    Rows must have room for `DEPTH` tokens behind their limit; what stands behind the prompts is overwritten.
    """
    known, ids = known.clone(), placed.ids.clone()
    rows = torch.arange(placed.num_rows, device=ids.device)
    start = rows * (len(ids) // placed.num_rows)
    reached, accepted = [0] * DEPTH, [0] * DEPTH
    trunk, layout = _trunk(model, placed, ids)
    newest = model.logits(trunk[start + known - 1]).argmax(-1)
    running = known < limits
    while running.any():
        guesses = drafts(model, replace(placed, ids=ids), trunk, layout, known, newest)
        for offset, tokens in enumerate((newest, *guesses)):
            at = start + known + offset
            ids[at] = torch.where(running, tokens, ids[at])
        trunk, layout = _trunk(model, placed, ids)
        said, fits, taken = newest, running.clone(), running.long()
        for depth, guess in enumerate(guesses):
            choice = model.logits(trunk[start + known + depth]).argmax(-1)
            fits &= said != end  # nothing follows the end, so no draft counts there
            reached[depth] += int(fits.sum())
            said = torch.where(fits, choice, said)
            fits &= guess == choice
            accepted[depth] += int(fits.sum())
            taken += fits
        last = start + known + taken - 1
        known = known + taken
        over = (ids[last] == end) | (known >= limits)
        newest = model.logits(trunk[start + known - 1]).argmax(-1)
        running = running & ~over
    return Answers(ids.reshape(placed.num_rows, -1), known, tuple(reached), tuple(accepted))


def _trunk(model: Miniature, placed: Placed, ids: Tensor) -> tuple[Tensor, Layout]:
    hidden, layout = run(model, replace(placed, ids=ids), drafts=0)
    return hidden.trunk, layout


def opened(encoded: Encoded) -> Encoded:
    """The conversation up to its last learned turn, and empty room for an answer of the model's own.

    `learned` then marks the tokens that the answer may have; there are `DEPTH` more.
    """
    first, end = encoded.last_turn
    num_allowed = end - first + LONGER
    room = np.arange(num_allowed + DEPTH)
    positions = encoded.positions[:, first - 1].max() + 1 + np.broadcast_to(room, (3, len(room)))
    return Encoded(
        np.concatenate([encoded.ids[:first], np.zeros_like(room, np.int32)]),
        np.concatenate([np.zeros(first, bool), room < num_allowed]),
        np.concatenate([encoded.positions[:, :first], positions], 1),
    )


def speculation_counts(
    model: Miniature, tokenizer: Tokenizer, samples: list[Sample], device: torch.device, budget: int
) -> dict[str, int]:
    """How many answers of the loop are the references, and drafts reached and accepted at each depth."""
    stream, end = random.Random(0), tokenizer.token_to_id("<|im_end|>")
    pads = (tokenizer.token_to_id("<|image_pad|>"), tokenizer.token_to_id("<|video_pad|>"))
    counts = dict.fromkeys(("samples", "exact", "tried_1", "accepted_1", "tried_2", "accepted_2"), 0)
    for _, batch in grouped([(encode(sample, tokenizer, stream), sample) for sample in samples], budget):
        rows = [(opened(encoded), sample) for encoded, sample in batch]
        length = -(-max(len(encoded.ids) for encoded, _ in rows) // 64) * 64
        placed = place(collate("speculated", rows, length, len(rows), batch[0][1].size), device, pads, None)
        room = placed.learned.reshape(len(rows), -1)
        known = room.int().argmax(1)
        answers = speculate(model, placed, known, known + room.sum(1), end)
        counts["samples"] += len(rows)
        for said, stop, (encoded, _) in zip(answers.ids.cpu().numpy(), answers.ends.tolist(), batch, strict=True):
            wanted = encoded.ids[: encoded.last_turn[1]]
            counts["exact"] += stop == len(wanted) and bool((said[:stop] == wanted).all())
        for depth in range(DEPTH):
            counts[f"tried_{depth + 1}"] += answers.reached[depth]
            counts[f"accepted_{depth + 1}"] += answers.accepted[depth]
    return counts
