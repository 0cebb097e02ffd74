"""Tiny models with sliding windows or chunked attention: windows of 8 tokens, which wrap in a short test."""

from __future__ import annotations

from models.tiny_parts import EXPERTS, FULL, GROUPED_EXPERTS, SLIDING, VOCAB_SIZE, WINDOW, YARN, Config, family, wrapped

_MINISTRAL3 = family(
    "ministral3",
    rope_parameters={**YARN, "rope_theta": 10000.0, "llama_4_scaling_beta": 0.3},
    num_hidden_layers=4,
    layer_types=[SLIDING, FULL, SLIDING, FULL],
    sliding_window=WINDOW,
)

_GEMMA3 = family(
    "gemma3_text",
    num_hidden_layers=4,
    head_dim=32,
    query_pre_attn_scalar=24,
    rope_local_base_freq=1000.0,
    sliding_window=WINDOW,
    sliding_window_pattern=2,
    tie_word_embeddings=True,
)

_GEMMA3N = family(
    "gemma3n_text",
    num_hidden_layers=4,
    vocab_size_per_layer_input=VOCAB_SIZE,
    hidden_size_per_layer_input=32,
    num_kv_shared_layers=2,
    sliding_window=WINDOW,
    rope_local_base_freq=1000.0,
    final_logit_softcapping=30.0,
    layer_types=[SLIDING, FULL, SLIDING, FULL],
    activation_sparsity_pattern=[0.5, 0.0, 0.5, 0.0],
    altup_num_inputs=3,
    altup_coef_clip=10.0,
    altup_correct_scale=True,
    altup_active_idx=0,
    laurel_rank=16,
    tie_word_embeddings=True,
)

_GEMMA4 = family(
    "gemma4_text",
    num_hidden_layers=6,
    num_key_value_heads=1,
    head_dim=16,
    global_head_dim=32,
    vocab_size_per_layer_input=VOCAB_SIZE,
    hidden_size_per_layer_input=32,
    num_kv_shared_layers=2,
    use_double_wide_mlp=True,
    sliding_window=WINDOW,
    layer_types=[SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL],
    rope_parameters={
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 100000.0},
        SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    },
    final_logit_softcapping=30.0,
    tie_word_embeddings=True,
)

_GEMMA4_WITHOUT_LAYER_INPUTS: Config = {
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "use_double_wide_mlp": False,
}

_LLAMA4 = family(
    "llama4_text",
    num_hidden_layers=4,
    attention_bias=False,
    attention_chunk_size=WINDOW,
    interleave_moe_layer_step=2,
    intermediate_size_mlp=96,
    num_local_experts=4,
    num_experts_per_tok=1,
    rope_scaling=None,
    use_qk_norm=True,
    floor_scale=16,
    attn_scale=0.3,
    attn_temperature_tuning=4,
)

