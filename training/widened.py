"""The miniature in a larger shape: it says what the miniature says, at what a model of that shape costs.

    python -m training.widened FOLDER [--shape qwen3.5-4b] [--layers 32]

Drafts are worth what their acceptance and their costs make of them. Random weights have no acceptance, and the
miniature's costs are those of the host. Its weights are put among zeros here, so that the larger model computes the
same:

- Hidden channels are repeated, which leaves their mean square as it is. Whatever reads them reads the first of each.
- Heads, channels of heads, channels of MLPs and layers that there are too many of add nothing to the residual stream.
  Norms of wider heads see the same sum among more channels, which the queries' weights make up for.
- Tokens that there are too many of are told apart by the last hidden channel, which is the same small number for all
  tokens; the output matrix makes their logits very low by it.

The vision tower is left out.
"""

import argparse
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from benchmarks.shapes import SHAPES, config_of
from headrace.models.built_in import MINIATURE

SAME = 2.0**-6
"""The last hidden channel of every token: far less than the others' mean square."""
LOW = -(2.0**17)
"""By which it enters the logits of tokens that the miniature has not."""

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Axis:
    """Where an axis of the miniature lies in the larger one: element `source[i]` at `target[i]`, of `size`."""

    source: np.ndarray
    target: np.ndarray
    size: int


def heads(old: int, new: int, old_groups: int, new_groups: int, old_width: int, new_width: int, parts: int = 1) -> Axis:
    """Channels of heads, `parts` times as many to a head; a head stays in its group, which has more heads now."""
    head, part, channel = np.meshgrid(range(old), range(parts), range(old_width), indexing="ij")
    among = old // old_groups
    moved = head // among * (new // new_groups) + head % among
    target = (moved * parts + part) * new_width + channel
    return Axis(np.arange(target.size), target.ravel(), new * parts * new_width)


def first(old: int, new: int) -> Axis:
    """The first elements."""
    return Axis(np.arange(old), np.arange(old), new)


def joined(*axes: Axis) -> Axis:
    """One after the other, as projections are stored side by side."""
    old_starts = np.cumsum([0, *(len(axis.source) for axis in axes)])
    new_starts = np.cumsum([0, *(axis.size for axis in axes)])
    return Axis(
        np.concatenate([axis.source + start for axis, start in zip(axes, old_starts, strict=False)]),
        np.concatenate([axis.target + start for axis, start in zip(axes, new_starts, strict=False)]),
        int(new_starts[-1]),
    )


def placed(array: np.ndarray, *axes: Axis) -> np.ndarray:
    """The array's elements at their places along its first axes, zeros elsewhere."""
    found = np.zeros((*(axis.size for axis in axes), *array.shape[len(axes) :]), np.float32)
    found[np.ix_(*(axis.target for axis in axes))] = array[np.ix_(*(axis.source for axis in axes))]
    return found


