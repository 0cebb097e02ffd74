"""Writes reference logits of the shipped model for the tests: this implementation's, in float32.

python -m training.reference src/headrace/miniature tests/training/data/reference.npz
"""

import itertools
import sys
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from training.batches import collate
from training.chat import encode
from training.export import load_exported
from training.forward import place, run
from training.mixture import samples
from training.sample import Sample
from training.vision import PATCH

NUM_ROWS = 8  # of each case, the last ones


def cases() -> dict[str, Sample]:
    """A text, a picture, two pictures and a clip; media of 96 x 96 pixels keep the file small."""
    text = next(samples("short", "reference"))
    media = [sample for sample in itertools.islice(samples("media", "reference"), 300) if sample.size == (96, 96)]
    return {
        "text": text,
        "picture": next(s for s in media if len(s.drawings) == 1),
        "two_pictures": next(s for s in media if len(s.drawings) == 2),
        "clip": next(s for s in media if s.clip),
    }


@torch.no_grad()
def main() -> None:
    folder, out = Path(sys.argv[1]), Path(sys.argv[2])
    tokenizer, model = Tokenizer.from_file(str(folder / "tokenizer.json")), load_exported(folder)
    pads = (tokenizer.token_to_id("<|image_pad|>"), tokenizer.token_to_id("<|video_pad|>"))
    arrays: dict[str, np.ndarray] = {}
    for name, sample in cases().items():
        encoded = encode(sample, tokenizer)
        num_tokens = len(encoded.ids)
        batch = collate("reference", [(encoded, sample)], -(-num_tokens // 64) * 64, 1, sample.size)
        placed = place(batch, torch.device("cpu"), pads, None)
        hidden, _ = run(model, placed, drafts=1)
        rows = slice(num_tokens - NUM_ROWS, num_tokens)
        arrays[f"{name}.ids"], arrays[f"{name}.positions"] = encoded.ids, encoded.positions
        arrays[f"{name}.logits"] = model.logits(hidden.trunk[rows]).numpy()
        if placed.patches is not None:
            arrays[f"{name}.pixels"] = ((placed.patches.flatten(0, 1) + 1) * 127.5).round().byte().numpy()
            groups = placed.patches.shape[0]
            grid = [sample.size[0] // PATCH, sample.size[1] // PATCH]
            arrays[f"{name}.grid"] = np.array([[groups, *grid]] if sample.clip else [[1, *grid]] * groups)
    out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(out, allow_pickle=False, **arrays)


if __name__ == "__main__":
    main()
