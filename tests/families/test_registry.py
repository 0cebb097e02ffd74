"""Families are found by model type, and completed from the chat template."""

from __future__ import annotations

import pytest

from headrace.families.registry import FAMILIES, THINK_MARKERS, detect_reasoning_keys, explain, find_family
from headrace.tool_calls.syntaxes import SYNTAXES


def test_no_model_type_belongs_to_two_families() -> None:
    model_types = [model_type for family in FAMILIES for model_type in family.model_types]
    assert len(model_types) == len(set(model_types))


def test_every_odd_field_has_a_reason() -> None:
    for family in FAMILIES:
        odd = ("think_open", "think_variants", "single_system", "answer_frames")
        for name in (*odd, "special_markers", "thinking_off", "efforts", "overflows_float16"):
            if getattr(family, name):
                assert family.why.get(name), f"{family.name}.{name}"


def test_an_unknown_type_gets_the_generic_family() -> None:
    family = find_family("never_heard_of")
    assert (family.name, family.model_types) == ("generic", ("never_heard_of",))
    assert family.think_open is None
    assert family.keep_special_tokens == frozenset()


@pytest.mark.parametrize(("start_marker", "end_marker"), THINK_MARKERS)
def test_think_markers_are_read_from_the_template(start_marker: str, end_marker: str) -> None:
    template = "{{- '<turn>' }}{% if '" + end_marker + "' in content %}{{ '" + start_marker + "' }}{% endif %}"
    family = find_family("qwen2", template)
    assert (family.think_open, family.think_close) == (start_marker, end_marker)
    assert family.keep_special_tokens == {start_marker, end_marker}
    assert family.why["think_open"]


def test_a_template_that_only_closes_names_both_markers() -> None:
    assert find_family("llama", "{{ content.split('</think>')[-1] }}").think_open == "<think>"


def test_a_template_without_markers_means_no_thinking() -> None:
    assert find_family("qwen3", "{{ messages[0].content }}").think_close is None


def test_a_record_is_stronger_than_the_template() -> None:
    family = find_family("gpt_oss", "{{ '</think>' }}")
    assert family.think_close == "<|end|>"


@pytest.mark.parametrize(
    ("template", "key"),
    [
        ("{% if enable_thinking is defined and enable_thinking is false %}x{% endif %}", "enable_thinking"),
        ("{%- if not thinking is defined -%}x{%- endif -%}", "thinking"),
        ("{%- if thinking %}x{% endif %}", "thinking"),
        ("{%- if add_generation_prompt and thinking -%}x{%- endif -%}", "thinking"),
        ("{% if message.thinking %}{{ message['thinking'] }}{% endif %}", None),
        ("{% if thinking_budget %}x{% endif %}", None),
        ("{% if message.enable_thinking %}x{% endif %}", None),
        ("{{ '<think>' if enable_thinking else '' }}", "enable_thinking"),
        ("{{ 'Now thinking hard' }} if thinking", None),
        ("{% set thinking = message.content %}{% if thinking %}x{% endif %}", None),
        ("{% set ns = namespace(enable_thinking=true) %}{% if ns.enable_thinking %}x{% endif %}", None),
    ],
)
def test_the_thinking_switch_is_read_from_the_template(template: str, key: str | None) -> None:
    assert find_family("never_heard_of", template).thinking_key == key


def test_words_that_switch_thinking_are_read_from_a_template_without_a_variable() -> None:
    template = "{% if '/no_think' in messages[0].content %}<think></think>{% endif %}"
    family = find_family("never_heard_of", template)
    assert family.thinking_words == ("/think", "/no_think")
    assert "thinking switch: /think or /no_think in the system message: found" in "\n".join(explain(family))
    assert find_family("never_heard_of", template + "{{ enable_thinking }}").thinking_words is None


def test_a_family_may_switch_thinking_off_in_a_way_of_its_own() -> None:
    family = find_family("seed_oss", "</seed:think>")
    assert family.switches_thinking
    assert "thinking switch: off by {'thinking_budget': 0}: its template" in "\n".join(explain(family))
    assert not find_family("never_heard_of", "</think>").switches_thinking


def test_every_marker_of_harmony_survives_the_skipping_of_special_tokens() -> None:
    kept = find_family("gpt_oss").keep_special_tokens
    assert {"<|channel|>", "<|message|>", "<|start|>", "<|end|>"} <= kept


@pytest.mark.parametrize(
    ("marker", "tool_format"),
    [(f"{text} {each.also_shown_by}", each.name) for each in SYNTAXES.values() for text in each.shown_by],
)
def test_the_syntax_of_calls_is_read_from_the_template(marker: str, tool_format: str) -> None:
    family = find_family("never_heard_of", f"{{% for call in message.tool_calls %}}{{{{ '{marker}' }}}}{{% endfor %}}")
    assert family.tool_format == tool_format
    assert family.why["tool_format"] == "found in the chat template"


