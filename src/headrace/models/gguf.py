"""Converts a GGUF file into a folder that mlx-lm loads: weights, config and tokenizer.

MLX reads the container and repacks quantised blocks without loss (groups of 32 with a scale and a bias in float16);
here tensors get their names and their row order back, and the metadata becomes JSON files. One architecture and one
pre-tokenizer are known; anything else is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

from headrace.errors import ModelError

GROUP_SIZE = 32
"""Weights that share a scale; GGUF's own block length."""

_CONTROL_TOKEN, _USER_DEFINED_TOKEN = 3, 4
"""Token types: markers such as `<|im_end|>`, and whole words that are never split."""

_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_HEADS_OF_PERMUTED = {"attn_q": "llama.attention.head_count", "attn_k": "llama.attention.head_count_kv"}


def convert(source: Path, folder: Path, sampling: Mapping[str, Any]) -> None:
    """Write `folder` (which must exist and be empty) from the GGUF file `source`.

    sampling: generation_config.json's settings besides the special tokens, which GGUF files lack.
    Raises ModelError for a file that is damaged or holds something else than a Llama with SmolLM's tokenizer.
    """
    tensors, metadata = read(source)
    _require(metadata, "general.architecture", "llama")
    arrays = weights(tensors, metadata)
    mx.save_safetensors(str(folder / "model.safetensors"), arrays, metadata={"format": "mlx"})
    _write_json(folder / "generation_config.json", {**special_token_ids(metadata), **sampling})
    _write_json(folder / "tokenizer_config.json", tokenizer_config(metadata))
    tokenizer(metadata).save(str(folder / "tokenizer.json"))
    _write_json(folder / "config.json", config(arrays, metadata))


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read(source: Path) -> tuple[dict[str, mx.array], dict[str, Any]]:
    """A file's tensors under its own names, quantised ones as `.weight`, `.scales`, `.biases`, and its metadata."""
    try:
        # The declared result covers every file format; of this one it is two mappings.
        loaded = cast(tuple[dict[str, mx.array], dict[str, Any]], mx.load(str(source), "gguf", return_metadata=True))
    except (RuntimeError, ValueError) as error:
        raise ModelError(f"{source} can't be read as a GGUF file ({error})") from error
    tensors, metadata = loaded
    return tensors, {name: value.tolist() if isinstance(value, mx.array) else value for name, value in metadata.items()}


def _value(metadata: Mapping[str, Any], name: str) -> Any:
    if name not in metadata:
        raise ModelError(f"the GGUF file's metadata lacks {name}")
    return metadata[name]


def _require(metadata: Mapping[str, Any], name: str, expected: str) -> None:
    found = _value(metadata, name)
    if found != expected:
        raise ModelError(f"a GGUF file with {name} {found!r} can't be converted, only {expected!r}")


# Weights


def weights(tensors: Mapping[str, mx.array], metadata: Mapping[str, Any]) -> dict[str, mx.array]:
    """The tensors under mlx-lm's names and in its row order; those that are not quantised become float16."""
    arrays = {}
    for full_name, tensor in tensors.items():
        stem, _, kind = full_name.rpartition(".")
        if heads := _HEADS_OF_PERMUTED.get(stem.rpartition(".")[2]):
            tensor = unpermuted(tensor, int(_value(metadata, heads)))
        is_float = tensor.dtype in (mx.float32, mx.bfloat16)
        arrays[f"{_name(stem)}.{kind}"] = tensor.astype(mx.float16) if is_float else tensor
    return arrays


def _name(stem: str) -> str:
    """mlx-lm's name for `token_embd` or `blk.3.attn_q`."""
    match stem.split("."):
        case [top] if top in _TOP_NAMES:
            return _TOP_NAMES[top]
        case ["blk", index, part] if part in _LAYER_NAMES:
            return f"model.layers.{index}.{_LAYER_NAMES[part]}"
    raise ModelError(f"the GGUF file has an unknown tensor {stem}")


def unpermuted(rows: mx.array, num_heads: int) -> mx.array:
    """Undo the row order that GGUF gives the query and key projections of a Llama.

    rows: [heads * head_dim, n]. The file interleaves the two halves of each head, for a rope that rotates neighbouring
    pairs; mlx-lm's rotates channels of the two halves.
    """
    num_rows, width = rows.shape
    return rows.reshape(num_heads, num_rows // num_heads // 2, 2, width).swapaxes(1, 2).reshape(num_rows, width)


# Config


def config(arrays: Mapping[str, mx.array], metadata: Mapping[str, Any]) -> dict[str, Any]:

    def of_llama(name: str) -> Any:
        return _value(metadata, f"llama.{name}")

    num_heads = of_llama("attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": of_llama("embedding_length"),
        "intermediate_size": of_llama("feed_forward_length"),
        "num_hidden_layers": of_llama("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": of_llama("attention.head_count_kv"),
        "head_dim": metadata.get("llama.attention.key_length", of_llama("embedding_length") // num_heads),
        "max_position_embeddings": of_llama("context_length"),
        # Stored in float32: the decimal number that was meant is the shortest near it.
        "rms_norm_eps": float(f"{of_llama('attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": metadata.get("llama.rope.freq_base", 10000.0),
        "tie_word_embeddings": "lm_head.weight" not in arrays,
        "vocab_size": len(_value(metadata, "tokenizer.ggml.tokens")),
        "torch_dtype": "float16",
        **special_token_ids(metadata),
        "quantization": quantization(arrays),
    }


def quantization(arrays: Mapping[str, mx.array]) -> dict[str, Any]:
    """The widths of the quantised weights: the most frequent one, and each weight that has another."""
    bits = {
        name.removesuffix(".scales"): arrays[f"{name.removesuffix('.scales')}.weight"].shape[1] // scales.shape[1]
        for name, scales in arrays.items()
        if name.endswith(".scales")
    }
    if not bits:
        raise ModelError("the GGUF file holds no quantised weights")
    usual = max(set(bits.values()), key=list(bits.values()).count)
    others = {name: {"group_size": GROUP_SIZE, "bits": b} for name, b in sorted(bits.items()) if b != usual}
    dense = {
        name.removesuffix(".weight"): False
        for name, array in arrays.items()
        if name.endswith(".weight") and array.ndim == 2 and name.removesuffix(".weight") not in bits
    }
    return {"group_size": GROUP_SIZE, "bits": usual, "mode": "affine", **others, **dense}


def special_token_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    """The ids that generation_config.json and config.json name, those that the file has; the end token is a must."""
    names = {"bos_token_id": "bos", "pad_token_id": "padding"}
    ids = {name: metadata.get(f"tokenizer.ggml.{ours}_token_id") for name, ours in names.items()}
    known = {name: int(id) for name, id in ids.items() if id is not None}
    return {"eos_token_id": int(_value(metadata, "tokenizer.ggml.eos_token_id")), **known}


# Tokenizer


def tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The byte-level BPE tokenizer, which splits off each digit, with the marker tokens that text can't split."""
    _require(metadata, "tokenizer.ggml.model", "gpt2")
    _require(metadata, "tokenizer.ggml.pre", "smollm")
    tokens, types = _value(metadata, "tokenizer.ggml.tokens"), _value(metadata, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ", 1)) for merge in _value(metadata, "tokenizer.ggml.merges")]
    result = Tokenizer(BPE(vocab={token: id for id, token in enumerate(tokens)}, merges=merges))
    result.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    result.decoder = ByteLevelDecoder()
    result.add_special_tokens(_added(tokens, types, _CONTROL_TOKEN))
    result.add_tokens(_added(tokens, types, _USER_DEFINED_TOKEN))
    return result


def _added(tokens: list[str], types: list[int], wanted: int) -> list[AddedToken]:
    special = wanted == _CONTROL_TOKEN
    return [
        AddedToken(token, normalized=False, special=special)
        for token, type in zip(tokens, types, strict=True)
        if type == wanted
    ]


def tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    tokens = _value(metadata, "tokenizer.ggml.tokens")
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    ids = {name: metadata.get(f"tokenizer.ggml.{ours}_token_id") for name, ours in names.items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": _value(metadata, "llama.context_length"),
        **{name: tokens[id] for name, id in ids.items() if id is not None},
        "chat_template": _value(metadata, "tokenizer.chat_template"),
    }
