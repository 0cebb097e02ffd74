"""Every knob, once. CLI flags and environment names are generated from these fields.

A field's metadata holds `help` (one sentence, shown by --help) and, where it matters, `metavar` and
`choices`. `--max-num-seqs` and `HEADRACE_MAX_NUM_SEQS` both set `EngineConfig.max_num_seqs`; a flag wins
over the environment, which wins over the default. No other file reads the environment.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def knob(default: Any, help: str, **metadata: Any) -> Any:
    """A dataclass field with its help text."""
    return field(default=default, metadata={"help": help, **metadata})


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which weights, and how they are held and computed."""

    dtype: str = knob(
        "auto",
        "precision of the weights; auto is float32 on a CPU (4-bit weights too, where memory allows), as stored elsewhere",
        choices=("auto", "float32", "bfloat16", "float16", "stored"),
    )
    numerics: str = knob(
        "fast",
        "exact computes with the stock BLAS and the reference kernels: bit-equal to mlx-lm token by token, and slow",
        choices=("fast", "exact"),
    )
    self_check: bool = knob(True, "compare the packed model with the untouched one before serving")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How much runs at once. `None` means that a value is chosen from the model and the machine."""

    max_num_seqs: int = knob(32, "sequences that decode at the same time", metavar="N")
    max_model_len: int | None = knob(
        None, "context in tokens, prompt and answer together; automatic: the model's own", metavar="N"
    )
    prefill_chunk: int | None = knob(
        None, "prompt tokens computed per step; automatic: 512 on a CPU, 2048 on a GPU", metavar="N"
    )


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """How the server is reached."""

    host: str = knob("127.0.0.1", "address to listen on; a public one needs --api-key", metavar="ADDRESS")
    port: int = knob(8080, "port to listen on", metavar="N")
    api_key: str | None = knob(None, "key that clients must send as a Bearer token", metavar="KEY")
    served_model_name: tuple[str, ...] = knob(
        (), "name to answer under, repeatable; automatic: the model's own", metavar="NAME"
    )
    strict_model_name: bool = knob(False, "refuse requests for any other model name")
    allowed_origin: tuple[str, ...] = knob((), "browser origin that may call the server, repeatable", metavar="URL")
    max_body_bytes: int = knob(64 * 1024 * 1024, "largest request body", metavar="BYTES")
    ping_interval_s: float = knob(8.0, "seconds between signs of life while a prompt is computed", metavar="S")
    reasoning_field: str = knob(
        "reasoning_content",
        "name of the thinking text in chat answers",
        choices=("reasoning_content", "reasoning"),
    )


@dataclass(frozen=True, slots=True)
class Config:
    """All of it."""

    model: str = "smollm2"
    models: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    server: ServerConfig = ServerConfig()
