"""Training state on disk, in pieces small enough to carry: weights in float32, optimizer moments in bf16."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

PIECE_BYTES = 15_000_000


def save_pieces(tensors: Mapping[str, Tensor], folder: Path, stem: str) -> None:
    """Writes stem-0.safetensors, stem-1.safetensors…, each at most `PIECE_BYTES` (one tensor may exceed it alone)."""
    pieces: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        num_bytes = tensor.numel() * tensor.element_size()
        if pieces[-1] and size + num_bytes > PIECE_BYTES:
            pieces.append({})
            size = 0
        pieces[-1][name] = tensor.detach().cpu().contiguous()
        size += num_bytes
    for index, piece in enumerate(pieces):
        save_file(piece, str(folder / f"{stem}-{index}.safetensors"))


def load_pieces(folder: Path, stem: str) -> dict[str, Tensor]:
    """All tensors of a stem; an empty folder is an error that names it."""
    paths = sorted(folder.glob(f"{stem}-*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"no {stem}-*.safetensors in {folder}")
    return {name: tensor for path in paths for name, tensor in load_file(str(path)).items()}


def load_weights(model: nn.Module, folder: Path) -> None:
    weights = load_pieces(folder, "weights")
    missing = set(model.state_dict()) ^ set(weights)
    if missing:
        raise ValueError(f"the checkpoint in {folder} does not fit the model: {sorted(missing)[:5]}")
    model.load_state_dict(weights)


def save(folder: Path, model: nn.Module, moments: Mapping[str, Tensor], progress: Mapping[str, Any]) -> None:
    """A resumable checkpoint: weights, moments, and the step, seeds and log in progress.json."""
    folder.mkdir(parents=True, exist_ok=True)
    save_pieces(model.state_dict(), folder, "weights")
    save_pieces({name: value.to(torch.bfloat16) for name, value in moments.items()}, folder, "moments")
    (folder / "progress.json").write_text(json.dumps(progress))


def load(folder: Path, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Loads the weights in place; returns the moments and the progress."""
    load_weights(model, folder)
    return load_pieces(folder, "moments"), json.loads((folder / "progress.json").read_text())
