"""Writes a trained model as a Hugging Face folder: bf16 weights in one safetensors file, and its configuration.

python -m training.export CHECKPOINT_FOLDER OUT_FOLDER [--draft]
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from training.checkpoint import load_weights
from training.configuration import (
    generation_configuration,
    image_configuration,
    model_configuration,
    video_configuration,
)
from training.model import DRAFT, MINIATURE, MINIATURE_VISION, Miniature

SIZE_LIMITS = {False: 14_000_000, True: 2_500_000}  # bytes; the key is whether it is the draft
SHARED_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def new_model(is_draft: bool) -> Miniature:
    return Miniature(DRAFT, None) if is_draft else Miniature(MINIATURE, MINIATURE_VISION)


def load_exported(folder: Path) -> Miniature:
    """A model of the exported folder in float32. Errors name the file and the tensors."""
    path = folder / "model.safetensors"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing")
    weights = {name: value.float() for name, value in load_file(str(path)).items()}
    model = new_model(is_draft="model.visual.patch_embed.proj.weight" not in weights)
    wanted = set(model.state_dict())
    if wanted != set(weights):
        raise ValueError(
            f"{path} does not fit: missing {sorted(wanted - set(weights))}, unexpected {sorted(set(weights) - wanted)}"
        )
    model.load_state_dict(weights)
    model.eval()
    return model


def shipped(name: str, value: Tensor) -> Tensor:
    """A weight as it is stored: bf16. Zero-centred norms are rounded so that adding one in bf16 is exact.

    Loaders add the one in the stored precision; without this they would round away most of a small weight.
    """
    centred = name.endswith("norm.weight") and "linear_attn.norm" not in name and "visual" not in name
    centred = centred or ("pre_fc_norm" in name) or ("layernorm.weight" in name)
    rounded = value.detach().float().cpu()
    if centred:
        return ((rounded + 1).to(torch.bfloat16).float() - 1).to(torch.bfloat16).contiguous()
    return rounded.to(torch.bfloat16).contiguous()


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def export(model: Miniature, folder: Path, tokenizer_folder: Path, is_draft: bool) -> None:
    """Writes weights and configuration into `folder`, which must already hold or gets the tokenizer's files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in SHARED_FILES:
        if not (tokenizer_folder / name).is_file():
            raise FileNotFoundError(f"{tokenizer_folder / name} is missing: train the tokenizer first")
        if folder != tokenizer_folder:
            shutil.copyfile(tokenizer_folder / name, folder / name)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    weights = {name: shipped(name, value) for name, value in model.state_dict().items()}
    path = folder / "model.safetensors"
    save_file(weights, str(path), metadata={"format": "pt"})
    path.chmod(0o644)
    if path.stat().st_size > SIZE_LIMITS[is_draft]:
        raise ValueError(f"{path} has {path.stat().st_size} bytes; the limit is {SIZE_LIMITS[is_draft]}")
    vision = None if is_draft else MINIATURE_VISION
    write_json(folder / "config.json", model_configuration(model.shape, vision, tokenizer))
    write_json(folder / "generation_config.json", generation_configuration(tokenizer))
    if not is_draft:
        write_json(folder / "preprocessor_config.json", image_configuration())
        write_json(folder / "video_preprocessor_config.json", video_configuration())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--draft", action="store_true", help="the checkpoint is a draft model's")
    parser.add_argument("--tokenizer", type=Path, default=Path("src/headrace/miniature"))
    arguments = parser.parse_args()
    model = new_model(arguments.draft)
    load_weights(model, arguments.checkpoint)
    export(model, arguments.out, arguments.tokenizer, arguments.draft)


if __name__ == "__main__":
    main()