WINDOWED: dict[str, Config] = {
    "llama_sliding": family(
        "llama", num_hidden_layers=4, layer_types=[SLIDING, SLIDING, SLIDING, FULL], sliding_window=WINDOW
    ),
    "ministral3": _MINISTRAL3,
    "mistral3": wrapped("mistral3", _MINISTRAL3),
    "gemma3_text": _GEMMA3,
    "gemma3": wrapped("gemma3", _GEMMA3, vocab_size=VOCAB_SIZE),
    "gemma3n": wrapped("gemma3n", _GEMMA3N),
    "gemma4_text": _GEMMA4,
    "gemma4": wrapped("gemma4", _GEMMA4, vocab_size=VOCAB_SIZE),
    "gemma4_k_eq_v": family(
        "gemma4_text",
        {
            **_GEMMA4,
            **_GEMMA4_WITHOUT_LAYER_INPUTS,
            "attention_k_eq_v": True,
            "num_key_value_heads": 2,
            "num_global_key_value_heads": 1,
        },
    ),
    "gemma4_moe": family(
        "gemma4_text",
        {
            **_GEMMA4,
            **_GEMMA4_WITHOUT_LAYER_INPUTS,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "gpt_oss": family(
        "gpt_oss",
        num_hidden_layers=4,
        intermediate_size=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        rope_scaling=YARN,
        layer_types=[SLIDING, FULL, SLIDING, FULL],
    ),
    "olmo3": family("olmo3", num_hidden_layers=4, sliding_window=WINDOW),
    "cohere2": family(
        "cohere2",
        num_hidden_layers=4,
        layer_norm_eps=1e-5,
        logit_scale=0.9,
        sliding_window=WINDOW,
        sliding_window_pattern=2,
        tie_word_embeddings=True,
    ),
    "exaone4": family(
        "exaone4", num_hidden_layers=4, rope_scaling=None, sliding_window=WINDOW, sliding_window_pattern="LLGL"
    ),
    "exaone_moe": family(
        "exaone_moe",
        EXPERTS,
        num_shared_experts=1,
        sliding_window=WINDOW,
        layer_types=[SLIDING, FULL, SLIDING],
        is_moe_layer=[False, True, True],
    ),
    "llama4": wrapped("llama4", _LLAMA4),
    "afmoe": family(
        "afmoe",
        EXPERTS,
        num_hidden_layers=4,
        layer_types=[SLIDING, FULL, SLIDING, FULL],
        num_shared_experts=1,
        num_dense_layers=1,
        sliding_window=WINDOW,
    ),
    "mimo_v2_flash": family(
        "mimo_v2_flash",
        {**GROUPED_EXPERTS, "moe_layer_freq": [0, 1, 1, 1]},
        num_hidden_layers=4,
        hybrid_layer_pattern=[0, 1, 1, 0],
        add_swa_attention_sink_bias=True,
        add_full_attention_sink_bias=False,
        sliding_window_size=WINDOW,
        layernorm_epsilon=1e-5,
        swa_rope_theta=1000.0,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=4,
        v_head_dim=32,
        swa_head_dim=16,
        swa_v_head_dim=32,
        partial_rotary_factor=0.5,
        attention_value_scale=0.7,
    ),
    "step3p5": family(
        "step3p5",
        num_hidden_layers=4,
        num_attention_groups=2,
        sliding_window=WINDOW,
        layer_types=[FULL, SLIDING, FULL, SLIDING],
        attention_other_setting={"num_attention_heads": 8, "num_attention_groups": 2, "head_dim": 16},
        partial_rotary_factors=[0.5, 1.0, 0.5, 1.0],
        moe_num_experts=4,
        moe_top_k=2,
        moe_intermediate_size=32,
        share_expert_dim=32,
        moe_layers_enum="1,2,3",
    ),
    "spark2_5": family(
        "spark2_5",
        num_hidden_layers=4,
        sliding_window=WINDOW,
        layer_types=[SLIDING, SLIDING, SLIDING, FULL],
        rope_parameters={
            FULL: {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
            SLIDING: {"rope_type": "default", "rope_theta": 1000.0},
        },
        tie_word_embeddings=True,
    ),
    "mellum": family(
        "mellum",
        EXPERTS,
        num_hidden_layers=4,
        sliding_window=WINDOW,
        layer_types=[SLIDING, FULL, SLIDING, FULL],
        rope_parameters={
            FULL: {"rope_type": "default", "rope_theta": 10000.0},
            SLIDING: {"rope_type": "default", "rope_theta": 1000.0},
        },
    ),
    "muse_glimmer": family(
        "muse_glimmer",
        num_hidden_layers=4,
        sliding_window=WINDOW,
        post_norm_eps=1e-5,
        qk_scale_factor=3.0,
        final_logit_softcapping=20.0,
        output_multiplier=0.8,
    ),
    "laguna": family(
        "laguna",
        EXPERTS,
        num_hidden_layers=4,
        sliding_window=WINDOW,
        layer_types=[FULL, SLIDING, FULL, SLIDING],
        shared_expert_intermediate_size=32,
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        num_attention_heads_per_layer=[4, 8, 4, 8],
        moe_routed_scaling_factor=1.5,
        rope_parameters={
            FULL: {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
            SLIDING: {"rope_type": "default", "rope_theta": 1000.0},
        },
    ),
    "iquestloopcoder": family("iquestloopcoder", loop_num=2, loop_window_size=WINDOW),
}
