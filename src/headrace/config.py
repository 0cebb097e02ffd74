"""Every knob, once. CLI flags and environment names are generated from these fields (`config_loading.py`).

A field's metadata holds `help` (one sentence, shown by --help) and, where it matters, `metavar` and
`choices`. A value that isn't among its `choices` is refused, and a number below `minimum` or above `maximum`, and any
where the field that it `needs` is not set.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.knobs import Knob, knob, knobs_of
from headrace.tool_calls.syntaxes import SYNTAXES

DEFAULT_MODEL = "miniature"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The weights and their precision."""

    dtype: str = knob(
        "auto",
        "precision of the weights; auto is float32 on a CPU (4-bit weights too, where memory allows), "
        "as stored elsewhere",
        choices=("auto", "float32", "bfloat16", "float16", "stored"),
    )
    numerics: str = knob(
        "fast",
        "exact: the stock BLAS and reference kernels, slow; bit-equal to mlx-lm token by token on a CPU under Linux. "
        "invariant, on NVIDIA GPUs: answers depend on no other request and no cache; prompts take longer",
        choices=("fast", "exact", "invariant"),
    )
    tool_format: str = knob(
        "auto",
        "syntax in which the model writes tool calls; auto takes the family's, or what the chat template shows",
        choices=("auto", *sorted(SYNTAXES)),
    )
    vision: str = knob(
        "auto",
        "auto accepts images and videos if the model has a vision tower, off leaves it out. A model whose tower "
        "only mlx-vlm supports runs whole, a row at a time, with auto; with off its text part runs in packed steps",
        choices=("auto", "off"),
    )
    adapter: tuple[str, ...] = knob(
        (),
        "LoRA or DoRA adapter, of mlx-lm or PEFT, that is served as a model of that name, repeatable",
        metavar="NAME=FOLDER",
    )
    quantize: str | None = knob(
        None,
        "quantise the weights of a model in full precision when it is loaded: to 4 or 8 bits in groups of 64, or to "
        "mxfp4; with --cache-dir the result is kept, within its quota, for later starts",
        choices=("4", "8", "mxfp4"),
    )
    self_check: bool = knob(True, "compare the packed model with the untouched one before serving")
    idle_unload: float | None = knob(
        None,
        "seconds without a request after which a model is unloaded; the next request loads it; automatic: never",
        metavar="S",
        minimum=0.1,
    )
    model_folder: str = knob("~/.cache/headrace", "folder for models that Headrace downloads itself", metavar="FOLDER")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits and features of the engine. `None`: chosen from the model and the machine."""

    max_num_seqs: int = knob(32, "sequences that decode at the same time", metavar="N", minimum=1)
    max_model_len: int | None = knob(
        None, "context in tokens, prompt and answer together; automatic: the model's own", metavar="N", minimum=2
    )
    prefill_chunk: int | None = knob(
        None, "prompt tokens computed per step; automatic: 256 on a CPU, 2048 on a GPU", metavar="N", minimum=1
    )
    kv_bits: int | None = knob(
        None,
        "keep keys and values of full attention in 8 or 4 bits: longer contexts in less memory, another output; "
        "automatic: exact",
        choices=(8, 4),
    )
    prefix_cache: str = knob(
        "on",
        "keep the state of computed prompts, so that the next turn only computes what is new",
        choices=("on", "off"),
    )
    history: str = knob(
        "stable",
        "how earlier answers are rendered: stable keeps one form, so that cached prefixes stay valid; template follows "
        "the chat template",
        choices=("stable", "template"),
    )
    system_notes: str = knob(
        "stable",
        "where a system message in mid-conversation goes if the chat template takes only one at the top: stable leaves "
        "it in its place as a marked note of the user's side, hoist moves it to the top",
        choices=("stable", "hoist"),
    )
    cache_dir: str | None = knob(
        None, "folder for a prefix cache on disk, which survives restarts; models may share it", metavar="FOLDER"
    )
    cache_disk_quota: int = knob(
        20_000_000_000, "limit of --cache-dir over all models", metavar="BYTES", minimum=1, needs="cache_dir"
    )
    mtp: str = knob(
        "auto",
        "speculative decoding with the model's own prediction head: auto if it has one; the output is the same",
        choices=("auto", "on", "off"),
    )
    draft_model: str | None = knob(
        None,
        "small model with the same tokens that drafts instead of a prediction head (speculative decoding); the output "
        "is the same",
        metavar="MODEL",
    )
    max_draft_tokens: int = knob(4, "draft tokens at once, 0 for none", metavar="N", minimum=0, maximum=16)
    sparse_draft: str | None = knob(
        None,
        "small draft model with the same tokens that scores long prompts, so that only their important tokens are "
        "computed (sparse prefill)",
        metavar="MODEL",
    )
    sparse_threshold: int = knob(
        8192, "prompts with fewer uncached tokens are computed in full", metavar="N", minimum=1, needs="sparse_draft"
    )
    sparse_keep: float = knob(
        0.2,
        "share of a long prompt's uncached tokens that is computed with --sparse-draft",
        metavar="SHARE",
        minimum=0.01,
        maximum=1.0,
        needs="sparse_draft",
    )
    gpu_memory_utilization: float | None = knob(
        None,
        "share of the memory for weights and states, on a CPU too; automatic: 0.9, on a Mac 0.85 of what its GPU may "
        "hold",
        metavar="SHARE",
        minimum=0.01,
        maximum=1.0,
    )
    wired: str = knob(
        "weights", "what a Mac with macOS 15 or later keeps resident for its GPU", choices=("off", "weights", "all")
    )
    max_queue: int | None = knob(
        None, "requests that may wait, further ones get 429; automatic: any number", metavar="N", minimum=0
    )


@dataclass(frozen=True, slots=True)
class ServerConfig:
    host: str = knob("127.0.0.1", "address to listen on; a public one needs --api-key", metavar="ADDRESS")
    port: int = knob(8080, "port to listen on, 0 for any free one", metavar="N", minimum=0, maximum=65535)
    api_key: str | None = knob(None, "key that clients must send as a Bearer token", metavar="KEY", secret=True)
    open_metrics: bool = knob(False, "answer /metrics and /v1/loads without the key, which gateways do not send there")
    served_model_name: tuple[str, ...] = knob(
        (), "name to answer under, repeatable, of the only model; automatic: the model's own", metavar="NAME"
    )
    owned_by: str = knob(
        "headrace",
        "owner of the models in /v1/models, by which some gateways tell the kind of a server: vllm, for one",
        metavar="NAME",
    )
    adapter_dir: str | None = knob(
        None,
        "folder whose adapters clients may load while serving, with POST /v1/load_lora_adapter",
        metavar="FOLDER",
    )
    models_dir: str | None = knob(None, "folder of which each subfolder that is a model is served", metavar="FOLDER")
    models_file: str | None = knob(
        None, "TOML file with models to serve, in which all options can be set, also for each model", metavar="FILE"
    )
    keep: tuple[str, ...] = knob(
        (), "model to load at the start and never to unload for another, repeatable", metavar="NAME"
    )
    any_model_name: bool = knob(False, "serve requests for unknown model names with the first model")
    strict_model_name: bool | None = knob(
        None, "old name of the opposite of --any-model-name, which is now automatic; gone in the next version"
    )
    allowed_origin: tuple[str, ...] = knob((), "browser origin that may call the server, repeatable", metavar="URL")
    page: str = knob("on", "serve a page at / to chat and to watch the engine", choices=("on", "off"))
    max_body_bytes: int = knob(64 * 1024 * 1024, "largest request body", metavar="BYTES", minimum=1)
    stored_response_bytes: int = knob(
        64 * 1024 * 1024,
        "memory for finished responses that later requests may continue, counted as JSON; 0 keeps none",
        metavar="BYTES",
        minimum=0,
    )
    ping_interval_s: float = knob(
        8.0, "seconds between keep-alives while a prompt is computed", metavar="S", minimum=0.01
    )
    drain_seconds: float = knob(
        5.0,
        "seconds for requests to finish after SIGINT or SIGTERM; the process ends at most 5 seconds later",
        metavar="S",
        minimum=0.0,
    )
    handover: str | None = knob(
        None,
        "another server of OpenAI's or Anthropic's API, with or without /v1, which answers requests that are too much "
        "for this one",
        metavar="URL",
    )
    handover_tokens: int | None = knob(
        None,
        "hand over requests with a prompt of more tokens than this that are not cached",
        metavar="N",
        minimum=0,
        needs="handover",
    )
    handover_wait: float | None = knob(
        None,
        "hand over requests whose first token others would delay by more than this, as far as that can be estimated, "
        "or whose model takes longer to be loaded",
        metavar="SECONDS",
        minimum=0.0,
        needs="handover",
    )
    handover_model: str | None = knob(
        None, "model name for that server instead of the request's own", metavar="NAME", needs="handover"
    )
    handover_key_env: str | None = knob(
        None, "environment variable that holds that server's API key", metavar="VARIABLE", needs="handover"
    )
    reasoning_field: str = knob(
        "reasoning_content", "name of the thinking text in chat answers", choices=("reasoning_content", "reasoning")
    )
    otel: bool = knob(
        False, "send a span of each request to the OpenTelemetry collector that the OTEL_* variables name"
    )
    log_format: str = knob("text", "how log lines are written", choices=("text", "json"))
    log_level: str = knob(
        "info",
        "what is logged: info has a line for each request, but for successful polls of /health, /metrics, /v1/loads "
        "and /v1/status, which debug adds",
        choices=("debug", "info", "warning", "error"),
    )
    verbose: bool = knob(False, "print at start-up how each part of the model runs, as `headrace doctor MODEL` does")

    @property
    def takes_any_name(self) -> bool:
        return self.any_model_name or self.strict_model_name is False

    @property
    def needs_name(self) -> bool:
        return bool(self.strict_model_name)


@dataclass(frozen=True, slots=True)
class SplitConfig:
    """The processes that share one model."""

    ranks: str | None = knob(
        None,
        "split the model over several devices: a number of processes on this host, or a JSON file of hosts as for "
        "mlx.launch",
        metavar="N|FILE",
    )
    ranks_backend: str = knob(
        "auto",
        "what connects the ranks; auto is nccl on NVIDIA GPUs, ring elsewhere; jaccl is untested",
        choices=("auto", "ring", "nccl", "jaccl"),
        needs="ranks",
    )


@dataclass(frozen=True, slots=True)
class DefaultsConfig:
    """Defaults of requests. `None` leaves it to the model's generation_config.json."""

    default_temperature: float | None = knob(
        None, "temperature of requests without one; automatic: the model's", metavar="T", minimum=0.0, maximum=2.0
    )
    default_top_p: float | None = knob(
        None, "top_p of requests without one; automatic: the model's", metavar="P", minimum=0.000001, maximum=1.0
    )
    default_top_k: int | None = knob(
        None, "top_k of requests without one, 0 for off; automatic: the model's", metavar="N", minimum=0
    )
    default_min_p: float | None = knob(
        None, "min_p of requests without one; automatic: the model's", metavar="P", minimum=0.0, maximum=1.0
    )
    default_repetition_penalty: float | None = knob(
        None,
        "repetition_penalty of requests without one; automatic: the model's",
        metavar="X",
        minimum=0.01,
        maximum=100,
    )
    default_max_tokens: int | None = knob(
        None,
        "most tokens of a chat's answer if its request sets no limit; "
        "automatic: the model's own, else a quarter of the context, at least 4096 and at most 32768",
        metavar="N",
        minimum=1,
    )