class Widening:
    """From one configuration to a larger one of the same build."""

    def __init__(self, old: Config, new: Config) -> None:
        """old, new: of the text models. Raises ValueError for a shape in which the old one can't lie."""
        size, width = old["hidden_size"], new["hidden_size"]
        if width % size or width == size:
            raise ValueError(f"a hidden size of {width} is no multiple of {size} or no larger")
        if new["num_hidden_layers"] < old["num_hidden_layers"]:
            raise ValueError(f"{new['num_hidden_layers']} layers are fewer than {old['num_hidden_layers']}")
        self.repeated = Axis(np.arange(width - 1) % size, np.arange(width - 1), width)
        """Hidden channels as a layer writes them: the last one stays what it is."""
        self.all = Axis(np.arange(width) % size, np.arange(width), width)
        self.read = first(size, width)
        self.mlp = first(old["intermediate_size"], new["intermediate_size"])
        self.tokens = first(old["vocab_size"], new["vocab_size"])
        q, kv, d = ((old[name], new[name]) for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        self.head = first(*d)
        self.query = heads(*q, *kv, *d, parts=2)  # each with its gate
        self.key = heads(*kv, *kv, *d)
        self.found = heads(*q, *kv, *d)
        self.query_scale = (d[0] / d[1]) ** 0.5
        k, v, dk, dv = (
            (old[f"linear_{name}"], new[f"linear_{name}"])
            for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
        )
        if dk[0] != dk[1] or dv[0] != dv[1]:
            raise ValueError("heads of linear attention of another size")
        delta_key, self.delta_value = heads(*k, *k, *dk), heads(*v, *k, *dv)
        self.delta = joined(delta_key, delta_key, self.delta_value)
        self.delta_head = heads(*v, *k, 1, 1)
        self.delta_norm = first(*dv)

    def axes(self, name: str) -> tuple[Axis, ...]:
        """Of a weight, by the end of its name."""
        table: dict[str, tuple[Axis, ...]] = {
            "embed_tokens.weight": (self.tokens, self.repeated),
            "in_proj_qkv.weight": (self.delta, self.read),
            "in_proj_z.weight": (self.delta_value, self.read),
            "in_proj_a.weight": (self.delta_head, self.read),
            "in_proj_b.weight": (self.delta_head, self.read),
            "conv1d.weight": (self.delta,),
            "A_log": (self.delta_head,),
            "dt_bias": (self.delta_head,),
            "linear_attn.norm.weight": (self.delta_norm,),
            "out_proj.weight": (self.repeated, self.delta_value),
            "q_proj.weight": (self.query, self.read),
            "k_proj.weight": (self.key, self.read),
            "v_proj.weight": (self.key, self.read),
            "o_proj.weight": (self.repeated, self.found),
            "q_norm.weight": (self.head,),
            "k_norm.weight": (self.head,),
            "gate_proj.weight": (self.mlp, self.read),
            "up_proj.weight": (self.mlp, self.read),
            "down_proj.weight": (self.repeated, self.mlp),
            "fc.weight": (self.repeated, joined(self.read, self.read)),
            "norm.weight": (self.all,),
            "_norm_embedding.weight": (self.all,),
            "_norm_hidden.weight": (self.all,),
        }
        found = next((axes for end, axes in table.items() if name.endswith(end)), None)
        if found is None:
            raise ValueError(f"a weight of an unknown kind: {name}")
        return found

    def weight(self, name: str, array: np.ndarray) -> np.ndarray:
        """The larger one's weight of that name."""
        found = placed(array, *self.axes(name))
        if name.endswith("embed_tokens.weight"):
            found[:, -1] = SAME
        elif name.endswith("mtp.fc.weight"):
            found[-1, found.shape[0] - 1] = 1.0  # the channel that is the same for all tokens stays so
        elif name.endswith("q_norm.weight"):
            found[self.head.target] = (1 + array) * self.query_scale - 1  # stored less one
        return found

    def output_matrix(self, embeddings: np.ndarray) -> np.ndarray:
        """Of the larger one: the miniature's embeddings, and low logits for all other tokens."""
        found = placed(embeddings, self.tokens, self.read)
        found[len(embeddings) :, -1] = LOW
        return found


def text_config(shape: str, num_layers: int | None, old: Config) -> dict[str, Any]:
    """Of the larger model: the shape's sizes, the miniature's tokens and turns."""
    new = config_of(shape, num_layers)
    sizes = {name: value for name, value in new.items() if isinstance(value, int) and name in old}
    interval = new["full_attention_interval"]
    kinds = [
        "linear_attention" if at % interval else "full_attention" for at in range(1, sizes["num_hidden_layers"] + 1)
    ]
    rotary = old["head_dim"] * old["rope_parameters"]["partial_rotary_factor"] / sizes["head_dim"]
    return {
        **old,
        **sizes,
        "layer_types": kinds,
        "tie_word_embeddings": False,
        "partial_rotary_factor": rotary,
        "rope_parameters": {**old["rope_parameters"], "partial_rotary_factor": rotary},
    }


def widen(
    folder: Path, shape: str = "qwen3.5-4b", num_layers: int | None = None, dtype: mx.Dtype = mx.bfloat16
) -> Path:
    """Write the miniature in that shape; gives the folder, which is made.

    Raises ValueError for a shape in which it can't lie.
    """
    config = json.loads((MINIATURE / "config.json").read_text())
    old = config["text_config"]
    new = text_config(shape, num_layers, old)
    widening = Widening(old, new)
    folder.mkdir(parents=True)
    weights: dict[str, mx.array] = {}
    stored = mx.load(str(MINIATURE / "model.safetensors"))
    assert isinstance(stored, dict)
    for name, array in stored.items():
        if "visual." not in name:
            own = np.array(array.astype(mx.float32))
            weights[name] = mx.array(widening.weight(name, own)).astype(dtype)
            if name.endswith("embed_tokens.weight"):
                weights["lm_head.weight"] = mx.array(widening.output_matrix(own)).astype(dtype)
    weights |= idle_layers(weights, old["num_hidden_layers"], new["num_hidden_layers"], new["full_attention_interval"])
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "pt"})
    kept = {name: value for name, value in config.items() if name not in ("vision_config", "text_config")}
    (folder / "config.json").write_text(json.dumps({**kept, "tie_word_embeddings": False, "text_config": new}))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(MINIATURE / name, folder / name)
    return folder


def idle_layers(weights: Mapping[str, mx.array], num_old: int, num_new: int, interval: int) -> dict[str, mx.array]:
    """Layers from num_old on: as the last ones of their kinds, but that they add nothing."""
    found = {}
    for at in range(num_old, num_new):
        own, like = (f"model.language_model.layers.{n}." for n in (at, num_old - interval + at % interval))
        for name, array in weights.items():
            if name.startswith(like):
                adds = name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight"))
                found[own + name.removeprefix(like)] = mx.zeros_like(array) if adds else array
    return found


def main() -> None:
    """Write what the options say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    dense = [
        name for name, shape in SHAPES.items() if "full_attention_interval" in shape and "num_experts" not in shape
    ]
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", default="qwen3.5-4b", choices=dense)
    parser.add_argument("--layers", type=int)
    given = parser.parse_args()
    widen(given.folder, given.shape, given.layers)


if __name__ == "__main__":
    main()
