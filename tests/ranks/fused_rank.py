"""`python -m ranks.fused_rank`: a rank whose layers are those of CUDA, with operations instead of kernels."""

from __future__ import annotations

import os

from headrace.backend.kernels import Kernels
from headrace.cli import rank
from headrace.engine import warm_up
from headrace.engine.warm_up_pieces import WarmUpPiece
from headrace.models import load


def use_cudas_layers() -> None:
    """With a short warm-up: a piece of plain steps, one that drafts, and one that leaves snapshots."""
    load.Kernels = lambda numerics, device: Kernels(numerics, "cuda")  # type: ignore[assignment, misc]
    all_pieces = warm_up.pieces_for
    warm_up.pieces_for = lambda *given, **named: _few(all_pieces(*given, **named))


def _few(pieces: list[WarmUpPiece]) -> list[WarmUpPiece]:
    return [*pieces[:2], *[piece for piece in pieces if piece.num_snapshots][:1]]


if __name__ == "__main__":
    use_cudas_layers()
    os._exit(rank.main())
