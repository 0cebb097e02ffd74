"""Comparing a packed model with the untouched one before it serves.

Levels are chosen by reading a module's source, which can be silently wrong (one of 84 tried was). So a few
random tokens go through the untouched model first, one by one and at once, then through packed steps that mix rows,
chunk lengths and a rejected window. A class whose results differ drops a level, and the report says so.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from headrace.backend.cuda.shapes import LONGEST_WINDOW, MANY_TOKENS
from headrace.backend.device import Device
from headrace.backend.kernels import Kernels
from headrace.cancellation import check_cancelled
from headrace.errors import ModelError
from headrace.families.registry import find_family
from headrace.isolation import errors_as, first_line
from headrace.models.levels import Level, Levels, choose_levels
from headrace.models.lora import EXPERTS
from headrace.models.packed import PackedModel
from headrace.models.picture_processor import ProcessedPicture, load_picture_processor
from headrace.models.source import ModelFiles
from headrace.models.step import Row
from headrace.models.vlm import VlmWrapper
from headrace.models.weights import set_precision
from headrace.state.sequence import SequenceState
from headrace.state.slabs import StatePool

logger = logging.getLogger(__name__)

LENGTH = 12
"""Tokens per row."""
CHUNKS = (MANY_TOKENS + 4, MANY_TOKENS + 8, LONGEST_WINDOW + 4)
"""Tokens that the first row has besides with our CUDA kernels, which sum many tokens otherwise than few. With
narrow heads, attention of the second chunk is the library's."""
PAIRS = CHUNKS[0] * (LENGTH + CHUNKS[0])
"""Of queries and keys in the first chunk."""
END_TOKENS = 4
"""At either end of a step, of which most must agree: the first of CHUNKS has as many in its kernels' last tiles."""
REROUTED_SHARE = 0.1
"""Of a step's tokens, where the model has experts: so many may differ by any amount, because routers choose other
experts at near ties. On an H200 single tokens in chunks of twelve families' tiny models were off by up to 9 times
bfloat16's tolerance; in ten of them nine tenths of the tokens were within half of it, in the others within 0.8 and 1.3.
The models themselves differ as much from cut to cut."""
STEPS = (((5, 0), (0, 0)), ((2, 0), (6, 0)), ((1, 2), (1, 1)), ((1, 2), (2, 0)), ((3, 0), (3, 0)))
"""Per step and row: tokens of the row, then junk drafts that are rejected."""
WITHOUT_KERNELS = "results of our CUDA kernels differ from mlx-lm's: these layers run without them"
TOLERANCE = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 6e-2}
"""By precision: the largest difference of a logit, relative to the largest logit, that other orders of sums make."""
MOST_NOISE = 4
"""Times the tolerance: a model whose results depend on the cut more than that is beyond comparison."""


@dataclass(frozen=True, slots=True)
class Reference:
    """Rows of token ids and the untouched model's logits `[n, vocab_size]` for each: see `run_reference`.

    logits: of single tokens. at_once: of the same tokens as one chunk. The two differ where a device rounds the
    products of several tokens otherwise than those of one, and then choose other experts here and there. A packed step
    holds rows of both kinds, so a token's logits are compared with the nearer ones.
    """

    rows: tuple[tuple[int, ...], ...]
    logits: tuple[mx.array, ...]
    at_once: tuple[mx.array, ...]

    @property
    def scale(self) -> float:
        return max(float(mx.abs(logits).max()) for logits in self.logits)

    @property
    def noise(self) -> float:
        """The median token's largest difference between the model's own results one by one and at once."""
        pairs = zip(self.logits, self.at_once, strict=True)
        apart = float(mx.median(mx.concatenate([_apart(*pair) for pair in pairs])))
        return apart if math.isfinite(apart) else 0.0


@dataclass(frozen=True, slots=True)
class Margin:
    """The largest difference of a logit, the largest logit as its scale, and `Reference.noise`.

    With experts, REROUTED_SHARE of a step's tokens don't count, unless they are most of its first or last.
    """

    difference: float
    scale: float
    noise: float = 0.0

    def within(self, precision: str) -> bool:
        tolerance = TOLERANCE[precision] * max(1.0, self.scale)
        return math.isfinite(self.difference) and self.difference <= max(
            tolerance, min(2 * self.noise, MOST_NOISE * tolerance)
        )

    def __str__(self) -> str:
        return f"largest difference {self.difference:.1e} at logits up to {self.scale:.1f}"


@dataclass(frozen=True, slots=True)
class Checked:
    """A model that passed. margin is None if the check was switched off."""

    packed: PackedModel
    margin: Margin | None
    lowered: tuple[str, ...]
    """One line per class that had to drop a level."""


