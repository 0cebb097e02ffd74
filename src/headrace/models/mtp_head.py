"""The multi-token prediction head of Qwen3-Next and Qwen3.5 as a module that runs packed steps.

    x = fc(concat[norm_e(embed(token t + 1)), norm_h(hidden t)])     one attention layer, a norm, the trunk's own head

`hidden` is the trunk's output after its final norm; for further tokens the head's own normed output stands in for it
(DeepSeek-V3, arXiv 2412.19437, section 2.2; the Qwen3-Next and Qwen3.5 checkpoints name the parts).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.qwen3_5 import DecoderLayer
from mlx_lm.models.qwen3_next import Qwen3NextDecoderLayer

from headrace.backend.transfer import to_device
from headrace.errors import ModelError
from headrace.models.compiled import CompiledSteps
from headrace.models.install import Patches
from headrace.models.levels import choose_levels
from headrace.models.media import packed_positions, step_media
from headrace.models.mtp_weights import HeadWeights
from headrace.models.packed import PackedModel
from headrace.models.positions import find_sections
from headrace.models.step import PackedStep, Row, View
from headrace.models.weights import listed, parameters_of, quantise_as_stored, set_precision
from headrace.state.hidden import HiddenState
from headrace.state.sequence import SequenceState

LAYERS = (Qwen3NextDecoderLayer, DecoderLayer)
"""Classes of layers, Qwen3-Next's and Qwen3.5's, whose checkpoints have such a head."""


class HeadModule(nn.Module):
    """The head's own parameters, named as checkpoints name them. layer: an attention layer of the trunk's class."""

    def __init__(self, layer: nn.Module, hidden_size: int, epsilon: float) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.pre_fc_norm_embedding = nn.RMSNorm(hidden_size, eps=epsilon)
        self.pre_fc_norm_hidden = nn.RMSNorm(hidden_size, eps=epsilon)
        self.layers = [layer]
        self.norm = nn.RMSNorm(hidden_size, eps=epsilon)

    def __call__(self, embeddings: mx.array, hidden: mx.array, cache: View) -> mx.array:
        """Embeddings and hidden rows `[1, T, hidden]` give the head's output, as wide, for the tokens picked."""
        parts = [self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)]
        mixed = self.layers[0](self.fc(mx.concatenate(parts, axis=-1)), mask=None, cache=cache)
        output: mx.array = self.norm(mixed)
        return output


@dataclass(frozen=True, slots=True)
class HeadOutputs:
    """Of each row's last token, not evaluated: the hidden state for the next one `[R, hidden]`, and logits
    `[R, vocab_size]` by the trunk's output matrix."""

    hidden: mx.array
    logits: mx.array


