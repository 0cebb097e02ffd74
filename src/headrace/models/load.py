"""Loads a model by name until it is ready to serve."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx

from headrace.backend.cuda.shapes import DeltaHeads
from headrace.backend.device import Device, dtype_name
from headrace.backend.gated_delta import is_library_faster
from headrace.backend.kernels import Kernels
from headrace.errors import ModelError
from headrace.isolation import errors_as, first_line
from headrace.models.collectives import Collective, collectives_of
from headrace.models.install import invariance_refusal
from headrace.models.levels import Level, choose_levels, mixers_of
from headrace.models.packed import PackedModel
from headrace.models.pooling.trunk import Trunk, load_trunk
from headrace.models.quantized import Quantization, distance, find_kept, keep, quantize, refuse_quantised
from headrace.models.selfcheck import Checked, check, check_pictures, prefers_float16, to_float16
from headrace.models.sharding import is_sharded, shard
from headrace.models.source import CONTEXT_FIELDS, ModelFiles, weights_bytes
from headrace.models.stored_files import check_files, norms_contradiction
from headrace.models.vlm import load_vlm, runs_whole
from headrace.models.weights import Loaded, has_text_model, load_weights, set_precision
from headrace.state.sequence import SequenceState
from headrace.state.slabs import StatePool
from headrace.types.model import TokenIds

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that runs packed steps.

    tokens: ids with a token; the logits are for these.
    precision: of its activations.
    context_length: tokens that it was made for; None if neither its files nor its architecture's defaults define it.
    report: lines about precision, levels and the self-check.
    dtype: as in `ModelConfig.dtype`, what the weights are held with. lowered: see `Checked`.
    width: numbers that it gives for a token: logits, or a vector's.
    sample_logits: `[n, vocab_size]` of the untouched model, for the tokens of a `Quantization`'s sample.
    collectives: of a forward over ranks.
    """

    packed: PackedModel
    tokens: TokenIds
    precision: str
    context_length: int | None
    report: tuple[str, ...]
    dtype: str
    lowered: tuple[str, ...]
    width: int
    sample_logits: mx.array | None = None
    collectives: tuple[Collective, ...] = ()


def load(
    files: ModelFiles,
    *,
    dtype: str,
    numerics: str,
    self_check: bool,
    device: Device,
    tokens: TokenIds | None = None,
    whole_vlm: bool = False,
    quantization: Quantization | None = None,
    group: mx.distributed.Group | None = None,
    fuses_attention: bool = True,
) -> LoadedModel:
    """Read the weights, bring them into the precision wanted, install the adapters and check the result.

    tokens: the tokenizer's; weights are often padded with rows for more. None takes every row for a token.
    whole_vlm: whether a model with an unknown vision tower may run whole, to take pictures. If that fails, its text
    part serves alone, where mlx-lm knows it.
    quantization: None leaves the weights in the precision that they are stored in.
    group: ranks that the layers are split over; None keeps them whole.
    fuses_attention: see `Kernels`.
    Raises ModelError if the folder's weights can't be loaded, or can't run here in the precision that they are in.
    """
    if numerics == "invariant" and device.kind != "cuda":
        raise ModelError("--numerics invariant needs an NVIDIA GPU")
    kernels = replace(Kernels(numerics, device.kind), fuses_attention=fuses_attention)
    loader = _Loader(files, kernels, self_check, device, tokens)
    if quantization is not None:
        if files.recipe is not None:
            raise ModelError(f"--quantize: {files.name} writes no text, and is served as stored")
        if whole_vlm and runs_whole(files):
            raise ModelError(f"--quantize: {files.name} runs whole; --vision off serves its text part, quantised")
        return _load_quantized(loader, quantization, dtype)
    read = load_weights if files.recipe is None else load_trunk
    if group is not None:
        read = partial(_load_part, group)
    if not (whole_vlm and runs_whole(files)):
        return loader.run(read, dtype)
    try:
        loaded = loader.run(load_vlm, dtype)
        check_pictures(loaded.packed.model, files, loaded.precision)
    except ModelError as error:
        if not has_text_model(files):
            raise
        refusal = f"vision: images and videos are refused, {error}"
        logger.warning("%s", refusal)
    else:
        return loaded
    loaded = loader.run(read, dtype)
    return replace(loaded, report=(*loaded.report, refusal))


def _load_quantized(loader: _Loader, wanted: Quantization, dtype: str) -> LoadedModel:
    """The quantised model; at its first start after the original's self-check."""
    files, device = loader.files, loader.device
    refuse_quantised(files)
    # on a CPU quantised weights stay so, and all else is in float32
    around = ("float32" if device.kind == "cpu" else "stored") if dtype == "auto" else dtype
    found, checked = find_kept(files, wanted, around), ""
    if found is None:
        expected = None
        if weights_bytes(files.directory) < device.memory_bytes * device.share(None):
            original = loader.run(load_weights, dtype, wanted.sample)
            expected, checked = original.sample_logits, f"; of the original: {original.report[-1]}"
            del original  # memory has room for one
            gc.collect()
            mx.clear_cache()
        found = quantize(files, wanted.form, around)
        if expected is not None:
            found = replace(found, distance=distance(expected, sample_logits(found.loaded.model, wanted.sample)))
        found = keep(files, wanted, around, found)
    loaded = loader.run(lambda _: found.loaded, "stored")
    measured = "distance from the original not measured" if found.distance is None else str(found.distance)
    line = f"quantised: to {wanted.form} when loaded, {found.place}{checked}; {measured}"
    return replace(loaded, dtype=around, report=(*loaded.report, line))


def sample_logits(model: Any, sample: Sequence[int]) -> mx.array:
    """Of an untouched model: `[n, vocab_size]`."""
    logits: mx.array = model(mx.array([sample]))[0].astype(mx.float32)
    mx.eval(logits)
    return logits


def _load_part(group: mx.distributed.Group, files: ModelFiles) -> Loaded:
    loaded = load_weights(files)
    shard(loaded.model, files, group)
    return loaded


@dataclass(frozen=True, slots=True)
class _Loader:
    files: ModelFiles
    kernels: Kernels
    self_check: bool
    device: Device
    tokens: TokenIds | None

    def run(self, read: Callable[[ModelFiles], Loaded], dtype: str, sample: Sequence[int] = ()) -> LoadedModel:
        files, device = self.files, self.device
        check_files(files, runs_whole=read is load_vlm)
        started = time.monotonic()
        loaded = read(files)
        if not (dtype == "auto" and self.self_check and prefers_float16(files, device)):
            return self._finish(loaded, dtype, started, sample)
        margin = to_float16(loaded.model, device)
        if margin is None:
            return self._finish(loaded, "stored", started, sample)
        found, reason = None, f"changes the logits: {margin}"
        if margin.within("bfloat16"):
            found = self._finish(loaded, "float16", started, sample)
            line = f"precision: float16, because this GPU emulates bfloat16, beside which it has a {margin}"
            if not found.lowered:
                return replace(found, report=(*found.report, line))
            reason = f"fails the self-check ({'; '.join(found.lowered)})"
        del loaded, found  # memory has room for one
        line = f"precision: bfloat16, which this GPU emulates, because float16 {reason}"
        found = self._finish(read(files), "stored", started, sample)
        return replace(found, report=(*found.report, line))

    def _finish(self, loaded: Loaded, dtype: str, started: float, sample: Sequence[int]) -> LoadedModel:
        files, device, kernels = self.files, self.device, self.kernels
        precision_line = set_precision(loaded.model, dtype, device.kind, device.memory_bytes)
        try:
            logits = loaded.model(mx.array([[0]]))  # of the activations' type, as wide as the weights
            mx.eval(logits)
        except (RuntimeError, ValueError) as error:
            raise ModelError(f"{files.name} can't run on {device.kind} ({precision_line}): {error}") from error
        sampled = sample_logits(loaded.model, sample) if sample else None
        collectives = collectives_of(loaded.model) if is_sharded(loaded.model) else ()
        if device.mac is not None and device.mac.has_accelerators:
            kernels = replace(kernels, has_accelerators=True)
        if device.kind == "metal" and kernels.numerics == "fast":
            kernels = replace(kernels, scans_by_library=_scans_by_library(loaded.model))
        precision = dtype_name(logits.dtype)
        num_rows = loaded.model.num_ids if isinstance(loaded.model, Trunk) else logits.shape[-1]
        if self.self_check:
            checked = check(loaded.model, kernels, num_rows, precision)
        else:
            checked = Checked(PackedModel(loaded.model, choose_levels(loaded.model), kernels), None, ())
        if kernels.is_invariant:
            _check_invariance(files, checked)
        took = f"{time.monotonic() - started:.1f} s"
        lines = [f"model: {files.name} ({files.model_type}), loaded in {took}", precision_line]
        if kernels.scans_by_library:
            lines.append(
                "gated delta rule: MLX's own function for long scans, which is faster here than mlx-lm's kernel"
            )
        if loaded.num_unused:
            lines.append(f"weights left aside: {loaded.num_unused} that the text model doesn't use")
        if (contradiction := norms_contradiction(files)) is not None:
            logger.warning("%s: %s", files.name, contradiction)
            lines.append(f"weights: {contradiction}")
        tokens = TokenIds(num_rows) if self.tokens is None else self.tokens.up_to(num_rows)
        if files.recipe is None:
            checked.packed.keep_tokens(tokens)
        return LoadedModel(
            checked.packed,
            tokens,
            precision,
            files.context_length or _default_context(loaded.model),
            (*lines, *checked.packed.layer_lines, *checked.lowered, f"self-check: {checked.margin or 'off'}"),
            dtype,
            checked.lowered,
            logits.shape[-1],
            sampled,
            collectives,
        )


def _check_invariance(files: ModelFiles, checked: Checked) -> None:
    """Raise ModelError if a token's results depend on others that are computed with it."""
    packed = checked.packed
    if checked.lowered:
        # without what serves instead
        refusal: str | None = "; ".join([line.partition(":")[0] for line in checked.lowered])
    elif not packed.kernels.fuses_attention:
        refusal = "keys and values are quantised"
    elif packed.largest_window:  # their keys are counted from a place that depends on how a prompt was cut
        refusal = "it has layers with a sliding window"
    else:
        refusal = invariance_refusal(packed.model)
    if refusal is not None:
        raise ModelError(f"--numerics invariant is not supported for {files.name}: {refusal}")
    if checked.margin is None:  # nothing has run yet
        with errors_as(lambda error: ModelError(f"--numerics invariant: a step raised: {first_line(error)}")):
            packed.compute(SequenceState(StatePool(has_batches=False)), [0])


def _scans_by_library(model: Any) -> bool:
    """Whether the model has gated delta layers whose long scans MLX's function computes faster."""
    levels = choose_levels(model)
    inner = next((path.module for path in mixers_of(model) if levels.get(type(path.module)) is Level.PACKED), None)
    if inner is None:
        return False
    return is_library_faster(DeltaHeads.of(inner), inner.conv1d.weight.dtype)


def _default_context(model: Any) -> int | None:
    """The architecture's default for a config without a length, as Gemma 3's may be."""
    arguments = [getattr(one, "args", None) for one in (model.get("language_model"), model)]
    lengths = [getattr(one, field, None) for one in arguments for field in CONTEXT_FIELDS]
    return next((length for length in lengths if isinstance(length, int)), None)
