"""Chat fields that are known and not honoured: what each may hold without changing the answer.

A field in NEUTRAL_VALUES with any other value is refused with its name. A field in WITHOUT_EFFECT is accepted
whatever it holds. All other fields that no body declares are accepted and reported as ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.errors import UnsupportedField

NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    # OpenAI's own fields. `null` is neutral everywhere.
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "n": (1,),
    "audio": (),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "web_search_options": (),
    # Fields that other servers of open models take.
    "add_special_tokens": (False,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "documents": ([],),
    "dry_multiplier": (0,),
    "echo": (False,),
    "grammar": ("",),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "json_schema": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "min_tokens": (0,),
    "mirostat": (0,),
    "mm_processor_kwargs": ({},),
    "priority": (0,),
    "prompt_logprobs": (),
    "repeat_penalty": (1,),
    "repetition_penalty": (1,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "xtc_probability": (0,),
}

WITHOUT_EFFECT = frozenset(
    {
        "metadata",
        # Without tools there are no calls that could be parallel.
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
        # A wish that no open model's template reads.
        "verbosity",
    }
)


def refuse_unbuilt(body: Mapping[str, Any]) -> None:
    """Raises UnsupportedField for the first field that would change the answer and can't be honoured."""
    for name, neutrals in NEUTRAL_VALUES.items():
        value = body.get(name)
        if value is not None and not any(_same(value, neutral) for neutral in neutrals):
            raise UnsupportedField(f"{name} is not supported with this value", param=name)


def unknown_fields(body: Mapping[str, Any], declared: Mapping[str, Any]) -> tuple[str, ...]:
    """Names in a body that nobody knows, sorted."""
    return tuple(sorted(body.keys() - declared.keys() - NEUTRAL_VALUES.keys() - WITHOUT_EFFECT))


def _same(value: object, neutral: object) -> bool:
    # In Python True equals 1 and False equals 0; in a request they are different things.
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral
