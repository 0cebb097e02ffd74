"""A decoder without its output matrix, in packed steps: the numbers of a text are its last token's hidden state.

`PackedModel` runs it like any model: instead of logits it gives what the head makes of the wanted tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from headrace.errors import ModelError
from headrace.models.json_file import read_object
from headrace.models.pooling.head import ACTIVATIONS, Head, HeadLayer, dense_layers
from headrace.models.pooling.recipe import Output, Recipe
from headrace.models.source import ModelFiles
from headrace.models.weights import Loaded, load_weights


class Trunk(nn.Module):
    """model: the decoder up to its last norm; its forward takes token ids and caches."""

    def __init__(self, model: nn.Module, head: Head) -> None:
        super().__init__()
        self.model = model
        self.head = head

    @property
    def layers(self) -> Any:
        return self.model.layers

    @property
    def num_ids(self) -> int:
        return int(self.model.embed_tokens.weight.shape[0])

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        """inputs: ids `[1, T]`. Gives `[1, picked tokens, numbers]`."""
        return self.head(self.model(inputs, cache=cache))


def load_trunk(files: ModelFiles) -> Loaded:
    """Raises ModelError."""
    assert files.recipe is not None
    recipe, kept = files.recipe, dict[str, mx.array]()

    def rename(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
        # sentence-transformers saves the trunk alone
        has_prefix = any(name.startswith("model.") for name in weights)
        own = weights if has_prefix else {f"model.{name}": array for name, array in weights.items()}
        kept.update({name: array for name, array in own.items() if name == "score.weight"})
        return dict(own)

    has_matrix = recipe.output is Output.YES_NO
    loaded = load_weights(files, rename, has_output=has_matrix)
    head = _head(files, recipe, loaded.model, kept)
    return Loaded(Trunk(loaded.model.model, head), loaded.num_unused)


def _head(files: ModelFiles, recipe: Recipe, model: Any, kept: Mapping[str, mx.array]) -> Head:
    match recipe.output:
        case Output.NONE:
            return Head(dense_layers(files.directory, recipe.dense))
        case Output.CLASSIFIER:
            if "score.weight" not in kept:
                raise ModelError(f"{files.directory} lacks weights: score.weight")
            return Head([_linear(kept["score.weight"])])
        case Output.YES_NO:
            against, in_favour = _rows(model, _token_ids(files, ("no", "yes")))
            return Head([_linear((in_favour - against)[None])])


def _linear(weight: mx.array) -> HeadLayer:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = weight
    return HeadLayer(linear, ACTIVATIONS["identity"])


def _rows(model: Any, token_ids: list[int]) -> mx.array:
    """Rows `[n, hidden]` of the output matrix, in float32."""
    matrix = model.lm_head if "lm_head" in model else model.model.embed_tokens
    ids = mx.array(token_ids)
    if "scales" not in matrix:
        return cast(mx.array, matrix.weight[ids].astype(mx.float32))
    biases = matrix.get("biases")
    rows: mx.array = mx.dequantize(
        matrix.weight[ids],
        matrix.scales[ids],
        None if biases is None else biases[ids],
        group_size=matrix.group_size,
        bits=matrix.bits,
        mode=getattr(matrix, "mode", "affine"),
    )
    return rows.astype(mx.float32)


def _token_ids(files: ModelFiles, tokens: Sequence[str]) -> list[int]:
    stored = read_object(files.directory / "tokenizer.json") or {}
    try:
        ids = {**stored["model"]["vocab"], **{each["content"]: each["id"] for each in stored.get("added_tokens", ())}}
        return [int(ids[token]) for token in tokens]
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{files.directory}: the tokenizer has no tokens {' and '.join(tokens)}") from error
