"""Pieces that the configurations of tiny models are made of.

Every value is the smallest that still exercises what a family has. Widths are multiples of 32, so that the weights
can be quantised.
"""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]
"""What a checkpoint's config.json holds."""

VOCAB_SIZE = 160
HIDDEN_SIZE = 64
WINDOW = 8
FULL = "full_attention"
SLIDING = "sliding_attention"

COMMON: Config = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "eos_token_id": 2,
}
"""What nearly every family calls by the same name."""


def family(model_type: str, *parts: Config, **fields: Any) -> Config:
    """The common fields, then each part in turn, then the fields; the later value holds."""
    config = dict(COMMON)
    for part in parts:
        config.update(part)
    return {**config, "model_type": model_type, **fields}


def wrapped(model_type: str, text_config: Config, **fields: Any) -> Config:
    """A root that nests the text model, as checkpoints with a vision tower have it."""
    text_config = {key: value for key, value in text_config.items() if key != "eos_token_id"}
    tied = text_config["tie_word_embeddings"]
    return {
        "model_type": model_type,
        "text_config": text_config,
        "tie_word_embeddings": tied,
        "eos_token_id": 2,
        **fields,
    }


YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

EXPERTS: Config = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}

GROUPED_EXPERTS: Config = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
}

LATENT: Config = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 32,
}

GRANITE: Config = {
    "attention_bias": False,
    "mlp_bias": False,
    "attention_multiplier": 0.2,
    "embedding_multiplier": 1.5,
    "residual_multiplier": 0.9,
    "logits_scaling": 0.8,
    "tie_word_embeddings": True,
}

BAILING: Config = {
    **EXPERTS,
    "num_hidden_layers": 4,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "use_qk_norm": True,
    "score_function": "sigmoid",
    "n_group": 2,
    "topk_group": 1,
    "moe_router_enable_expert_bias": True,
    "routed_scaling_factor": 1.5,
}

MINICPM: Config = {"dim_model_base": 48, "scale_depth": 1.4, "scale_emb": 2.0}

GPT2: Config = {"n_embd": HIDDEN_SIZE, "n_layer": 3, "n_head": 4, "n_positions": 512, "layer_norm_epsilon": 1e-5}
