"""What a draft model's attention finds important in a prompt (the scoring of SpecPrefill, arXiv 2502.02789)."""

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from training.chat import encode, expand_media, render
from training.gdn import scan
from training.model import Miniature, attend, layout_of
from training.sample import Sample

NUM_LOOKAHEAD, POOL, CHUNK, KEPT_SHARE = 8, 13, 32, 0.2


def traced(model: Miniature, ids: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Hidden states [T, hidden] of one row of ids (T a multiple of 64), and each attention layer's queries and keys."""
    layout = layout_of(torch.arange(len(ids), device=ids.device).expand(3, -1), 1, model.shape)
    x, seen = model.embed(ids), []
    for layer in model.model.language_model.layers:
        *parts, gate = layer.enter(x, layout.offset, layout.cos, layout.sin)
        if layer.recurrent:
            mixed = scan(tuple(parts), 1)
        else:
            seen.append((parts[0], parts[1]))
            mixed = attend(parts[0], parts[1], parts[2], 1)
        x = layer.leave(x, mixed, gate)
    return model.model.language_model.norm(x), seen


@torch.no_grad()
def prompt_importance(model: Miniature, prompt: np.ndarray, device: torch.device) -> Tensor:
    """Importance [M] of every prompt token: greedy look-ahead, the largest smoothed attention, the mean over steps."""
    length = -(-(len(prompt) + NUM_LOOKAHEAD) // 64) * 64
    ids = torch.zeros(length, dtype=torch.long, device=device)
    ids[: len(prompt)] = torch.from_numpy(prompt).to(device)
    for step in range(NUM_LOOKAHEAD):
        hidden, seen = traced(model, ids)
        at = len(prompt) + step
        ids[at] = model.logits(hidden[at - 1]).argmax()
    asking = slice(len(prompt) - 1, len(prompt) + NUM_LOOKAHEAD - 1)
    best: Tensor | None = None
    for queries, keys in seen:
        keys = keys[: len(prompt)].repeat_interleave(queries.shape[1] // keys.shape[1], 1)
        scores = torch.einsum("qhd,khd->qhk", queries[asking], keys) * queries.shape[-1] ** -0.5
        smooth = F.avg_pool1d(scores.softmax(-1), POOL, 1, POOL // 2, count_include_pad=False)
        largest = smooth.amax(1)
        best = largest if best is None else torch.maximum(best, largest)
    if best is None:
        raise ValueError("the model has no attention layer to score with")
    return best.mean(0)


def kept_chunks(importance: Tensor) -> set[int]:
    """The best share of the prompt's chunks by mean importance."""
    num_chunks = -(-len(importance) // CHUNK)
    means = torch.stack([chunk.mean() for chunk in importance.split(CHUNK)])
    return set(means.topk(max(1, round(num_chunks * KEPT_SHARE))).indices.tolist())


def kept(model: Miniature, tokenizer: Tokenizer, sample: Sample, device: torch.device) -> dict[str, bool]:
    """Whether all chunks are kept that hold the asked fact; that and its ship's name; the whole line of both."""
    encoded = encode(sample, tokenizer)
    prompt = encoded.ids[: encoded.last_turn[0]]
    text = expand_media("".join(text for text, _ in render(sample)), sample, outer_pair=False)
    ship, fact = sample.facts["ships"][0], sample.facts["facts"][0]
    named = text.index(ship)
    start, end = text.rfind("\n", 0, named) + 1, text.index("\n", named)
    told = text.index(fact, start, end)
    offsets = tokenizer.encode(text, add_special_tokens=False).offsets

    def chunks_of(first: int, last: int) -> set[int]:
        return {at // CHUNK for at, (begin, stop) in enumerate(offsets) if begin < last and stop > first}

    chosen = kept_chunks(prompt_importance(model, prompt, device))
    answer, name = chunks_of(told, told + len(fact)), chunks_of(named, named + len(ship))
    return {
        "facts_kept": answer <= chosen,
        "names_and_facts_kept": answer | name <= chosen,
        "lines_kept": chunks_of(start, end) <= chosen,
    }
