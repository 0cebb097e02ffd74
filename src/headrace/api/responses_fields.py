"""Known but unsupported fields of /v1/responses, in bodies and in the items and tools inside them."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.api.openai_fields import FieldRules
from headrace.errors import HeadraceError

RESPONSES_FIELDS = FieldRules(
    {
        "background": (False,),
        "chat_template_kwargs": ({},),
        "context_management": ([],),
        "conversation": (),
        "enable_thinking": (),
        "grammar": ("",),
        "guided_choice": (),
        "guided_grammar": (),
        "guided_json": (),
        "guided_regex": (),
        "messages": (),
        "moderation": (),
        "prompt": (),
        "response_format": (),
        "structured_outputs": (),
    },
    frozenset(
        {
            "client_metadata",
            "max_tool_calls",
            "metadata",
            "prompt_cache_options",
            "prompt_cache_retention",
            "safety_identifier",
            "service_tier",
            "truncation",
        }
    ),
)

ITEM_FIELDS_WITHOUT_EFFECT = frozenset(
    {
        "annotations",
        "async",
        "caller",
        "created_by",
        "execution",
        "id",
        "internal_chat_message_metadata_passthrough",
        "metadata",
        "phase",
        "status",
    }
)
"""Of input items: ids that are never looked up, and metadata about who wrote an item and when."""

TOOL_FIELDS_WITHOUT_EFFECT = frozenset({"allowed_callers", "async", "defer_loading", "output_schema"})
"""Of functions and custom tools: every tool is shown to the model, and its result may be any text."""

# The session's errors name a chat's fields.
_PARAMS: Mapping[str, str] = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "reasoning_effort": "reasoning.effort",
    "thinking_budget": "thinking_token_budget",
}


def name_own_field(error: HeadraceError) -> None:
    """Rename a chat's field in an error to this API's."""
    head, dot, rest = (error.param or "").partition(".")
    if head in _PARAMS:
        error.param = _PARAMS[head] + dot + rest