def run_reference(model: Any, vocab_size: int, has_chunks: bool = False) -> Reference:
    """Two rows of random tokens through the untouched model, one by one and at once; CHUNKS in one call."""
    random = np.random.default_rng(0)
    lengths = LENGTH + sum(CHUNKS) * has_chunks, LENGTH
    rows = tuple(tuple(int(token) for token in random.integers(0, vocab_size, length)) for length in lengths)
    logits = tuple(_logits(model, [*((token,) for token in row[:LENGTH]), row[LENGTH:]]) for row in rows)
    mx.eval(logits)
    try:
        # a model may take single tokens only
        with errors_as(lambda error: ModelError(f"several tokens at once raised: {error}"), may_exit=True):
            at_once = tuple(_logits(model, [row[:LENGTH], row[LENGTH:]]) for row in rows)
            mx.eval(at_once)
    except ModelError:
        at_once = logits
    return Reference(rows, logits, at_once)


def _logits(model: Any, parts: Sequence[Sequence[int]]) -> mx.array:
    """Logits `[n, vocab_size]` of a row that the untouched model computes in these parts."""
    cache = make_prompt_cache(model)
    return mx.concatenate([model(mx.array([part]), cache=cache)[0] for part in parts if part])


def _apart(one: mx.array, other: mx.array) -> mx.array:
    """The largest difference of a logit, for each token."""
    return mx.abs(one.astype(mx.float32) - other.astype(mx.float32)).max(axis=-1)


def check(model: Any, kernels: Kernels, vocab_size: int, precision: str) -> Checked:
    """Install at the best levels that give the untouched model's logits. The model must be untouched.

    precision: of the activations, a key of TOLERANCE. Raises ModelError if not even the untouched model runs.
    """
    reference = run_reference(model, vocab_size, kernels.fuses_layers)
    chosen = choose_levels(model)
    fused = [(chosen, kernels, ())] if kernels.fuses_layers else []
    fallback_note = (WITHOUT_KERNELS,) if fused else ()
    kernels = replace(kernels, fuses=False)
    failure: ModelError | None = None
    others = ((levels, kernels, note or fallback_note) for levels, note in _candidates(chosen))
    for levels, with_kernels, note in (*fused, *others):
        packed = PackedModel(model, levels, with_kernels)
        check_cancelled()
        # so that the second chunk is computed like longer ones
        packed.kernels = replace(with_kernels, attention_pairs=PAIRS)
        try:
            margin = compare(packed, reference)
        except ModelError as error:
            margin, failure = None, error
        packed.kernels = with_kernels
        if margin is not None and margin.within(precision):
            return Checked(packed, margin, note)
        logger.info("%s: %s", "; ".join(note) or "chosen levels", failure if margin is None else margin)
        if margin is not None and Level.WHOLE in levels.values():
            # none of our code runs at this level: the model disagrees with itself
            return Checked(packed, margin, (*note, "the model's own results depend on how its input is cut"))
        packed.restore()
    raise ModelError(f"the model can't be run: {failure}") from failure


def _candidates(chosen: Levels) -> Iterator[tuple[Levels, tuple[str, ...]]]:
    """Levels to try, best first: as chosen, one class lowered, all of them lowered, the whole model."""
    yield chosen, ()
    high = [module_class for module_class, level in chosen.items() if level not in (Level.ROWS, Level.WHOLE)]
    lines = {one: f"{one.__name__} differs {_as(chosen[one])}: {_as(Level.ROWS)} instead" for one in high}
    for one in high:
        yield {**chosen, one: Level.ROWS}, (lines[one],)
    if len(high) > 1:
        yield dict.fromkeys(chosen, Level.ROWS), tuple(lines.values())
    whole = dict.fromkeys(chosen or {nn.Module: Level.WHOLE}, Level.WHOLE)
    yield whole, ("no packed form agrees with the untouched model: it runs a row at a time",)


def _as(level: Level) -> str:
    return f"as {level.value}" if level in (Level.ADAPTER, Level.PACKED) else level.value