@dataclass(frozen=True, slots=True)
class MediaConfig:
    """Which images and videos a request may name, and how large they may be."""

    media_hosts: tuple[str, ...] = knob(
        (),
        "host that image and video URLs may name, repeatable: example.org, *.example.org, example.org:8443, or * for "
        "any on the public internet",
        metavar="HOST",
    )
    media_root: str | None = knob(None, "folder whose files requests may name", metavar="FOLDER")
    media_max_bytes: int = knob(64 * 1024 * 1024, "largest image or video file", metavar="BYTES", minimum=1)
    media_timeout_s: float = knob(
        20.0, "seconds that an image or a video may take to arrive", metavar="S", minimum=0.01
    )
    image_max_pixels: int = knob(
        89_000_000, "largest image, and largest frame of a video, as stored", metavar="N", minimum=1, maximum=89_000_000
    )
    video_fps: float | None = knob(
        None, "frames sampled per second of a video; automatic: the model's own", metavar="FPS", minimum=0.01
    )
    video_max_frames: int = knob(768, "most frames sampled from a video", metavar="N", minimum=2)
    video_max_s: float = knob(1800.0, "longest video", metavar="S", minimum=0.01)


@dataclass(frozen=True, slots=True)
class ChatConfig:
    """The server that `headrace chat` and `headrace launch` use instead of a model, or of starting one."""

    url: str | None = knob(
        None,
        "server that speaks OpenAI's API, instead of one of this command's; name a model only if it serves several",
        metavar="URL",
    )
    url_key: str | None = knob(None, "API key of that server", metavar="KEY", needs="url")


