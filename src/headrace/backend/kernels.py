"""Which form of each computation runs here: the one table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from headrace.backend.gated_delta import Form

_LOG2_E = 1.4426950408889634

_LONG_SCAN = 64
"""Tokens of a scan, at least so many, for which MLX's function may be faster: it computes chunks by matrix products."""

_UNFUSED_HEAD_DIM = 192
"""From here on Metal's attention holds the scores of all queries and keys, but for a prompt's first chunk. With neural
accelerators heads of 256 are fused from 1,024 queries on. Source: `use_fallback` in MLX's Metal attention."""
_SCORE_BYTES = 512_000_000


@partial(mx.compile, shapeless=True)
def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """silu(gate) · x with the sigmoid in base 2.

    Other types than float32 keep MLX's own form: the power would be rounded to theirs.

    MLX's CPU exponential costs about 15 ns an element and its power of two 4, so that a prompt's activations take a
    third of the time. Off by 1e-6 of the result; where the power overflows, the result is the 0 that it should be.
    """
    is_single = gate.dtype == mx.float32
    product: mx.array = (gate * x / (1 + mx.power(2.0, gate * -_LOG2_E))) if is_single else (nn.silu(gate) * x)
    return product


@dataclass(frozen=True, slots=True)
class Kernels:
    """The forms for one engine.

    numerics: "exact" takes mlx-lm's forms, on a CPU under Linux bit-equal token by token; "fast" what is quickest;
    "invariant" our kernels alone, in forms that give a token the same sums whatever tokens are computed with it.
    device: "cpu", "cuda" or "metal".
    """

    numerics: str
    device: str
    fuses: bool = True
    """Whether layers may be replaced by kernels of ours; they are on CUDA, if the self-check agrees."""

    fuses_attention: bool = True
    """Whether attention layers are among them: our kernels read exact keys and values only."""

    attention_pairs: int = 1 << 22
    """On CUDA, rows that are not short go through our attention kernel if they have at most this many pairs of a query
    and a key, else through the library's, if that has a fused form for such heads. On an H200 it takes a third of our
    kernel's 0.34 ms in a layer with heads of 128 for so many pairs. But it is called for each row, and takes 58 ms to
    plan a new shape, as each length of a prompt is."""

    scans_by_library: bool = False
    """Whether MLX's function takes long scans of the gated delta rule on Metal, see `gated_delta.is_library_faster`."""

    has_accelerators: bool = False
    """Whether MLX uses the neural accelerators of a Mac's GPU."""

    @property
    def fuses_layers(self) -> bool:
        return self.fuses and self.device == "cuda" and self.numerics != "exact"

    @property
    def is_invariant(self) -> bool:
        return self.numerics == "invariant"

    @property
    def overlaps_steps(self) -> bool:
        """Whether the host builds a step while the device computes the last one. On a CPU they share the cores."""
        return self.device != "cpu"

    def gated_delta(self, num_tokens: int) -> Form:
        if self.device == "metal":
            is_long = self.scans_by_library and num_tokens >= _LONG_SCAN
            return "library" if is_long else "metal"  # the latter is mlx-lm's own kernel
        if self.numerics == "exact":
            return "reference"
        if self.device == "cuda":
            return "cuda"
        return "fused" if num_tokens == 1 else "chunked"

    @property
    def attends_in_batches(self) -> bool:
        """Whether one call of attention reads several rows, with a mask for their lengths.

        A launch for each row and layer takes a GPU longer than the few keys beyond a row's own. Sums run over other
        rows' lengths, so not in exact numerics.
        """
        return self.device == "metal" and self.numerics == "fast"

    @property
    def convolves_by_library(self) -> bool:
        """Whether the convolution before a gated delta rule is `conv1d`, a single kernel on Metal.

        On a CPU, shifted products give the same bits in 40 % of the time.
        """
        return self.device == "metal"

    @property
    def replacements(self) -> dict[str, Callable[..., Any]]:
        """Functions that replace mlx-lm's of the same global name."""
        return {"swiglu": swiglu} if self.device == "cpu" and self.numerics == "fast" else {}

    def score_bytes(self, head_dim: int, num_queries: int) -> int | None:
        """The most that attention may hold in scores at once, by cutting its queries; None where it holds none."""
        if self.device != "metal" or head_dim < _UNFUSED_HEAD_DIM:
            return None
        is_fused = self.has_accelerators and head_dim == 256 and num_queries >= 1024
        return None if is_fused else _SCORE_BYTES

    @property
    def goes_token_by_token(self) -> bool:
        """Whether modules whose sums depend on the number of tokens see one at a time (windows, foreign modules)."""
        return self.numerics == "exact"

    @property
    def folds_query_heads(self) -> bool:
        """Whether attention makes the query heads of a key head rows of one matmul.

        A CPU has no fused attention; folding asks a third less of its BLAS than the library's own fallback and
        gives the same bits. GPUs have a fused kernel.
        """
        return self.device == "cpu"