def test_a_syntax_that_was_asked_for_is_stronger_than_record_and_template() -> None:
    family = find_family("gpt_oss", "<tool_call>", tool_format="hermes")
    assert family.call_syntax is SYNTAXES["hermes"]
    assert "hermes: set by --tool-format" in "\n".join(explain(family))


def test_a_template_without_calls_means_that_the_prompt_has_to_ask_for_a_syntax() -> None:
    family = find_family("qwen3", "{{ messages[0].content }}")
    assert family.tool_format == "hermes"
    text = "\n".join(explain(find_family("glm4_moe", "{{ messages[0].content }}")))
    assert "tool calls: hermes: the chat template shows none" in text
    assert find_family("gemma3", "{{ messages[0].content }}").tool_format == "pythonic"
    assert find_family("gpt_oss", "{{ messages[0].content }}").tool_format == "harmony"


@pytest.mark.parametrize(
    "template",
    [
        "{% if tools %}{{ tools | tojson }}{% endif %}",
        "{%- if not tools is defined -%}{%- set tools = none -%}{%- endif -%}{{ tools | tojson }}",
        "{% if custom_tools is defined %}{% set tools = custom_tools %}{% endif %}{{ tools | tojson }}",
        "{% macro shown(tools) %}{{ tools | tojson }}{% endmacro %}",
    ],
)
@pytest.mark.parametrize("model_type", ["never_heard_of", "llama", "qwen2", "gemma3_text", "cohere", "glm4_moe"])
def test_no_syntax_is_assumed_of_a_template_that_shows_tools_and_an_unknown_one(model_type: str, template: str) -> None:
    family = find_family(model_type, template + "{{ '>>>' + call.function.name }}")
    assert family.tool_format is None
    assert "tool calls: text, no syntax is known: the chat template shows one" in "\n".join(explain(family))
    assert find_family(model_type, template, tool_format="llama_json").tool_format == "llama_json"


@pytest.mark.parametrize(
    "template",
    ["{{ messages[0].content }} You have tools.", "{% set tools = [] %}{% if tools %}{{ tools | tojson }}{% endif %}"],
)
def test_a_template_that_never_shows_tools_shows_no_unknown_syntax(template: str) -> None:
    assert find_family("never_heard_of", template).tool_format == "hermes"


def test_harmony_needs_nothing_of_a_template_that_shows_tools() -> None:
    assert find_family("gpt_oss", "{{ tools | tojson }}").tool_format == "harmony"


def test_an_element_of_its_own_names_the_function_or_a_wrapper_is_around_it() -> None:
    element = "{{ tools }} {{ '<function=' + call.name + '>' + call.arguments | tojson + '</function>' }}"
    assert find_family("llama", element).tool_format == "functionary"
    assert find_family("llama", "<tool_call>" + element).tool_format == "qwen_xml"


def test_a_template_that_asks_for_a_list_wins_over_its_line_about_the_environment() -> None:
    asked = "{{ tools }} Environment: ipython. Respond as [func_name1(params_name1=params_value1), func_name2(params)]"
    assert find_family("llama", asked).tool_format == "pythonic"


def test_a_record_names_a_syntax_and_what_the_template_shows_is_stronger() -> None:
    assert find_family("qwen3_moe").tool_format == "hermes"
    assert find_family("qwen3_moe", "<tool_call> <function=").tool_format == "qwen_xml"
    assert "tool calls: text, no syntax is known" in "\n".join(explain(find_family("never_heard_of")))
    assert all(family.tool_format is not None for family in FAMILIES)


@pytest.mark.parametrize(
    ("template", "keys"),
    [
        ("{{ message.reasoning_content }}", ("reasoning_content",)),
        ("{% if 'thinking' in message %}{{ message['thinking'] }}{% endif %}", ("thinking",)),
        ("{{ m.reasoning or m.reasoning_content }}", ("reasoning_content", "reasoning")),
        ("{{ message.get('thinking') }}", ("thinking",)),
        ("{% if thinking %}<think>{% endif %}{{ message.content }}", ("reasoning_content",)),
    ],
)
def test_the_field_of_thoughts_is_read_from_the_template(template: str, keys: tuple[str, ...]) -> None:
    assert detect_reasoning_keys(template) == keys


def test_explain_names_each_choice_and_its_reason() -> None:
    text = "\n".join(explain(find_family("qwen3_5", "{% if enable_thinking %}</think>{% endif %}")))
    for part in ("qwen3.5", "'<think>'", "'</think>'", "enable_thinking", "found in the chat template", "raises on"):
        assert part in text
    assert "thinking: none" in "\n".join(explain(find_family("llama", "")))