def compare(packed: PackedModel, reference: Reference) -> Margin:
    """Run the reference's rows in mixed steps. Raises ModelError if a step raises."""
    pool = StatePool(has_batches=packed.kernels.attends_in_batches)
    states = [SequenceState(pool) for _ in reference.rows]
    junk = [reference.rows[1][0], reference.rows[0][0]]
    difference = 0.0
    has_experts = any(isinstance(module, EXPERTS) for _, module in packed.model.named_modules())
    chunks = CHUNKS if len(reference.rows[0]) > LENGTH else ()
    for step in (*STEPS, *(((num_tokens, 0), (0, 0)) for num_tokens in chunks)):
        rows: list[Row] = []
        picks: list[int] = []
        wanted: list[tuple[mx.array, mx.array]] = []
        total = 0
        for place, (state, ids, (num_kept, num_junk)) in enumerate(zip(states, reference.rows, step, strict=True)):
            if num_kept + num_junk == 0:
                continue
            start, end = state.length, state.length + num_kept
            state.begin(num_kept + num_junk, 1 if num_junk else None)
            rows.append(Row(state, (*ids[start:end], *junk[:num_junk])))
            picks += range(total, total + num_kept)
            wanted.append((reference.logits[place][start:end], reference.at_once[place][start:end]))
            total += num_kept + num_junk
        # foreign code gets our view, and any failure means that it doesn't fit
        with errors_as(_raised, may_exit=True):
            got = packed.forward(rows, picks)
            alone, at_once = (_apart(got, mx.concatenate(list(each))) for each in zip(*wanted, strict=True))
            # also if the second isn't a number
            apart = mx.where(at_once < alone, at_once, alone)
            mx.eval(apart, [row.state.arrays() for row in rows])
        differences = np.array(apart)
        largest = float(np.sort(differences)[-1 - int(REROUTED_SHARE * len(picks) * has_experts)])
        # the ends of a chunk are where its kernels' tiles end, and no router's
        ends = (float(np.median(part)) for part in (differences[:END_TOKENS], differences[-END_TOKENS:]))
        # what is no number fails, also among the tokens that don't count
        difference = max(difference, largest, *ends) if np.isfinite(differences).all() else math.inf
        for state, (num_kept, num_junk) in zip(states, step, strict=True):
            if num_kept + num_junk:
                state.rollback(num_junk)
    return Margin(difference, reference.scale, reference.noise)


def _raised(error: BaseException) -> ModelError:
    return ModelError(f"a step raised {type(error).__name__}: {first_line(error)}")


def prefers_float16(files: ModelFiles, device: Device) -> bool:
    """Whether `--dtype auto` tries float16 here, because the GPU emulates bfloat16, as those of M1 and M2 do.

    Not with a vision tower: nothing here checks its precision.
    """
    if device.mac is None or not device.mac.emulates_bfloat16 or files.config.get("vision_config"):
        return False
    return not find_family(files.model_type).overflows_float16


def to_float16(model: Any, device: Device) -> Margin | None:
    """Bring an untouched model from bfloat16 to float16, and compare its logits before and after.

    None for a model that computes in another precision, which stays as it is.
    """
    set_precision(model, "stored", device.kind, device.memory_bytes)
    logits = model(mx.array([[0]]))
    if logits.dtype != mx.bfloat16:
        return None
    before = run_reference(model, logits.shape[-1])
    set_precision(model, "float16", device.kind, device.memory_bytes)
    after = run_reference(model, logits.shape[-1])
    apart = [_apart(one, other).max() for one, other in zip(before.logits, after.logits, strict=True)]
    return Margin(float(mx.stack(apart).max()), before.scale)


def check_pictures(model: VlmWrapper, files: ModelFiles, precision: str) -> None:
    """Compare a prompt with a picture, chunked and embedded separately, with the model's result for the whole.

    precision: of the activations. Raises ModelError that says what differs.
    """
    processor = load_picture_processor(files.directory, files.config)
    picture = np.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=np.uint8)
    with errors_as(lambda error: ModelError(f"a picture can't be embedded separately: {error}"), may_exit=True):
        apart, scale = _compare_pictures(model, processor(picture))
    if not apart <= TOLERANCE[precision] * max(1.0, scale):
        raise ModelError(
            f"a prompt computed in parts differs from its computation as a whole (logits up to {scale:.1f} differ by "
            f"{apart:.1e}): its positions, its masks or its layers need more than embeddings"
        )


def _compare_pictures(model: VlmWrapper, made: ProcessedPicture) -> tuple[float, float]:
    token_ids, arrays = made
    fields = {name: mx.array(array) for name, array in arrays.items()}
    before, shown, behind = [1, 2, 3], list(token_ids), [4, 5, 6, 7]
    ids = mx.array([[*before, *shown, *behind]])
    text = mx.array([before + behind])
    alone = model(text)
    mx.eval(alone)
    # first in parts: a model that keeps its last prompt's positions has none yet
    rows = model.embed_picture(mx.array([shown]), fields).inputs_embeds
    cache, logits = model.make_cache(), []
    parts = (model.embed(mx.array([before])), rows, model.embed(mx.array([behind[:3]])), model.embed(mx.array([[7]])))
    for part in parts:
        logits.append(model(part, cache=cache))
        mx.eval(logits[-1])
    whole = model.embed_picture(ids, fields)
    more = {name: value for name, value in whole.to_dict().items() if name != "inputs_embeds" and value is not None}
    expected = model.inner.language_model(
        ids, inputs_embeds=whole.inputs_embeds, cache=model.make_cache(), **more
    ).logits
    pairs = ((mx.concatenate(logits, axis=1), expected), (model(text), alone))
    apart = mx.stack([mx.abs(one.astype(mx.float32) - other.astype(mx.float32)).max() for one, other in pairs]).max()
    return float(apart), float(mx.abs(expected).max())
