"""What llama.cpp's server adds to OpenAI's API, for its web page and clients: timings, prompt progress, `GET /props`.

Fields and their meaning: https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md. A field that would
not be true here is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.api.openai_sampling import ALL_TOKENS
from headrace.types.chat import GenerationOptions
from headrace.types.events import PrefillProgress, Usage
from headrace.types.model import ModelDescription, ModelOutline


def timings_body(usage: Usage) -> dict[str, Any]:
    """Counts and speeds of a request so far, over all of its choices. A speed without time or tokens is 0."""
    num_computed = usage.num_prompt_tokens - usage.num_cached_tokens
    drafts = {"draft_n": usage.num_drafted_tokens, "draft_n_accepted": usage.num_accepted_tokens}
    return {
        "cache_n": usage.num_cached_tokens,
        **_speed("prompt", num_computed, usage.prompt_s),
        **_speed("predicted", usage.num_output_tokens, usage.output_s),
        **(drafts if usage.num_drafted_tokens else {}),
    }


def _speed(name: str, num_tokens: int, seconds: float) -> dict[str, Any]:
    return {
        f"{name}_n": num_tokens,
        f"{name}_ms": seconds * 1000,
        f"{name}_per_token_ms": seconds * 1000 / num_tokens if num_tokens else 0.0,
        f"{name}_per_second": num_tokens / seconds if seconds else 0.0,
    }


def progress_body(progress: PrefillProgress) -> dict[str, int]:
    return {
        "total": progress.num_prompt_tokens,
        "cache": progress.num_cached_tokens,
        "processed": progress.num_processed_tokens,
        "time_ms": int(progress.seconds * 1000),
    }


# Samplers that are not implemented are off.
_NEUTRAL_PARAMS: Mapping[str, Any] = {
    "dynatemp_range": 0.0,
    "typical_p": 1.0,
    "typ_p": 1.0,
    "xtc_probability": 0.0,
    "dry_multiplier": 0.0,
    "mirostat": 0,
    "stop": [],
    "ignore_eos": False,
    "timings_per_token": False,
}


def props_body(
    model: ModelDescription,
    defaults: GenerationOptions,
    special_tokens: Mapping[str, str],
    chat_template: str | None,
    *,
    alias: str,
    max_num_seqs: int,
    version: str,
) -> dict[str, Any]:
    """special_tokens: texts by name (`bos_token`, ...). alias: the first served name."""
    return {
        **_props_of_any(model.max_model_len, _default_params(defaults), alias, version, sees=model.takes_media),
        "total_slots": max_num_seqs,
        # llama.cpp's page shows the last part as the model's name; the hub's cache names folders by commits.
        "model_path": model.name,
        "chat_template": chat_template or "",
        "bos_token": special_tokens.get("bos_token", ""),
        "eos_token": special_tokens.get("eos_token", ""),
        "is_sleeping": False,
    }


def sleeping_props(outline: ModelOutline, *, alias: str, version: str) -> dict[str, Any]:
    """The same of a model that is not loaded, as far as it is known."""
    return {
        **_props_of_any(outline.max_model_len or 0, {}, alias, version, sees="image" in outline.inputs),
        "total_slots": 0,
        "model_path": alias,
        **dict.fromkeys(("chat_template", "bos_token", "eos_token"), ""),
        "is_sleeping": True,
    }


def _props_of_any(context: int, params: dict[str, Any], alias: str, version: str, *, sees: bool) -> dict[str, Any]:
    return {
        "default_generation_settings": {"n_ctx": context, "params": params},
        "model_alias": alias,
        "modalities": {"vision": sees, "audio": False},
        "endpoint_slots": False,
        "endpoint_props": False,
        "endpoint_metrics": True,
        "build_info": f"headrace {version}",
    }


def _default_params(defaults: GenerationOptions) -> dict[str, Any]:
    sampling = defaults.sampling
    max_tokens = ALL_TOKENS if defaults.max_tokens is None else defaults.max_tokens
    # llama.cpp's penalty covers the last 64 tokens, ours all of them.
    is_without_penalty = sampling.repetition_penalty == 1
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        **({"repeat_penalty": 1.0} if is_without_penalty else {}),
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "max_tokens": max_tokens,
        "n_predict": max_tokens,
        **_NEUTRAL_PARAMS,
    }
