"""When several devices pay for one model: `python -m benchmarks.ranks_table` writes the tables of docs/scale.md.

Bytes are counted of mlx-lm's models of the published shapes, split as `--ranks` splits them, without weights. Times are
what memory and links take at least: weights once for a token, and the collectives one after another.
`--link NAME:MICROSECONDS:GB_PER_S` adds a link of which `headrace doctor --ranks` has measured these two.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from benchmarks.shapes import SHAPES, planned_model, weight_bytes
from headrace.errors import ModelError
from headrace.models.collectives import AbsentGroup, Collective, collectives_of
from headrace.models.sharding import split
from headrace.models.source import ModelFiles

NUM_RANKS = (2, 4)

LLAMA_70B: Mapping[str, Any] = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
GPT_OSS_120B: Mapping[str, Any] = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 128,
    "num_experts": 128,
    "num_experts_per_tok": 4,
    "vocab_size": 201088,
    "sliding_window": 128,
    "tie_word_embeddings": False,
}
"""config.json of meta-llama/Llama-3.3-70B-Instruct and of openai/gpt-oss-120b, as far as mlx-lm reads them."""

MODELS: Mapping[str, Mapping[str, Any]] = {
    "Qwen3-4B": SHAPES["qwen3-4b"],
    "Qwen3.5-4B": SHAPES["qwen3.5-4b"],
    "Qwen3.5-35B-A3B": SHAPES["qwen3.5-35b-a3b"],
    "Llama-3.3-70B": LLAMA_70B,
    "gpt-oss-120b": GPT_OSS_120B,
}


@dataclass(frozen=True, slots=True)
class Link:
    """hop_s: from one rank to the next, application to application. bytes_per_s: in one direction.

    is_ring: a sum takes two rounds of a ring; otherwise ranks send to all others at once, in one hop.
    memory: of the device at its ends, in bytes a second.
    """

    name: str
    hop_s: float
    bytes_per_s: float
    memory: float
    is_ring: bool = True

    def seconds(self, collective: Collective, num_ranks: int) -> float:
        """A ring sends each part of a sum to all others: 2 (N - 1) hops of 1/N of the bytes, and half of it for a
        gather, whose every part is a whole array."""
        hops = (2 if collective.kind == "sum" else 1) * (num_ranks - 1)
        part = collective.num_bytes / (num_ranks if collective.kind == "sum" else 1)
        return (hops if self.is_ring else 1) * self.hop_s + hops * part / self.bytes_per_s


M3_ULTRA, H200 = 819e9, 4.8e12

LINKS = (
    Link("1 GbE", 75e-6, 125e6, M3_ULTRA),
    Link("10 GbE", 20e-6, 1.25e9, M3_ULTRA),
    Link("Thunderbolt 4, TCP", 300e-6, 16.4e9 / 8, M3_ULTRA),
    Link("Thunderbolt 5, TCP", 150e-6, 80e9 / 8, M3_ULTRA),
    Link("Thunderbolt 5, JACCL", 30e-6, 6.3e9, M3_ULTRA, is_ring=False),
    Link("NVLink, NCCL", 35e-6, 214e9, H200, is_ring=False),
)


@dataclass(frozen=True, slots=True)
class Shape:
    """What a token takes: bytes of weights that each rank reads, by the number of ranks, and its collectives.

    Numbers of ranks over which the model can't be split are left out.
    """

    name: str
    read_bytes: Mapping[int, int]
    collectives: Mapping[int, Sequence[Collective]]

    def seconds(self, num_ranks: int, link: Link) -> float:
        sums = sum(link.seconds(each, num_ranks) for each in self.collectives[num_ranks])
        return self.read_bytes[num_ranks] / link.memory + sums


def shape(name: str) -> Shape:
    read_bytes, collectives = {}, {}
    files = ModelFiles(name, Path(), MODELS[name], MODELS[name], {})
    for num_ranks in (1, *NUM_RANKS):
        model = quantised(name)
        if num_ranks > 1:
            try:
                split(model, files, cast(mx.distributed.Group, AbsentGroup(num_ranks)))
            except ModelError:
                continue
            collectives[num_ranks] = collectives_of(model)
        read_bytes[num_ranks] = weight_bytes(model, MODELS[name], 1)
    return Shape(name, read_bytes, collectives)


def quantised(name: str) -> Any:
    """In 4 bits, in groups of 64; gpt-oss as it is published, its experts in MXFP4 and the rest in bfloat16."""
    if name != "gpt-oss-120b":
        return planned_model(MODELS[name], bits=4)
    model = planned_model(MODELS[name])
    nn.quantize(
        model, 32, 4, mode="mxfp4", class_predicate=lambda path, _: path.endswith("_proj") and ".experts." in path
    )
    return model


def bytes_table(shapes: Sequence[Shape]) -> Iterator[str]:
    yield "| model | one device reads | each of 2 | each of 4 | sums | bytes of each |"
    yield "|---|---|---|---|---|---|"
    for each in shapes:
        numbers = (each.read_bytes.get(number) for number in (1, *NUM_RANKS))
        read = " | ".join("–" if number is None else f"{number / 1e9:.2f} GB" for number in numbers)
        sums = [one for one in each.collectives[2] if one.kind == "sum"]
        yield f"| {each.name} | {read} | {len(sums)} | {sums[0].num_bytes:,} |"


def speed_table(shapes: Sequence[Shape], links: Sequence[Link] = LINKS) -> Iterator[str]:
    """Tokens a second of one stream with several devices, over those of one."""
    yield f"| model | devices | {' | '.join(link.name for link in links)} |"
    yield "|---" * (2 + len(links)) + "|"
    for each in shapes:
        for num_ranks in each.collectives:
            times = [each.read_bytes[1] / link.memory / each.seconds(num_ranks, link) for link in links]
            yield f"| {each.name} | {num_ranks} | {' | '.join(f'{one:.2f} ×' for one in times)} |"


def tables(links: Sequence[Link] = LINKS) -> str:
    shapes = [shape(name) for name in MODELS]
    return "\n".join((*bytes_table(shapes), "", *speed_table(shapes, links))) + "\n"


def _link(text: str) -> Link:
    name, microseconds, gigabytes = text.split(":")
    return Link(name, float(microseconds) * 1e-6, float(gigabytes) * 1e9, M3_ULTRA, is_ring=False)


def main() -> None:
    parser = argparse.ArgumentParser(description="Tell when several devices pay for one model.")
    parser.add_argument("--link", type=_link, action="append", default=[], metavar="NAME:MICROSECONDS:GB_PER_S")
    print(tables((*LINKS, *parser.parse_args().link)), end="")


if __name__ == "__main__":
    main()
