"""Which form of each computation runs here: the one table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from headrace.backend.activations import swiglu
from headrace.backend.gated_delta import Form


@dataclass(frozen=True, slots=True)
class Kernels:
    """The forms for one engine.

    numerics: "exact" takes what is bit-equal to mlx-lm token by token, "fast" what is quickest.
    device: "cpu", "cuda" or "metal".
    """

    numerics: str
    device: str
    fuses: bool = True
    """Whether layers may be replaced by kernels of ours; they are on CUDA, if the self-check agrees."""

    attention_pairs: int = 1 << 22
    """Pairs of a query and a key of a row up to which attention of a longer chunk is our kernel's, on CUDA: the library
    reads keys fewer times, but takes a call for each row and, for heads of 128, 58 ms on an H200 to plan each new
    shape, which are all lengths that prompts have; a quarter of so many pairs takes our kernel 0.36 ms a layer."""

    @property
    def fuses_layers(self) -> bool:
        """Whether layers are replaced by kernels of ours."""
        return self.fuses and self.device == "cuda" and self.numerics == "fast"

    def without_fusion(self) -> Kernels:
        """The same, but for layers that stay the library's."""
        return replace(self, fuses=False)

    def gated_delta(self, num_tokens: int) -> Form:
        """Form of the gated delta rule for a scan of `num_tokens` per row."""
        if self.numerics == "exact":
            return "reference"
        if self.device == "cuda":
            return "cuda"
        if self.device == "metal":
            return "metal"
        return "fused" if num_tokens == 1 else "chunked"

    @property
    def replacements(self) -> dict[str, Callable[..., Any]]:
        """Functions that replace mlx-lm's of the same global name."""
        return {"swiglu": swiglu} if self.device == "cpu" and self.numerics == "fast" else {}

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
