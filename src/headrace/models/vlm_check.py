"""Compares prompts with pictures, as assembled here, with the model's own result."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from headrace.errors import ModelError
from headrace.models.picture_processor import ProcessedPicture, load_picture_processor
from headrace.models.selfcheck import TOLERANCE
from headrace.models.source import ModelFiles
from headrace.models.vlm import VlmWrapper


def check_pictures(model: VlmWrapper, files: ModelFiles, precision: str) -> None:
    """Compare a prompt with a picture, chunked and embedded separately, with the model's result for the whole.

    precision: of the activations. Raises ModelError that says what differs.
    """
    processor = load_picture_processor(files.directory, files.config)
    picture = np.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=np.uint8)
    try:
        made = processor(picture)
        apart, scale = _compare(model, made)
    except ModelError:
        raise
    except Exception as error:  # an exception boundary to other projects' code
        raise ModelError(f"a picture can't be embedded separately: {error}") from error
    if not apart <= TOLERANCE[precision] * max(1.0, scale):
        raise ModelError(
            f"a prompt in parts is not what its model makes of it as a whole (logits up to {scale:.1f} differ by "
            f"{apart:.1e}): its positions, its masks or its layers need more than embeddings"
        )


def _compare(model: VlmWrapper, made: ProcessedPicture) -> tuple[float, float]:
    """The largest difference of a logit, and the largest logit."""
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