class MtpHead:
    """A head beside a packed trunk, whose embeddings and output matrix it borrows.

    Each sequence's state has two more layers for it: its keys and values, and the hidden states that it is yet to read.
    """

    def __init__(self, trunk: PackedModel, module: HeadModule, report: str) -> None:
        self.module = module
        self.report = report
        self._trunk = trunk
        self._kernels = trunk.kernels
        self._patches = Patches(module, choose_levels(module), trunk.kernels, find_sections(trunk.model))
        fused = dict(zip([trunk.head_key], self._patches.fused.values(), strict=False))
        self._compiled = CompiledSteps(self._body, fused, (None,), trunk.kernels) if fused else None

    @property
    def is_compiled(self) -> bool:
        return self._compiled is not None

    @property
    def num_new_variants(self) -> int:
        """Of the trunk's steps and the head's, see `CompiledSteps`."""
        return self._trunk.num_new_variants + (0 if self._compiled is None else self._compiled.num_new_variants)

    def hidden_of(self, state: SequenceState) -> HiddenState:
        return state.layer(self._trunk.hidden_key, HiddenState)

    def forward(
        self, rows: Sequence[Row], hidden: mx.array, ids: mx.array | None = None, *, launch: bool = True
    ) -> HeadOutputs:
        """Read tokens of all rows, from each one's `start` on, in one packed step. Their media are those of the tokens,
        at the positions of the hidden states before them.

        hidden: the trunk's state before each token, `[1, T, hidden]`.
        ids: the tokens `[T]` where they are on the device only; then only the number of the rows' `token_ids` counts.
        launch: not if the outputs, or what is made of them, are launched before anything else is done with the rows.
        """
        tokens: list[int] = []
        for row in rows:
            row.state.full_attention(self._trunk.head_key, first=1)
            row.pack(len(tokens), row.start, len(row.token_ids))
            tokens += row.token_ids
        # each token is rotated by the position of its hidden state
        step = PackedStep(rows, packed_positions(rows, shift=-1), self._kernels)
        picks, media = [row.hi - 1 for row in rows], step_media(rows)
        found = None
        if media is None and self._compiled is not None:
            found = self._compiled.run(step, tokens if ids is None else ids, picks, (hidden,))
        if found is None:
            ids = to_device(tokens, mx.int32) if ids is None else ids
            embeddings = self._trunk.embed(ids[None])
            embeddings = embeddings if media is None else media.embeddings(embeddings)
            found = self._outputs(step, embeddings, to_device(picks, mx.int32), hidden)
        outputs = HeadOutputs(*(array if array.shape[0] == len(picks) else array[: len(picks)] for array in found))
        if launch and self._patches.writes_in_place:
            # the head's keys and values are needed even where its output is not
            mx.async_eval(outputs.hidden)
        return outputs

    def _body(
        self, step: PackedStep, ids: mx.array, picks: mx.array | None, others: Sequence[mx.array]
    ) -> list[mx.array]:
        (hidden,) = others
        return self._outputs(step, self._trunk.embed(ids[None]), picks, hidden)

    def _outputs(
        self, step: PackedStep, embeddings: mx.array, picks: mx.array | None, hidden: mx.array
    ) -> list[mx.array]:
        with self._patches.tap.picking(picks):
            rows = self.module(embeddings, hidden, View(step, self._trunk.head_key, None)).squeeze(0)
        return [rows, self._trunk.project(rows[None])]


def load_head(trunk: PackedModel, weights: HeadWeights, dtype: str, device: str, memory_bytes: int) -> MtpHead:
    """Build the head that `find_head` found, in the precision that the trunk's rule gives.

    Quantised tensors stay as they are stored, whatever the trunk's bits are. Raises ModelError if the tensors are not
    those of a head for this trunk, naming the first that are missing or too many.
    """
    attention_layer = next((layer for layer in trunk.model.layers if "self_attn" in layer), None)
    if not isinstance(attention_layer, LAYERS) or "fc.weight" not in weights.tensors:
        raise ModelError(f"the tensors in {weights.origin} are not a prediction head for this model")
    arguments = trunk.text_model.args
    # the trunk's own layer may have a subclass with another forward
    layer_class = next(one for one in LAYERS if isinstance(attention_layer, one))
    layer = layer_class(arguments, arguments.full_attention_interval - 1)
    module = HeadModule(layer, arguments.hidden_size, arguments.rms_norm_eps)
    try:
        quantise_as_stored(module, weights.tensors)
        _refuse_other_names(module, weights)
        module.load_weights(list(weights.tensors.items()), strict=True)
    except ValueError as error:
        raise ModelError(f"the prediction head in {weights.origin} doesn't fit this model: {error}") from error
    module.eval()
    line = set_precision(module, dtype, device, memory_bytes).removeprefix("weights: ")
    return MtpHead(trunk, module, f"{weights.origin}, {line}, {weights.conventions}")


def _refuse_other_names(module: nn.Module, weights: HeadWeights) -> None:
    expected = parameters_of(module).keys()
    for names, verb in ((expected - weights.tensors.keys(), "lacks"), (weights.tensors.keys() - expected, "also has")):
        if names:
            raise ModelError(
                f"the prediction head in {weights.origin} doesn't fit this model: it {verb} {listed(names)}"
            )
