"""Splits a model's layers over the ranks of a group (tensor parallel), by mlx-lm's own `shard` of its family."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.models.base import gather_last_axis

from headrace.errors import ModelError
from headrace.isolation import errors_as, first_line
from headrace.models.levels import is_gated_delta, mixers_of
from headrace.models.source import ModelFiles
from headrace.models.weights import evaluate_by_module

_QUERY_HEADS = ("n_heads", "num_heads", "num_attention_heads", "num_v_heads")
_KEY_HEADS = ("n_kv_heads", "num_key_value_heads", "num_k_heads")
"""Names that mlx-lm's mixers give the numbers of their heads. Those of keys may be repeated, for a rank each."""

_SHARDED = (
    nn.AllToShardedLinear,
    nn.ShardedToAllLinear,
    nn.QuantizedAllToShardedLinear,
    nn.QuantizedShardedToAllLinear,
)


def shard(model: Any, files: ModelFiles, group: mx.distributed.Group) -> None:
    """Keep this rank's part of the weights, which are evaluated then. Raises ModelError as `split` does."""
    split(model, files, group)
    evaluate_by_module(model)


def split(model: Any, files: ModelFiles, group: mx.distributed.Group) -> None:
    """Leave this rank's part of the weights, without evaluating any.

    Raises ModelError for a family that mlx-lm doesn't split, and for sizes that the ranks don't divide.
    """
    num_ranks = group.size()
    if not hasattr(model, "shard"):
        raise ModelError(f"{files.name} can't run on {num_ranks} ranks: mlx-lm does not split {files.model_type}")
    for mixer in _mixers(model):
        _check_heads(files, mixer, num_ranks)
        if is_gated_delta(mixer) and "in_proj_qkv" in mixer and num_ranks > mixer.num_k_heads:
            _repeat_key_heads(mixer, num_ranks // mixer.num_k_heads)
    refusal = f"{files.name} can't be split over {num_ranks} ranks"
    with errors_as(lambda error: ModelError(f"{refusal}: {first_line(error)}"), may_exit=True):
        model.shard(group)
    for mixer in _mixers(model):
        if 0 in [vars(mixer).get(name) for name in _KEY_HEADS]:
            raise ModelError(f"{refusal}: {type(mixer).__name__} has fewer heads of keys")


def is_sharded(model: Any) -> bool:
    return any(isinstance(module, _SHARDED) for _, module in model.named_modules())


def summed(y: mx.array, mixer: Any) -> mx.array:
    """A mixer's output, summed over the ranks if the mixer is split and doesn't sum itself."""
    group = getattr(mixer, "sharding_group", None)
    return y if group is None else mx.distributed.all_sum(y, group=group)


def all_gathered(logits: mx.array, text_model: Any) -> mx.array:
    """Logits of all tokens, where each rank's output matrix has a part of them."""
    group = getattr(text_model, "sharding_group", None)
    whole: mx.array = logits if group is None else gather_last_axis(logits, group)
    return whole


def _mixers(model: Any) -> Iterator[Any]:
    return (path.module for path in mixers_of(model))


def _check_heads(files: ModelFiles, mixer: Any, num_ranks: int) -> None:
    """mlx-lm would cut heads in two, or leave a rank without any."""
    for names, may_repeat in ((_QUERY_HEADS, False), (_KEY_HEADS, True)):
        for number in (vars(mixer).get(name) for name in names):
            divides = number is None or number % num_ranks == 0 or (may_repeat and num_ranks % number == 0)
            if not divides:
                raise ModelError(
                    f"{files.name} can't be split over {num_ranks} ranks: {type(mixer).__name__} has {number} heads"
                )


def _repeat_key_heads(mixer: Any, times: int) -> None:
    """Several heads of queries and keys for each one of a gated delta layer, with the same weights."""
    num_heads, dim = mixer.num_k_heads, mixer.head_k_dim

    def repeated(rows: mx.array) -> mx.array:
        """rows: of queries, keys and values, by head."""
        queries, keys, values = mx.split(rows, [mixer.key_dim, 2 * mixer.key_dim])
        more = [
            mx.repeat(part.reshape(num_heads, dim, *part.shape[1:]), times, axis=0).reshape(-1, *part.shape[1:])
            for part in (queries, keys)
        ]
        return mx.concatenate([*more, values])

    for part in (mixer.in_proj_qkv, mixer.conv1d):
        part.update(tree_map(repeated, part.parameters()))
    mixer.num_k_heads *= times
    mixer.key_dim *= times
    mixer.conv_dim = 2 * mixer.key_dim + mixer.value_dim
    mixer.conv1d.groups = mixer.conv_dim
