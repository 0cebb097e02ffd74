"""A GGUF file written here, byte by byte, comes out as the model and the tokenizer that it was made from."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model
from transformers import AutoTokenizer

from headrace.errors import ModelError
from headrace.models import gguf

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, LAYERS = 64, 4, 2, 16, 96, 2
FLOAT32, Q4_1, Q8_0 = 0, 3, 8


class Metadata:
    """Value encodings of the GGUF container."""

    @staticmethod
    def text(value: str) -> bytes:
        data = value.encode()
        return struct.pack("<Q", len(data)) + data

    @classmethod
    def encode(cls, value: Any) -> bytes:
        match value:
            case bool():
                return struct.pack("<I?", 7, value)
            case int():
                return struct.pack("<II", 4, value)
            case float():
                return struct.pack("<If", 6, value)
            case str():
                return struct.pack("<I", 8) + cls.text(value)
            case [str(), *_]:
                return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(cls.text, value))
            case [int(), *_]:
                return struct.pack("<IIQ", 9, 5, len(value)) + struct.pack(f"<{len(value)}i", *value)
        raise TypeError(value)


SAMPLING = {"temperature": 0.2, "top_p": 0.9}


def q4_1(random: np.random.Generator, rows: int, columns: int) -> tuple[bytes, np.ndarray]:
    """Random blocks and the numbers they stand for: 32 weights of scale * (0…15) + minimum; low nibbles come first."""
    scale = random.uniform(0.01, 0.02, (rows, columns // 32, 1)).astype(np.float16)
    minimum = random.uniform(-0.2, -0.1, (rows, columns // 32, 1)).astype(np.float16)
    codes = random.integers(0, 16, (rows, columns // 32, 32)).astype(np.uint8)
    packed = codes[..., :16] | (codes[..., 16:] << 4)
    data = np.concatenate([scale.view(np.uint8), minimum.view(np.uint8), packed], axis=-1)
    numbers = scale.astype(np.float32) * codes + minimum.astype(np.float32)
    return data.tobytes(), numbers.reshape(rows, columns)


def q8_0(random: np.random.Generator, rows: int, columns: int) -> tuple[bytes, np.ndarray]:
    """Random blocks of scale * (-128…127)."""
    scale = random.uniform(0.001, 0.002, (rows, columns // 32, 1)).astype(np.float16)
    codes = random.integers(-128, 128, (rows, columns // 32, 32)).astype(np.int8)
    data = np.concatenate([scale.view(np.uint8), codes.view(np.uint8)], axis=-1)
    return data.tobytes(), (scale.astype(np.float32) * codes).reshape(rows, columns)


def interleaved(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """The order of a Llama's q and k rows in the file: row i and row i + d/2 of a head become neighbours."""
    by_head = np.split(rows, num_heads)
    half = len(by_head[0]) // 2
    return np.concatenate([row[None] for head in by_head for i in range(half) for row in (head[i], head[i + half])])


def byte_tokens() -> list[str]:
    """The 256 letters that byte-level BPE writes bytes with: printable ones as they are, others from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(256 + i) for i in range(len(others))]


TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_tokens(), "ab", "Ġab", "12", "<think>"]
METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": LAYERS,
    "llama.context_length": 128,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": INNER,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 5000.0,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(TOKENS) - 4) + [4],
    "tokenizer.ggml.merges": ["a b", "Ġ ab", "1 2"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.chat_template": "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}",
}


def write(path: Path, changes: dict[str, Any] | None = None, extra_tensor: str | None = None) -> dict[str, np.ndarray]:
    """Write a tiny Llama; returns its weights under mlx-lm's names, before the file's own row order."""
    random = np.random.default_rng(0)
    metadata = {name: value for name, value in (METADATA | (changes or {})).items() if value is not None}
    tensors: list[tuple[str, tuple[int, ...], int, bytes]] = []
    meant: dict[str, np.ndarray] = {}

    def quantised(name: str, meaning: str, rows: int, columns: int, num_heads: int = 0, kind: int = Q4_1) -> None:
        data, numbers = (q4_1 if kind == Q4_1 else q8_0)(random, rows, columns)
        if num_heads:
            blocks = np.frombuffer(data, np.uint8).reshape(rows, -1)
            data = interleaved(blocks, num_heads).tobytes()
        meant[meaning] = numbers
        tensors.append((name, (columns, rows), kind, data))

    def norm(name: str, meaning: str) -> None:
        meant[meaning] = random.uniform(0.5, 1.5, HIDDEN).astype(np.float16).astype(np.float32)
        tensors.append((name, (HIDDEN,), FLOAT32, meant[meaning].tobytes()))

    quantised("token_embd.weight", "model.embed_tokens", len(TOKENS), HIDDEN, kind=Q8_0)
    norm("output_norm.weight", "model.norm")
    for i in range(LAYERS):
        file, ours = f"blk.{i}.", f"model.layers.{i}."
        norm(file + "attn_norm.weight", ours + "input_layernorm")
        norm(file + "ffn_norm.weight", ours + "post_attention_layernorm")
        quantised(file + "attn_q.weight", ours + "self_attn.q_proj", HEADS * HEAD_DIM, HIDDEN, HEADS)
        quantised(file + "attn_k.weight", ours + "self_attn.k_proj", KV_HEADS * HEAD_DIM, HIDDEN, KV_HEADS)
        quantised(file + "attn_v.weight", ours + "self_attn.v_proj", KV_HEADS * HEAD_DIM, HIDDEN)
        quantised(file + "attn_output.weight", ours + "self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM)
        quantised(file + "ffn_gate.weight", ours + "mlp.gate_proj", INNER, HIDDEN)
        quantised(file + "ffn_up.weight", ours + "mlp.up_proj", INNER, HIDDEN)
        quantised(file + "ffn_down.weight", ours + "mlp.down_proj", HIDDEN, INNER)
    if extra_tensor:
        norm(extra_tensor, "extra")

    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))
    head += b"".join(Metadata.text(name) + Metadata.encode(value) for name, value in metadata.items())
    body = b""
    for name, shape, kind, data in tensors:
        head += Metadata.text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, len(body))
        body += data + bytes(-len(data) % 32)
    path.write_bytes(head + bytes(-len(head) % 32) + body)
    return meant


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    folder = tmp_path_factory.mktemp("converted")
    meant = write(folder.parent / "tiny.gguf")
    gguf.convert(folder.parent / "tiny.gguf", folder, SAMPLING)
    return folder, meant


def test_every_weight_means_what_it_meant(converted: tuple[Path, dict[str, np.ndarray]]) -> None:
    folder, meant = converted
    arrays = mx.load(str(folder / "model.safetensors"))
    config = json.loads((folder / "config.json").read_text())["quantization"]
    assert isinstance(arrays, dict)
    assert {name.rpartition(".")[0] for name in arrays} == meant.keys()
    for name, numbers in meant.items():
        weight = arrays[f"{name}.weight"]
        if weight.dtype == mx.uint32:
            parts = (arrays[f"{name}.{part}"].astype(mx.float32) for part in ("scales", "biases"))
            bits = config.get(name, config)["bits"]
            weight = mx.dequantize(weight, *parts, group_size=32, bits=bits)
        np.testing.assert_allclose(np.array(weight.astype(mx.float32)), numbers, atol=1e-6)


def test_mlx_lm_loads_the_folder_and_computes_with_it(converted: tuple[Path, dict[str, np.ndarray]]) -> None:
    folder, meant = converted
    model, config = load_model(folder)
    model.set_dtype(mx.float32)
    logits = np.array(model(mx.array([[5, 6, 7, 5]])))
    np.testing.assert_allclose(logits[0], llama(meant, [5, 6, 7, 5]), atol=1e-3)
    assert config["quantization"]["bits"] == 4
    assert config["quantization"]["model.embed_tokens"] == {"group_size": 32, "bits": 8}


def llama(meant: dict[str, np.ndarray], ids: list[int]) -> np.ndarray:
    """Logits of a Llama, written down once more in numpy."""

    def rms_norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * meant[name]

    def heads(x: np.ndarray, name: str) -> np.ndarray:
        return (x @ meant[name].T).reshape(len(ids), -1, HEAD_DIM).swapaxes(0, 1)

    def rotated(x: np.ndarray) -> np.ndarray:
        angle = np.arange(len(ids))[:, None] * 5000.0 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)

    x = meant["model.embed_tokens"][ids].astype(np.float64)
    future = np.triu(np.full((len(ids), len(ids)), -np.inf), 1)
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        normed = rms_norm(x, layer + "input_layernorm")
        q, k = (rotated(heads(normed, layer + f"self_attn.{part}_proj")) for part in "qk")
        v = heads(normed, layer + "self_attn.v_proj")
        k, v = (np.repeat(part, HEADS // KV_HEADS, axis=0) for part in (k, v))
        scores = np.exp(q @ k.swapaxes(1, 2) / np.sqrt(HEAD_DIM) + future)
        mixed = (scores / scores.sum(-1, keepdims=True)) @ v
        x = x + mixed.swapaxes(0, 1).reshape(len(ids), -1) @ meant[layer + "self_attn.o_proj"].T
        normed = rms_norm(x, layer + "post_attention_layernorm")
        gate, up = (normed @ meant[layer + f"mlp.{part}_proj"].T for part in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ meant[layer + "mlp.down_proj"].T
    return rms_norm(x, "model.norm") @ meant["model.embed_tokens"].T


def test_the_config_and_the_end_tokens_are_the_files(converted: tuple[Path, dict[str, np.ndarray]]) -> None:
    folder, _ = converted
    config = json.loads((folder / "config.json").read_text())
    expected = {
        "hidden_size": HIDDEN,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "tie_word_embeddings": True,
        "vocab_size": len(TOKENS),
        "eos_token_id": 2,
    }
    assert {name: config[name] for name in expected} == expected
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 2, **SAMPLING}


def test_the_tokenizer_merges_splits_digits_and_keeps_markers(converted: tuple[Path, dict[str, np.ndarray]]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted[0])
    one, two = TOKENS.index("1"), TOKENS.index("2")
    assert tokenizer("ab ab")["input_ids"] == [TOKENS.index("ab"), TOKENS.index("Ġab")]
    assert tokenizer("12")["input_ids"] == [one, two]  # although there is a merge: digits stand alone
    assert tokenizer("<|im_start|>1<|im_end|>")["input_ids"] == [1, one, 2]
    assert tokenizer("<think>")["input_ids"] == [len(TOKENS) - 1]
    assert tokenizer.decode([1, one, len(TOKENS) - 1, 2], skip_special_tokens=True) == "1<think>"
    assert (tokenizer.eos_token, tokenizer.bos_token) == ("<|im_end|>", "<|im_start|>")
    emoji = tokenizer("é😀")["input_ids"]
    assert len(emoji) == 6  # one token a byte
    assert tokenizer.decode(emoji) == "é😀"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False)
    assert chat == "<|im_start|>ab<|im_end|>"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"general.architecture": "mamba"}, "'mamba'"),
        ({"tokenizer.ggml.pre": "qwen2"}, "'qwen2'"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.model"),
        ({"llama.block_count": None}, "lacks llama.block_count"),
        ({"tokenizer.ggml.eos_token_id": None}, "lacks tokenizer.ggml.eos_token_id"),
        ({"tokenizer.chat_template": None}, "lacks tokenizer.chat_template"),
    ],
)
def test_what_is_not_known_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    write(tmp_path / "odd.gguf", changes)
    with pytest.raises(ModelError, match=named):
        gguf.convert(tmp_path / "odd.gguf", tmp_path, SAMPLING)


def test_an_unknown_tensor_is_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path / "odd.gguf", extra_tensor="blk.0.attn_sinks.weight")
    with pytest.raises(ModelError, match=r"blk\.0\.attn_sinks"):
        gguf.convert(tmp_path / "odd.gguf", tmp_path, SAMPLING)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"something else entirely, and long enough to be read"])
def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "damaged.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=r"damaged\.gguf"):
        gguf.convert(tmp_path / "damaged.gguf", tmp_path, SAMPLING)
