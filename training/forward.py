"""One batch through the model: hidden states, drafts, and which positions count."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from training.batches import Batch
from training.drawing import draw, normalised
from training.model import Layout, Miniature, layout_of
from training.vision import patches_of

CHAIN_LENGTH = 512  # the second draft's masked attention is only affordable in rows up to this length


@dataclass(frozen=True, slots=True)
class Placed:
    """A batch on the device, flattened: ids, learned, is_pad [N], positions [3, N], patches [G, P, 1536] or None."""

    ids: Tensor
    learned: Tensor
    is_pad: Tensor
    positions: Tensor
    patches: Tensor | None
    size: tuple[int, int]
    num_rows: int


@dataclass(frozen=True, slots=True)
class Hidden:
    """Post-norm hidden states [N, hidden] of the trunk and of the first and second draft (None if not computed)."""

    trunk: Tensor
    first: Tensor | None
    second: Tensor | None


def place(
    batch: Batch, device: torch.device, pads: tuple[int | None, int | None], generator: torch.Generator | None
) -> Placed:
    """Moves a batch to the device and draws its pictures there; `generator` varies them as in training."""
    ids = torch.from_numpy(batch.ids).to(device, non_blocking=True).long().flatten()
    learned = torch.from_numpy(batch.learned).to(device, non_blocking=True).flatten()
    positions = torch.from_numpy(batch.positions).to(device, non_blocking=True).flatten(1)
    patches = None
    if batch.drawings is not None:
        packed = torch.from_numpy(batch.drawings).to(device)
        groups = packed.shape[0]
        same = (packed[:, 0] == packed[:, 1]).flatten(1).all(1)
        pixels = draw(packed.flatten(0, 1), batch.size, generator).unflatten(0, (groups, 2))
        pixels = torch.where(
            same[:, None, None, None, None], pixels[:, :1], pixels
        )  # a still picture has no noise in time
        patches = patches_of(normalised(pixels))
    is_pad = (ids == pads[0]) | (ids == pads[1])
    return Placed(ids, learned, is_pad, positions, patches, batch.size, batch.ids.shape[0])


def following(x: Tensor, steps: int, layout: Layout) -> Tensor:
    """The value `steps` tokens later in the row; zero (False) past its end."""
    shifted = F.pad(x[steps:], (0, steps))
    return torch.where(layout.offset < layout.length - steps, shifted, torch.zeros_like(shifted))


def run(model: Miniature, placed: Placed, drafts: int = 2) -> tuple[Hidden, Layout]:
    """The trunk and up to two drafts, fed with the row's own tokens."""
    layout = layout_of(placed.positions, placed.num_rows, model.shape)
    features = model.model.visual(placed.patches, placed.size) if placed.patches is not None else None
    trunk = model.model.language_model(model.embed(placed.ids, features, placed.is_pad), layout)
    if not model.shape.num_mtp_layers or drafts == 0:
        return Hidden(trunk, None, None), layout
    table = model.model.language_model.embed_tokens
    first, keys, values = model.mtp.fold(trunk, table(following(placed.ids, 1, layout)), layout)
    if drafts == 1 or layout.length > CHAIN_LENGTH:
        return Hidden(trunk, first, None), layout
    further = layout_of(placed.positions + 1, placed.num_rows, model.shape)
    second = model.mtp.chain(first, table(following(placed.ids, 2, layout)), further, keys, values)
    return Hidden(trunk, first, second), layout
