"""Known but unsupported fields, and the values that they may have without changing the answer.

A field in `neutral_values` with any other value is refused by name. A field in `without_effect` is accepted with any
value. All other undeclared fields are accepted and reported as ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_json

from headrace.errors import UnsupportedField


@dataclass(frozen=True, slots=True)
class FieldRules:
    """Known fields of one route beside those that its body declares. `null` is always neutral."""

    neutral_values: Mapping[str, tuple[Any, ...]]
    without_effect: frozenset[str]


# Fields of OpenAI and other open-model servers, on either route.
_NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "dry_multiplier": (0,),
    "grammar": ("",),
    "include_stop_str_in_output": (False,),
    "json_schema": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "mirostat": (0,),
    "repeat_penalty": (1,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "xtc_probability": (0,),
}

# Structured output, which chats support.
_STRUCTURE: Mapping[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "structured_outputs": (),
}

_WITHOUT_EFFECT = frozenset(
    {
        "metadata",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
    }
)

CHAT_FIELDS = FieldRules(
    {
        **_NEUTRAL_VALUES,
        "functions": ([],),
        "function_call": ("none", "auto"),
        "add_special_tokens": (False,),
        "audio": (),
        "best_of": (1,),
        "chat_template": (),
        "documents": ([],),
        "echo": (False,),
        "mm_processor_kwargs": ({},),
        "modalities": (["text"],),
        "moderation": (),
        "prediction": (),
        "web_search_options": (),
    },
    # No open model's template reads verbosity.
    _WITHOUT_EFFECT | {"verbosity"},
)

COMPLETION_FIELDS = FieldRules(
    {**_NEUTRAL_VALUES, **_STRUCTURE, "add_special_tokens": (True,), "prompt_embeds": (), "suffix": ("",)},
    _WITHOUT_EFFECT,
)

TOKENIZE_FIELDS = FieldRules(
    {
        "chat_template": (),
        "documents": ([],),
        "mm_processor_kwargs": ({},),
        "return_token_strs": (False,),
    },
    frozenset(),
)

DETOKENIZE_FIELDS = FieldRules({}, frozenset())


def refuse_unbuilt(body: Mapping[str, Any], rules: FieldRules) -> None:
    """Raise UnsupportedField for the first field that would change the answer and is not supported."""
    for name, neutrals in rules.neutral_values.items():
        value = body.get(name)
        if value is not None and not any(_same(value, neutral) for neutral in neutrals):
            accepted = " or ".join(to_json(neutral).decode() for neutral in neutrals)
            rest = f": only {accepted} is accepted" if neutrals else ""
            raise UnsupportedField(f"{name} is not supported{rest}", param=name)


def unknown_fields(body: Mapping[str, Any], declared: Mapping[str, Any], rules: FieldRules) -> tuple[str, ...]:
    """Unknown field names in a body, sorted."""
    return tuple(sorted(body.keys() - declared.keys() - rules.neutral_values.keys() - rules.without_effect))


def unknown_inner_fields(body: Mapping[str, Any], objects: Mapping[str, type[BaseModel]]) -> tuple[str, ...]:
    """Unknown field names inside a validated body's objects, as `object.name`, sorted."""
    found = []
    for outer, declared in objects.items():
        known = {field.alias or name for name, field in declared.model_fields.items()}
        found += [f"{outer}.{name}" for name in (body.get(outer) or {}).keys() - known]
    return tuple(sorted(found))


def _same(value: object, neutral: object) -> bool:
    # In Python True == 1 and False == 0; in JSON they differ.
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral
