"""A tiny Gemma 4 that sees, its weights random, and what mlx-vlm says of it.

Where tokens of a picture see each other (`use_bidirectional_attention`), mlx-vlm lets them do so in all layers and
beyond the window. There its layers run under masks that are written out here as transformers has them: in layers
without a window each token sees those before it; in the others also those of the same picture, none a window behind.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_vlm.models.gemma4.config import ModelConfig, TextConfig, VisionConfig
from mlx_vlm.models.gemma4.gemma4 import Model
from models.tiny_gemma3 import pictured_prompt

from headrace.media.profile import read_profile
from headrace.types.media import PromptMedia

WINDOW, HIDDEN, PATCH, SQUARE, VOCAB = 8, 64, 4, 3, 160
START, END, IMAGE = 150, 151, 152
SHAPES = ((24, 48), (36, 24), (36, 48))
"""Of pictures, height and width: 8, 6 and 12 tokens, as many as the window has, fewer and more."""

TOWER: dict[str, Any] = {
    "model_type": "gemma4_vision",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "patch_size": PATCH,
    "pooling_kernel_size": SQUARE,
    "position_embedding_size": 64,
    "default_output_length": 12,
    "use_clipped_linears": True,
    "standardize": True,
}


def config_of(bidirectional: bool) -> dict[str, Any]:
    """Of a model whose last layers share keys and that has inputs of each layer's own, or of one without either."""
    text = {
        "model_type": "gemma4_text",
        "hidden_size": HIDDEN,
        "num_hidden_layers": 6,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_global_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 32,
        "vocab_size": VOCAB,
        "vocab_size_per_layer_input": VOCAB,
        "num_kv_shared_layers": 0 if bidirectional else 2,
        "hidden_size_per_layer_input": 0 if bidirectional else 8,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
        },
        "use_double_wide_mlp": False,
        "attention_k_eq_v": bidirectional,
        "use_bidirectional_attention": "vision" if bidirectional else None,
        "max_position_embeddings": 512,
    }
    return {
        "model_type": "gemma4",
        "text_config": text,
        "vision_config": TOWER,
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "vision_soft_tokens_per_image": 12,
        "boi_token_id": START,
        "eoi_token_id": END,
        "image_token_id": IMAGE,
        "audio_token_id": 153,
        "video_token_id": 154,
    }


class TinyGemma4:
    """The checkpoint and its reference."""

    def __init__(self, bidirectional: bool) -> None:
        self.config = config_of(bidirectional)
        self._two_way = bidirectional
        parts = {"vision_config": None, "text_config": None}
        described = ModelConfig.from_dict({**self.config, **parts})
        described.text_config = TextConfig.from_dict(self.config["text_config"])
        described.vision_config = VisionConfig.from_dict(TOWER)
        self.model = Model(described)
        stream = np.random.default_rng(11)

        def draw(path: str, array: mx.array) -> mx.array:
            if path.endswith(("_min", "_max")):  # a few of the values reach them
                return mx.array(np.float32(-1.5 if path.endswith("_min") else 1.5))
            scale = 0.1 if array.ndim == 1 else 1.2 / np.sqrt(np.prod(array.shape[1:]))
            if path.endswith(("embed_tokens.weight", "embed_tokens_per_layer.weight", "position_embedding_table")):
                scale = 0.3
            centre = float(array.ndim == 1 and path.endswith(("weight", "scale", "scalar")))
            return mx.array((stream.standard_normal(array.shape) * scale + centre).astype(np.float32))

        self.model.update(tree_map_with_path(draw, self.model.parameters()))
        self.model.eval()

    def save(self, folder: Path) -> Path:
        """Write it as a checkpoint."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(self.model.parameters())))
        return folder

    def features(self, picture: np.ndarray) -> mx.array:
        """The embeddings of a picture's tokens. picture: bytes `[height, width, 3]`."""
        rows: mx.array = self.model.encode_image(_pixels(picture))[0]
        return rows

    def logits(self, ids: Sequence[int], pictures: Sequence[np.ndarray]) -> np.ndarray:
        """Of every token of a prompt with pictures at the runs of IMAGE, computed at once and without a cache."""
        tokens = mx.array([list(ids)])
        shown = [_pixels(picture)[0] for picture in pictures] or None
        if not self._two_way:
            return np.array(self.model(tokens, pixel_values=shown).logits[0])
        text = self.model.language_model
        hidden = self.model.get_input_embeddings(tokens, pixel_values=shown).inputs_embeds
        pictured = np.cumsum(np.array(ids) == START) * (np.array(ids) == IMAGE)  # the number of its picture, or 0
        query, key = np.arange(len(ids))[:, None], np.arange(len(ids))[None]
        same = (pictured[:, None] == pictured[None]) & (pictured[:, None] > 0)
        masks = {
            "full_attention": mx.array(key <= query)[None, None],
            "sliding_attention": mx.array(((key <= query) | same) & (key > query - WINDOW))[None, None],
        }
        for layer in text.model.layers:
            hidden, _, _ = layer(hidden, masks[layer.layer_type], None)
        return np.array(text.logits_from_hidden(text.model.norm(hidden))[0])

    def greedy(self, ids: Sequence[int], pictures: Sequence[np.ndarray], num_tokens: int) -> tuple[list[int], float]:
        """The likeliest continuation, and the least lead that one of its tokens has."""
        known, lead = list(ids), np.inf
        for _ in range(num_tokens):
            last = self.logits(known, pictures)[-1]
            best = np.sort(last)
            lead = min(lead, float(best[-1] - best[-2]))
            known.append(int(last.argmax()))
        return known[len(ids) :], lead

    def picture(self, seed: int) -> np.ndarray:
        """Bytes `[height, width, 3]`, of a shape that goes with the number."""
        return np.random.default_rng(seed).integers(0, 256, (*SHAPES[seed % 3], 3), dtype=np.uint8)

    def prompt(self, pictures: Sequence[np.ndarray], folder: Path) -> tuple[list[int], PromptMedia]:
        """Text, and after every five tokens of it a picture; as the saved checkpoint's files have it."""
        profile = read_profile(folder, self.config)
        assert profile is not None
        return pictured_prompt(pictures, profile)


def _pixels(picture: np.ndarray) -> mx.array:
    return mx.array(picture.astype(np.float32) / 255).transpose(2, 0, 1)[None]
