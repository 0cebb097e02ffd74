"""Published shapes, models of them with random weights, and the bytes that their steps move."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.utils import quantize_model

from benchmarks.figures import timed
from headrace.backend.device import device_kind
from headrace.errors import ConfigError
from headrace.models.weights import build_model, evaluate_by_module
from headrace.state.sequence import StateCost

GROUP_SIZE = 64
"""Weights that share a scale where they are quantised."""

_DEVIATION = 0.02
"""Of the matrices: what the published configurations give as `initializer_range`; activations stay finite with it."""
_CONV_DEVIATION = 0.5
"""Of the short convolutions, which add up four values only."""

_QWEN3_5: Mapping[str, Any] = {
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "rope_type": "default",
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
    },
}

_TINY_HYBRID: Mapping[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "rope_parameters": {**_QWEN3_5["rope_parameters"], "mrope_section": [2, 1, 1]},
}

_QWEN3_5_4B: Mapping[str, Any] = {
    **_QWEN3_5,
    "model_type": "qwen3_5",
    "hidden_size": 2560,
    "intermediate_size": 9216,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}

_QWEN3_5_35B_A3B: Mapping[str, Any] = {
    **_QWEN3_5,
    "model_type": "qwen3_5_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
}

_QWEN3_4B: Mapping[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
}

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "qwen3.5-4b": _QWEN3_5_4B,
    "qwen3.5-35b-a3b": _QWEN3_5_35B_A3B,
    "qwen3-4b": _QWEN3_4B,
    "tiny-qwen3.5": {**_QWEN3_5_4B, **_TINY_HYBRID, "intermediate_size": 256},
    "tiny-qwen3.5-moe": {
        **_QWEN3_5_35B_A3B,
        **_TINY_HYBRID,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    },
    "tiny-qwen3": {
        **_QWEN3_4B,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 512,
    },
}
"""config.json of the text models, by a name.

Those of Qwen/Qwen3.5-4B, Qwen/Qwen3.5-35B-A3B and Qwen/Qwen3-4B on Hugging Face, as checkpoints made from these have
copied them, without towers and prediction heads; and tiny ones of the same build, to try things on a CPU.
"""


def config_of(shape: str, num_layers: int | None = None) -> dict[str, Any]:
    """The configuration of a shape, perhaps with another number of layers.

    Raises ConfigError for an unknown shape, and for a number of layers that leaves a kind of layer out.
    """
    if shape not in SHAPES:
        raise ConfigError(f"--shape {shape}: there are {', '.join(SHAPES)}", param="shape")
    config = copy.deepcopy(dict(SHAPES[shape]))
    if num_layers is not None:
        interval = config.get("full_attention_interval", 1)
        if num_layers < 1 or num_layers % interval:
            raise ConfigError(
                f"--layers must be a multiple of {interval} for {shape}, not {num_layers}", param="layers"
            )
        config["num_hidden_layers"] = num_layers
    return config


def random_model(config: Mapping[str, Any], *, dtype: str = "bfloat16", bits: int | None = None) -> Any:
    """`planned_model`, its weights made on the device."""
    model = planned_model(config, dtype=dtype, bits=bits)
    evaluate_by_module(model)
    return model


def planned_model(config: Mapping[str, Any], *, dtype: str = "bfloat16", bits: int | None = None) -> Any:
    """mlx-lm's model of a configuration, its matrices drawn from N(0, 0.02), its norms as they are created.

    Nothing is computed yet. dtype: a floating type of mlx.core. bits: of quantised weights, in groups of 64, where the
    model's own predicate wants them; None for none.
    """
    model = build_model(config)
    wanted: mx.Dtype = getattr(mx, dtype)
    model.update(tree_map_with_path(lambda path, created: _drawn(path, created, wanted), model.parameters()))
    if bits is not None:
        model, _ = quantize_model(model, dict(config), GROUP_SIZE, bits)
    model.eval()
    return model


def _drawn(path: str, created: mx.array, dtype: mx.Dtype) -> mx.array:
    """Not computed yet. Decays stay in float32, where mlx-lm keeps them."""
    if path.endswith("A_log"):
        return created
    if created.ndim < 2:
        return created.astype(dtype)
    deviation = _CONV_DEVIATION if "conv1d" in path else _DEVIATION
    return mx.random.normal(created.shape, dtype=dtype, scale=deviation)


_COPIED_BYTES = {"cpu": 2**26, "cuda": 2**30, "metal": 2**29}
_NUM_COPIES = 10


def copy_bytes_per_s() -> float:
    """Bytes read and written per second by the quickest of some passes that read a large array and write one."""
    array = mx.ones(_COPIED_BYTES[device_kind()] // 4, dtype=mx.float32)
    mx.eval(array)
    # a pass over memory like a copy, which MLX would otherwise leave out
    times = timed(lambda: mx.eval(-array), _NUM_COPIES)
    mx.clear_cache()
    return 2 * array.nbytes / min(times)


def weight_bytes(model: Any, config: Mapping[str, Any], num_rows: int) -> int:
    """Bytes of weights that a step of `num_rows` tokens reads.

    Of experts as many as that many tokens call on average if the router treats all alike, which random weights nearly
    do. Of a table of embeddings that is not the output matrix as well, a row per token.
    """
    share = 1.0
    if num_experts := config.get("num_experts"):
        share = 1 - (1 - config["num_experts_per_tok"] / num_experts) ** num_rows
    total = 0.0
    for path, array in dict(tree_flatten(model.parameters())).items():
        if ".switch_mlp." in path or ".mlp.experts." in path:
            total += array.nbytes * share
        elif "embed_tokens" in path and not config["tie_word_embeddings"]:
            total += array.nbytes / array.shape[0] * num_rows
        else:
            total += array.nbytes
    return round(total)


def state_bytes(cost: StateCost, num_rows: int, context: int) -> int:
    """Bytes of states that a step moves: keys and values are read, what has no token axis is read and written."""
    per_row = cost.record_bytes(context) + sum(layer.fixed for layer in cost.layers)
    return num_rows * per_row
