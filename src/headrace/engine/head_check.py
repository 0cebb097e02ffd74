"""Measures how many drafts of a prediction head are right, as it is loaded and with its file interpreted otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from headrace.backend import blas, device
from headrace.config import Config
from headrace.engine.model_files import model_files
from headrace.errors import ModelError
from headrace.models.load import load
from headrace.models.mtp_head import MtpHead, load_head
from headrace.models.mtp_weights import HeadWeights, find_head
from headrace.models.packed import PackedModel
from headrace.models.quantized import Quantization
from headrace.speculate.acceptance import Acceptance, measure_acceptance
from headrace.types.model import TokenIds

BEFORE_NORM = "hidden rows from before the model's last norm"
"""What some heads are trained on, but no head of the families here."""

_NUM_TRIED = 16
"""Positions of each text where another reading is tried."""


@dataclass(frozen=True, slots=True)
class HeadCheck:
    """A loaded model and its head. Belongs to the thread that loaded it.

    texts: token ids for the model to continue. build: makes a head from weights, in the configured precision.
    """

    trunk: PackedModel
    weights: HeadWeights
    head: MtpHead
    build: Callable[[HeadWeights], MtpHead]
    texts: Sequence[Sequence[int]]

    def measure(self, num_tokens: int, depth: int) -> Acceptance:
        return measure_acceptance(self.trunk, self.head, self.texts, num_tokens, depth)

    def other_readings(self) -> Iterator[tuple[str, float]]:
        for group in self.weights.norms:
            form = "plain" if group.is_centred else "zero-centred"
            yield f"{group.label} norms {form}", self._first(self.build(self.weights.with_other_norms(group.label)))
        self.trunk.keep_hidden(True, is_normed=False)
        share = self._first(self.head)
        self.trunk.keep_hidden(True)
        yield BEFORE_NORM, share

    def _first(self, head: MtpHead) -> float:
        return measure_acceptance(self.trunk, head, self.texts, _NUM_TRIED, 1).first


def load_head_check(config: Config, texts: Sequence[Sequence[int]], tokens: TokenIds) -> HeadCheck:
    """The configured model and its head, as the engine loads them. Raises ModelError if there is none that fits.

    tokens: the tokenizer's.
    """
    blas.install(config.models.numerics)
    device.restore_open_files()
    here = device.current()
    files, models = model_files(config), config.models
    weights = find_head(files)
    if weights is None:
        raise ModelError(
            f"{files.name} has no prediction head; `headrace mtp extract` takes one out of the full-precision original"
        )
    loaded = load(
        files,
        dtype=models.dtype,
        numerics=models.numerics,
        self_check=models.self_check,
        device=here,
        tokens=tokens,
        quantization=None if models.quantize is None else Quantization(models.quantize),
    )
    loaded.packed.keep_hidden(True)

    def build(form: HeadWeights) -> MtpHead:
        return load_head(loaded.packed, form, loaded.dtype, here.kind, here.memory_bytes)

    return HeadCheck(loaded.packed, weights, build(weights), build, texts)
