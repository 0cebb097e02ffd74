"""Tiny models that only mlx-vlm supports, with their processors' files, and the tokens that mlx-vlm alone gives."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_vlm.models import llava, paligemma, pixtral, smolvlm
from mlx_vlm.models.cache import make_prompt_cache
from mlx_vlm.utils import update_module_configs

MINIATURE = Path(__file__).parents[2] / "src" / "headrace" / "miniature"
VOCAB = 4200
TEXT: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
}
TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 8,
    "image_size": 32,
    "num_channels": 3,
}
SPECIAL = (
    *("<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>", "<row_1_col_1>"),
    *("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}"
    "{% if part.type == 'image' %}MARK{% elif part.type == 'text' %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
LLAVA: dict[str, Any] = {
    "model_type": "llava",
    "text_config": TEXT,
    "vision_config": {"model_type": "clip_vision_model", **TOWER},
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
}
SMOLVLM: dict[str, Any] = {
    "model_type": "smolvlm",
    "text_config": TEXT,
    "vision_config": {"model_type": "smolvlm_vision", **TOWER},
    "scale_factor": 2,
}
PIXTRAL: dict[str, Any] = {
    "model_type": "pixtral",
    "text_config": {**TEXT, "model_type": "mistral", "head_dim": 16},
    "vision_config": {"model_type": "pixtral", **TOWER, "head_dim": 16, "rope_theta": 10_000.0},
}
PALIGEMMA: dict[str, Any] = {
    "model_type": "paligemma",
    "text_config": {**TEXT, "model_type": "gemma", "head_dim": 16},
    "vision_config": {"model_type": "siglip_vision_model", **TOWER, "projection_dim": 64},
    "hidden_size": 64,
}
"""Its prompts are seen both ways."""

PROCESSORS: Mapping[str, dict[str, dict[str, Any]]] = {
    "llava": {
        "preprocessor_config.json": {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 32},
            "crop_size": {"height": 32, "width": 32},
        },
        "processor_config.json": {
            "processor_class": "LlavaProcessor",
            "patch_size": 8,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
    },
    "smolvlm": {
        "preprocessor_config.json": {
            "image_processor_type": "Idefics3ImageProcessor",
            "size": {"longest_edge": 64},
            "max_image_size": {"longest_edge": 32},
        },
        "processor_config.json": {"processor_class": "SmolVLMProcessor", "image_seq_len": 4},
    },
    "pixtral": {
        "preprocessor_config.json": {
            "image_processor_type": "PixtralImageProcessor",
            "size": {"longest_edge": 32},
            "patch_size": {"height": 8, "width": 8},
        },
        "processor_config.json": {"processor_class": "PixtralProcessor", "patch_size": 8},
    },
    "paligemma": {
        "preprocessor_config.json": {
            "image_processor_type": "SiglipImageProcessor",
            "size": {"height": 32, "width": 32},
            "image_seq_length": 16,
        },
        "processor_config.json": {"processor_class": "PaliGemmaProcessor", "image_seq_length": 16},
    },
}


class TinyVlm:
    """The checkpoint and its reference. config: one of those above."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.name = config["model_type"]
        self.mark = "[IMG]" if self.name == "pixtral" else "<image>"
        mark_id = next(each["id"] for each in _tokenizer()["added_tokens"] if each["content"] == self.mark)
        self.config = {**config, "vocab_size": VOCAB, "image_token_index": mark_id, "image_token_id": mark_id}
        package: Any = {"llava": llava, "smolvlm": smolvlm, "pixtral": pixtral, "paligemma": paligemma}[self.name]
        fields = copy.deepcopy(self.config)  # some edit what they are given
        described = package.ModelConfig.from_dict(fields)
        described = update_module_configs(described, package, fields, ["text", "vision"])
        self.model = package.Model(described)
        stream = np.random.default_rng(7)

        def draw(path: str, array: mx.array) -> mx.array:
            scale = 0.1 if array.ndim == 1 else 1.2 / np.sqrt(np.prod(array.shape[1:]))
            scale = 0.3 if "embed" in path and array.ndim == 2 else scale
            centre = float(array.ndim == 1 and "norm" in path and path.endswith("weight"))
            return mx.array((stream.standard_normal(array.shape) * scale + centre).astype(np.float32))

        self.model.update(tree_map_with_path(draw, self.model.parameters()))
        self.model.eval()

    def save(self, folder: Path) -> Path:
        """Write it as a checkpoint with tokenizer, chat template and processor."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        (folder / "tokenizer.json").write_text(json.dumps(_tokenizer()), "utf-8")
        (folder / "generation_config.json").write_bytes((MINIATURE / "generation_config.json").read_bytes())
        settings = json.loads((MINIATURE / "tokenizer_config.json").read_text("utf-8"))
        settings = {name: value for name, value in settings.items() if "image" not in name and "vi" not in name}
        settings["bos_token"] = "<|im_start|>"
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        (folder / "chat_template.jinja").write_text(TEMPLATE.replace("MARK", self.mark), "utf-8")
        for name, settings in PROCESSORS[self.name].items():
            (folder / name).write_text(json.dumps(settings))
        mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(self.model.parameters())))
        return folder

    def greedy(self, ids: Sequence[int], fields: Mapping[str, Any], num_tokens: int) -> tuple[list[int], float]:
        """The likeliest continuation of a whole prompt, and the least lead that one of its tokens has.

        fields: what the family's processor has made of all of its pictures together, none for text.
        """
        cache = make_prompt_cache(self.model.language_model)
        tokens = mx.array([list(ids)])
        arrays = {name: mx.array(value) for name, value in fields.items()}
        rows = self.model.get_input_embeddings(tokens, arrays.pop("pixel_values", None), **arrays).inputs_embeds
        logits = self.model.language_model(tokens, inputs_embeds=rows, cache=cache).logits[0, -1]
        found, lead = [], np.inf
        for _ in range(num_tokens):
            best = np.sort(np.array(logits))
            lead = min(lead, float(best[-1] - best[-2]))
            found.append(int(mx.argmax(logits)))
            logits = self.model.language_model(mx.array([[found[-1]]]), cache=cache).logits[0, -1]
        return found, lead


def _tokenizer() -> dict[str, Any]:
    """The bundled one with the tokens that stand around and for pictures."""
    tokenizer: dict[str, Any] = json.loads((MINIATURE / "tokenizer.json").read_text("utf-8"))
    first = max(1 + max(each["id"] for each in tokenizer["added_tokens"]), len(tokenizer["model"]["vocab"]))
    kind = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer["added_tokens"] += [
        {"id": first + index, "content": content, **kind} for index, content in enumerate(SPECIAL)
    ]
    return tokenizer