@dataclass(frozen=True, slots=True)
class DoctorConfig:
    report: str | None = knob(None, "measure for minutes; write numbers, and no names, to FILE", metavar="FILE")


@dataclass(frozen=True, slots=True)
class ReplicasConfig:
    """The replicas of `headrace ray serve`."""

    replicas: int = knob(1, "replicas of the server", metavar="N", minimum=1)
    min_replicas: int | None = knob(
        None, "fewest replicas if their number follows the load", metavar="N", minimum=1, needs="max_replicas"
    )
    max_replicas: int | None = knob(
        None,
        "most replicas: Ray adds one when requests wait, and ends it when they don't; automatic: always --replicas",
        metavar="N",
        minimum=1,
    )
    num_gpus_per_replica: int | None = knob(
        None, "GPUs of each replica; automatic: 1 where Ray finds any, else 0", metavar="N", minimum=0
    )
    ray_address: str | None = knob(
        None, "Ray cluster to use, like auto or 10.0.0.1:6379; automatic: a new one on this machine", metavar="ADDRESS"
    )


@dataclass(frozen=True, slots=True)
class Config:
    model: str = DEFAULT_MODEL
    models: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    server: ServerConfig = ServerConfig()
    split: SplitConfig = SplitConfig()
    media: MediaConfig = MediaConfig()
    defaults: DefaultsConfig = DefaultsConfig()
    chat: ChatConfig = ChatConfig()
    doctor: DoctorConfig = DoctorConfig()
    replicas: ReplicasConfig = ReplicasConfig()


SECTIONS: Mapping[str, type] = {
    "models": ModelConfig,
    "engine": EngineConfig,
    "server": ServerConfig,
    "split": SplitConfig,
    "media": MediaConfig,
    "defaults": DefaultsConfig,
    "chat": ChatConfig,
    "doctor": DoctorConfig,
    "replicas": ReplicasConfig,
}

SERVED = ("models", "engine", "server", "split", "media", "defaults")


def served_knobs() -> tuple[Knob, ...]:
    """Those of `headrace serve`."""
    return tuple(each for section in SERVED for each in knobs_of(SECTIONS[section]))


def all_knobs() -> tuple[Knob, ...]:
    return tuple(each for section in SECTIONS.values() for each in knobs_of(section))
