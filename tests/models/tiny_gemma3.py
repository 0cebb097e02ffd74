"""A tiny Gemma 3 that sees, its weights random, and what it says by mlx-vlm's modules under masks by definition.

mlx-vlm's own way through them is not taken: it lets every token see every other one, and leaves the tower's last norm
at another epsilon than the checkpoints'. Which tokens see which is written out here as transformers has it: each those
before it and those of the same picture, and in layers with a window none that is a window behind.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_vlm.models.gemma3.config import ModelConfig, TextConfig, VisionConfig
from mlx_vlm.models.gemma3.gemma3 import Model

from headrace.media.patches import pixel_digest, to_patches
from headrace.media.profile import VisionProfile, read_profile
from headrace.types.media import MediaInput, PromptMedia

WINDOW, HIDDEN, SIDE, NUM_TOKENS = 8, 64, 32, 16
"""A picture has more tokens than the window."""

START, END, IMAGE = 150, 151, 152
EPS = 1e-6

TEXT: dict[str, Any] = {
    "model_type": "gemma3_text",
    "hidden_size": HIDDEN,
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "vocab_size": 160,
    "sliding_window": WINDOW,
    "sliding_window_pattern": 2,
    "rope_theta": 10_000.0,
    "rope_global_base_freq": 10_000.0,
    "rope_local_base_freq": 1000.0,
    "mm_tokens_per_image": NUM_TOKENS,
    "max_position_embeddings": 512,
}
TOWER: dict[str, Any] = {
    "model_type": "siglip_vision_model",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "patch_size": 4,
    "image_size": SIDE,
    "layer_norm_eps": EPS,
}
CONFIG: dict[str, Any] = {
    "model_type": "gemma3",
    "text_config": TEXT,
    "vision_config": TOWER,
    "vocab_size": TEXT["vocab_size"],
    "hidden_size": HIDDEN,
    "mm_tokens_per_image": NUM_TOKENS,
    "boi_token_index": START,
    "eoi_token_index": END,
    "image_token_index": IMAGE,
}


class TinyGemma3:
    """The checkpoint and its reference."""

    def __init__(self) -> None:
        described = ModelConfig.from_dict({**CONFIG, "vision_config": None, "text_config": None})
        described.text_config, described.vision_config = TextConfig.from_dict(TEXT), VisionConfig.from_dict(TOWER)
        self.model = Model(described)
        stream = np.random.default_rng(11)

        def draw(path: str, array: mx.array) -> mx.array:
            scale = 0.1 if array.ndim == 1 else 1.2 / np.sqrt(np.prod(array.shape[1:]))
            if path.endswith(("position_embedding.weight", "embed_tokens.weight")):
                scale = 0.3
            drawn = stream.standard_normal(array.shape) * scale
            # norms of the tower scale by their weight, those of the text model and the projector by 1 + weight
            centre = float("vision" in path and "norm" in path and path.endswith("weight"))
            return mx.array((drawn + centre).astype(np.float32))

        self.model.update(tree_map_with_path(draw, self.model.parameters()))
        self.model.vision_tower.vision_model.post_layernorm.eps = EPS
        self.model.eval()

    def save(self, folder: Path) -> Path:
        """Write it as a checkpoint whose output matrix is that of its input."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(CONFIG))
        weights = dict(tree_flatten(self.model.parameters()))
        del weights["language_model.lm_head.weight"]
        mx.save_safetensors(str(folder / "model.safetensors"), weights)
        return folder

    def features(self, picture: np.ndarray) -> mx.array:
        """The embeddings of a picture's tokens. picture: bytes `[side, side, 3]`."""
        pixels = mx.array(picture.astype(np.float32) / 127.5 - 1)[None]
        hidden = self.model.vision_tower(pixels)[0]
        return self.model.multi_modal_projector(hidden)[0]

    def logits(self, ids: Sequence[int], pictures: Sequence[np.ndarray]) -> np.ndarray:
        """Of every token of a prompt with pictures at the runs of IMAGE, computed at once and without a cache."""
        text = self.model.language_model.model
        tokens = np.array(ids)
        rows = np.array(text.embed_tokens(mx.array(tokens))) * HIDDEN**0.5
        pictured = np.cumsum(tokens == START) * (tokens == IMAGE)  # the number of its picture, 0 for text
        for number, picture in enumerate(pictures, start=1):
            rows[pictured == number] = np.array(self.features(picture))
        query, key = np.arange(len(ids))[:, None], np.arange(len(ids))[None]
        sees = (key <= query) | ((pictured[:, None] == pictured[None]) & (pictured[:, None] > 0))
        hidden = mx.array(rows)[None]
        for index, layer in enumerate(text.layers):
            is_full = index % TEXT["sliding_window_pattern"] == TEXT["sliding_window_pattern"] - 1
            mask = sees if is_full else sees & (key > query - WINDOW)
            hidden = layer(hidden, mx.array(mask)[None, None], None)
        return np.array(text.norm(hidden)[0] @ text.embed_tokens.weight.T)

    def greedy(self, ids: Sequence[int], pictures: Sequence[np.ndarray], num_tokens: int) -> tuple[list[int], float]:
        """The likeliest continuation, and the least lead that one of its tokens has."""
        known, lead = list(ids), np.inf
        for _ in range(num_tokens):
            last = np.sort(self.logits(known, pictures)[-1])
            lead = min(lead, float(last[-1] - last[-2]))
            known.append(int(self.logits(known, pictures)[-1].argmax()))
        return known[len(ids) :], lead

    def picture(self, seed: int) -> np.ndarray:
        """Bytes `[side, side, 3]`."""
        return np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)

    def prompt(self, pictures: Sequence[np.ndarray], folder: Path) -> tuple[list[int], PromptMedia]:
        """Text, and after every five tokens of it a picture; as the saved checkpoint's files have it."""
        profile = read_profile(folder, CONFIG)
        assert profile is not None
        return pictured_prompt(pictures, profile)


def pictured_prompt(pictures: Sequence[np.ndarray], profile: VisionProfile) -> tuple[list[int], PromptMedia]:
    """Text, and after every five tokens of it a picture between its tokens."""
    how, tokens = profile.vision, profile.tokens
    ids: list[int] = []
    inputs: list[MediaInput] = []
    for number, shown in enumerate(pictures):
        ids += [*(3 + 7 * number + index for index in range(5)), tokens.start]
        patches, grid = to_patches(shown[None], how)
        start = len(ids)
        ids += [tokens.image] * (grid[1] * grid[2] // how.merge_size**2)
        digest = pixel_digest(patches, grid, (0,))
        inputs.append(MediaInput(start, len(ids), patches.data, grid, how.mean, how.std, digest))
        ids.append(tokens.end)
    return [*ids, 90, 91, 92], PromptMedia(tuple(inputs), bidirectional=how.bidirectional)
