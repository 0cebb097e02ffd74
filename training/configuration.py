"""The configuration files of the exported folders, in the form of real Qwen3.5 releases."""

from typing import Any

from tokenizers import Tokenizer

from training.model import TextShape
from training.vision import FRAMES, MERGE, PATCH, VisionShape

CONTEXT_LENGTH = 16_384
IMAGE_PIXELS = (96 * 96, 128 * 128)  # areas between which pictures are brought
VIDEO_PIXELS = (64 * 64 * 4, 96 * 96 * 16)  # summed over all frames


def text_configuration(shape: TextShape, end_id: int) -> dict[str, Any]:
    kinds = [
        "full_attention" if (index + 1) % shape.attention_interval == 0 else "linear_attention"
        for index in range(shape.num_layers)
    ]
    return {
        "model_type": "qwen3_5_text",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": end_id,
        "full_attention_interval": shape.attention_interval,
        "head_dim": shape.head_size,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": shape.mlp_size,
        "layer_types": kinds,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": shape.linear_head_size,
        "linear_num_key_heads": shape.num_key_heads,
        "linear_num_value_heads": shape.num_value_heads,
        "linear_value_head_dim": shape.linear_head_size,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": CONTEXT_LENGTH,
        "mlp_only_layers": [],
        "mtp_num_hidden_layers": shape.num_mtp_layers,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": shape.num_heads,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_kv_heads,
        "partial_rotary_factor": shape.rope_share,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": list(shape.rope_sections),
            "partial_rotary_factor": shape.rope_share,
            "rope_theta": int(shape.rope_theta),
            "rope_type": "default",
        },
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": shape.vocabulary_size,
    }


def vision_configuration(shape: VisionShape) -> dict[str, Any]:
    return {
        "model_type": "qwen3_5",
        "deepstack_visual_indexes": [],
        "depth": shape.num_layers,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": shape.hidden_size,
        "in_channels": 3,
        "initializer_range": 0.02,
        "intermediate_size": shape.mlp_size,
        "num_heads": shape.num_heads,
        "num_position_embeddings": shape.position_side**2,
        "out_hidden_size": shape.out_size,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": FRAMES,
    }


def model_configuration(shape: TextShape, vision: VisionShape | None, tokenizer: Tokenizer) -> dict[str, Any]:
    """config.json; without a tower the vision section is left out."""

    def id_of(token: str) -> int:
        found = tokenizer.token_to_id(token)
        if found is None:
            raise ValueError(f"the tokenizer has no {token!r}")
        return found

    configuration: dict[str, Any] = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "dtype": "bfloat16",
        "image_token_id": id_of("<|image_pad|>"),
        "video_token_id": id_of("<|video_pad|>"),
        "vision_start_token_id": id_of("<|vision_start|>"),
        "vision_end_token_id": id_of("<|vision_end|>"),
        "text_config": text_configuration(shape, id_of("<|im_end|>")),
        "tie_word_embeddings": True,
        "transformers_version": "5.17.0",
    }
    if vision is not None:
        configuration["vision_config"] = vision_configuration(vision)
    return configuration


def generation_configuration(tokenizer: Tokenizer) -> dict[str, Any]:
    end, pad = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")
    return {"bos_token_id": pad, "eos_token_id": [end, pad], "pad_token_id": pad, "do_sample": False}


def image_configuration() -> dict[str, Any]:
    return {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor",
        "size": {"shortest_edge": IMAGE_PIXELS[0], "longest_edge": IMAGE_PIXELS[1]},
        "patch_size": PATCH,
        "temporal_patch_size": FRAMES,
        "merge_size": MERGE,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }


def video_configuration() -> dict[str, Any]:
    return {
        "video_processor_type": "Qwen3VLVideoProcessor",
        "processor_class": "Qwen3VLProcessor",
        "size": {"shortest_edge": VIDEO_PIXELS[0], "longest_edge": VIDEO_PIXELS[1]},
        "patch_size": PATCH,
        "temporal_patch_size": FRAMES,
        "merge_size": MERGE,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "do_sample_frames": True,
        "fps": 2,
        "min_frames": 4,
        "max_frames": 16,
    }
