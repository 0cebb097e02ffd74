"""Bodies of chat completions: what is understood, what is refused, and under which name."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from fakes import describe

from headrace.api.openai_chat import ChatCompletionBody, read_chat_completion
from headrace.api.openai_sampling import Call
from headrace.errors import ContextTooLong, InvalidRequest, UnsupportedField
from headrace.session.settings import check_options
from headrace.types.chat import (
    ChatMessage,
    ChatRequest,
    GenerationOptions,
    MediaPart,
    TextPart,
    ToolCall,
)
from headrace.types.media import MediaOptions
from headrace.types.model import ModelTraits
from headrace.types.request import SamplingParams

HELLO = [{"role": "user", "content": "hello"}]
ANY = ModelTraits()


def read(messages: Any = HELLO, **fields: Any) -> Call[ChatRequest]:
    return read_chat_completion(json.dumps({"model": "m", "messages": messages, **fields}).encode(), ANY)


def unseeded(options: GenerationOptions) -> GenerationOptions:
    """Without the seed that was drawn."""
    return replace(options, sampling=replace(options.sampling, seed=0))


def refusal(messages: Any = HELLO, **fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        check_options(read(messages, **fields).request.options, describe())
    return caught.value


def test_a_plain_body_leaves_everything_to_the_server() -> None:
    call = read()
    assert call.request.messages == (ChatMessage("user", (TextPart("hello"),)),)
    assert unseeded(call.request.options) == GenerationOptions()
    assert call.request.tools == ()
    assert (call.model, call.stream, call.include_usage, call.ignored) == ("m", False, False, ())


def test_ids_are_random_and_never_the_same() -> None:
    ids = {read().request.request_id for _ in range(100)}
    assert len(ids) == 100
    assert all(each.startswith("chatcmpl-") for each in ids)


def test_sampling_and_stop_fields_are_taken_over() -> None:
    request = read(
        temperature=1, top_p=0.5, top_k=-1, min_p=0, seed=-4, max_tokens=9, stop=["a", "b"], stop_token_ids=[3],
        ignore_eos=True,
    ).request  # fmt: skip
    assert request.options == GenerationOptions(
        SamplingParams(1.0, 0.5, -1, 0.0, -4),
        max_tokens=9,
        stop_strings=("a", "b"),
        stop_token_ids=(3,),
        ignore_eos=True,
    )


def test_what_a_body_leaves_open_is_the_models_default() -> None:
    defaults = GenerationOptions(SamplingParams(temperature=0.6, top_k=20, repetition_penalty=1.1), max_tokens=99)
    body = json.dumps({"messages": HELLO, "temperature": 0, "top_p": 0.5, "top_k": None}).encode()
    options = read_chat_completion(body, ModelTraits(defaults=defaults)).request.options
    assert unseeded(options) == GenerationOptions(SamplingParams(0.0, 0.5, 20, repetition_penalty=1.1), max_tokens=99)


def test_one_stop_string_may_stand_alone() -> None:
    assert read(stop="END").request.options.stop_strings == ("END",)


def test_both_names_of_max_tokens_are_taken_unless_they_differ() -> None:
    assert read(max_completion_tokens=5).request.options.max_tokens == 5
    assert read(max_completion_tokens=5, max_tokens=5).request.options.max_tokens == 5
    assert refusal(max_completion_tokens=5, max_tokens=6).param == "max_tokens"
    assert read(max_tokens=0).request.options.max_tokens == 0


def test_null_is_the_same_as_absent_for_every_field() -> None:
    fields = {*ChatCompletionBody.neutral_values, *ChatCompletionBody.without_effect, *ChatCompletionBody.model_fields}
    nothing = dict.fromkeys(fields - {"messages", "model"})
    call, plain = read(**nothing), read()
    assert unseeded(call.request.options) == unseeded(plain.request.options)
    plain_request = replace(plain.request, request_id="", options=GenerationOptions())
    assert replace(call.request, request_id="", options=GenerationOptions()) == plain_request
    assert (call.stream, call.include_usage, call.ignored) == (False, False, ())


def test_every_control_is_taken_over() -> None:
    request = read(
        repetition_penalty=1.1, frequency_penalty=-2, presence_penalty=2, logit_bias={"5": -100, "07": 1.5},
        allowed_token_ids=[5, 7], bad_words=["no", "never ever"], min_tokens=2,
    ).request  # fmt: skip
    assert unseeded(request.options).sampling == SamplingParams(
        repetition_penalty=1.1, frequency_penalty=-2.0, presence_penalty=2.0, logit_bias=((5, -100.0), (7, 1.5)),
        allowed_token_ids=frozenset({5, 7}), bad_words=("no", "never ever"), min_tokens=2,
    )  # fmt: skip


def test_log_probabilities_are_asked_for_with_a_switch_and_a_number() -> None:
    assert read().request.options.num_logprobs is None
    assert read(logprobs=True).request.options.num_logprobs == 0
    assert read(logprobs=True, top_logprobs=20).request.options.num_logprobs == 20
    assert read(logprobs=False, top_logprobs=0).request.options.num_logprobs is None
    for fields in ({"top_logprobs": 3}, {"top_logprobs": 3, "logprobs": False}):
        assert refusal(**fields).param == "top_logprobs"


def test_a_prompts_log_probabilities_are_told_with_whole_answers_only() -> None:
    assert read(prompt_logprobs=0).request.options.num_prompt_logprobs == 0
    assert refusal(prompt_logprobs=1, stream=True).param == "prompt_logprobs"


def test_how_far_ahead_may_be_guessed_is_taken_over() -> None:
    assert read(draft_tokens=0).request.options.max_draft_tokens == 0
    assert read(draft_tokens=16).request.options.max_draft_tokens == 16
    for value in (-1, 17, True, "4", 1.0):
        assert refusal(draft_tokens=value).param == "draft_tokens"


def test_several_choices_and_a_priority_are_taken_over() -> None:
    request = read(n=128, priority=-5).request
    assert (request.options.num_choices, request.options.priority) == (128, -5)


def test_whose_turn_it_is_is_the_cache_key_else_the_user() -> None:
    assert read(user="eve", prompt_cache_key="thread-1").request.options.session == "thread-1"
    assert read(user="eve").request.options.session == "eve"
    assert read().request.options.session == ""


def test_messages_come_in_all_shapes() -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "developer", "content": [{"type": "text", "text": "be kind"}]},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}],
         "name": "eve"},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"broken'}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "done"}]},
        {"role": "assistant", "content": "", "reasoning": "well"},
        {"role": "assistant", "refusal": "no"},
        {"role": "user", "content": "", "cache_control": {"type": "ephemeral"}},
    ]  # fmt: skip
    call = read(messages)
    assert call.request.messages == (
        ChatMessage("system", (TextPart("be brief"),)),
        ChatMessage("system", (TextPart("be kind"),)),
        ChatMessage("user", (TextPart("a"), TextPart("b")), name="eve"),
        ChatMessage("assistant", (), reasoning="hm", tool_calls=(ToolCall("call_1", "f", '{"broken'),)),
        ChatMessage("tool", (TextPart("done"),), tool_call_id="call_1"),
        ChatMessage("assistant", (), reasoning="well"),
        ChatMessage("assistant", (TextPart("no"),)),
        ChatMessage("user"),
    )
    assert call.ignored == ()


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hello", "messages"),
        (None, "messages"),
        ([1], "messages[0]"),
        ([{"content": "a"}], "messages[0].role"),
        ([{"role": "wizard", "content": "a"}], "messages[0].role"),
        ([*HELLO, {"role": "user", "content": 5}], "messages[1].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"text": "a"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "smell"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": ["a"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].image_url"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
         "messages[0].content[0].image_url.url"),
        ([{"role": "user", "tool_calls": [{"function": {"name": "f", "arguments": ""}}]}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}],
         "messages[0].tool_calls[0].function.arguments"),
        ([{"role": "assistant", "tool_calls": [{"type": "custom", "function": {"name": "f", "arguments": ""}}]}],
         "messages[0].tool_calls[0].type"),
    ],
)  # fmt: skip
def test_a_wrong_message_is_named_by_its_path(messages: Any, param: str) -> None:
    assert refusal(messages).param == param


def test_images_and_videos_stand_where_they_were_sent() -> None:
    parts = [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "high"}},
        {"type": "text", "text": "and"},
        {"type": "input_image", "image_url": "https://a.example/b.png"},
        {"type": "video_url", "video_url": {"url": "https://a.example/c.mp4"}},
    ]
    assert read([{"role": "user", "content": parts}]).request.messages[0].content == (
        MediaPart("image", "data:image/png;base64,AAAA"),
        TextPart("and"),
        MediaPart("image", "https://a.example/b.png"),
        MediaPart("video", "https://a.example/c.mp4"),
    )


def test_a_part_says_how_its_media_are_looked_at_and_is_named_in_errors() -> None:
    video = {"type": "video_url", "video_url": "x", "fps": 0.5, "max_frames": 8, "min_pixels": 1, "max_pixels": 2}
    parts = [video, {"type": "image_url", "image_url": "y", "num_frames": 3}]
    clip, image = read([{"role": "user", "content": parts}]).request.messages[0].content
    assert isinstance(clip, MediaPart) and isinstance(image, MediaPart)
    assert clip.options == MediaOptions(min_pixels=1, max_pixels=2, fps=0.5, max_frames=8)
    assert image.options == MediaOptions(num_frames=3)
    assert (clip.param, image.param) == ("messages[0].content[0].video_url", "messages[0].content[1].image_url")
    for field in ("fps", "max_frames", "min_pixels", "max_pixels", "num_frames"):
        assert refusal([{"role": "user", "content": [video | {field: 0}]}]).param == f"messages[0].content[0].{field}"


@pytest.mark.parametrize("kind", ["input_audio", "audio_url", "file"])
def test_other_media_parts_are_refused_by_path(kind: str) -> None:
    error = refusal([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": kind, kind: {}}]}])
    assert isinstance(error, UnsupportedField)
    assert error.param == "messages[0].content[1]"
    assert kind in error.message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", True), ("temperature", "1"), ("temperature", -0.1), ("temperature", 2.1),
        ("top_p", 0), ("top_p", 1.01), ("top_p", False),
        ("top_k", 1.5), ("top_k", -2), ("top_k", True), ("top_k", 2**31),
        ("min_p", -1), ("min_p", 2),
        ("seed", "7"), ("seed", 2**63), ("seed", 1.0),
        ("max_tokens", -2), ("n_predict", -2), ("max_tokens", True), ("max_tokens", "8"),
        ("max_completion_tokens", -1),
        ("stop", 3), ("stop", ""), ("stop", ["x"] * 65),
        ("stop_token_ids", 3), ("ignore_eos", 1), ("stream", "yes"), ("stream", 1),
        ("model", 5), ("enable_thinking", "no"), ("reasoning_effort", "enormous"),
        ("chat_template_kwargs", [1]), ("stream_options", True),
        ("repetition_penalty", 0), ("repetition_penalty", 1e-300), ("repetition_penalty", True),
        ("repetition_penalty", 101),
        ("frequency_penalty", 2.1), ("frequency_penalty", False), ("presence_penalty", "1"),
        ("logit_bias", [5]), ("logit_bias", {"five": 1}), ("logit_bias", {"-5": 1}), ("logit_bias", {"5": 1, "05": 2}),
        ("allowed_token_ids", []), ("allowed_token_ids", 5), ("bad_words", "no"),
        ("min_tokens", -1), ("min_tokens", 1.5), ("n", 0), ("n", 129), ("n", True), ("n", "2"),
        ("logprobs", 1), ("top_logprobs", 21), ("top_logprobs", True),
        ("prompt_logprobs", -1), ("prompt_logprobs", True),
        ("priority", "high"), ("priority", 2**31), ("user", 5), ("prompt_cache_key", ["a"]),
        ("cache_salt", ""), ("cache_salt", 5), ("thinking_token_budget", -1), ("thinking_token_budget", "5"),
    ],
)  # fmt: skip
def test_a_value_of_the_wrong_type_or_out_of_range_is_refused_by_name(field: str, value: Any) -> None:
    error = refusal(**{field: value})
    assert error.param == field
    assert field in error.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop": ["ok", ""]}, "stop[1]"),
        ({"stop": ["ok", 1]}, "stop[1]"),
        ({"stop_token_ids": [1, -1]}, "stop_token_ids[1]"),
        ({"allowed_token_ids": [1, "2"]}, "allowed_token_ids[1]"),
        ({"bad_words": ["a", ""]}, "bad_words[1]"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"chat_template_kwargs": {"reasoning_effort": 5}}, "chat_template_kwargs.reasoning_effort"),
        ({"chat_template_kwargs": {"enable_thinking": 1}}, "chat_template_kwargs.enable_thinking"),
    ],
)
def test_what_is_wrong_inside_a_field_is_named_by_its_path(fields: dict[str, Any], param: str) -> None:
    assert refusal(**fields).param == param


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("audio", {"voice": "x"}),
        ("modalities", ["text", "audio"]),
        ("prediction", {"type": "content", "content": "x"}),
        ("grammar", "root ::= a"),
        ("json_schema", {}),
        ("web_search_options", {}),
        ("best_of", 2),
        ("repeat_penalty", 1.1),
        ("echo", True),
    ],
)
def test_what_would_change_the_answer_and_is_not_built_is_refused_by_name(field: str, value: Any) -> None:
    error = refusal(**{field: value})
    assert isinstance(error, UnsupportedField)
    assert error.param == field


def test_neutral_values_of_the_same_fields_are_welcome() -> None:
    for field, neutrals in ChatCompletionBody.neutral_values.items():
        for neutral in neutrals:
            assert read(**{field: neutral}).ignored == ()
    assert read(response_format={"type": "text"}, tools=[], tool_choice="auto").ignored == ()


def test_fields_without_effect_are_accepted_and_unknown_ones_are_named() -> None:
    messages = [{"role": "user", "content": "a", "mood": "good"}]
    call = read(messages, service_tier="flex", metadata={"a": "b"}, store=True, zeal=1, alpha=None)
    assert call.ignored == ("alpha", "zeal", "messages[].mood")


def test_unknown_fields_of_a_form_and_of_stream_options_are_named() -> None:
    structured = {"regexp": "a", "whitespace_pattern": None}
    call = read(structured_outputs=structured, stream=True, stream_options={"include_usage": True, "usage": True})
    assert call.ignored == (
        "stream_options.usage", "structured_outputs.regexp", "structured_outputs.whitespace_pattern"
    )  # fmt: skip
    schema = {"type": "json_schema", "schemas": {}, "json_schema": {"name": "n", "schema": {}}}
    assert read(response_format=schema).ignored == ("response_format.schemas",)


def test_unknown_fields_are_named_however_deep_they_lie() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:,", "detail": "low", "mood": 1}, "air": 1}
    call = {"id": "a", "type": "function", "index": 0, "function": {"name": "f", "arguments": "", "zeal": 1}}
    messages = [{"role": "user", "content": [image]}, {"role": "assistant", "tool_calls": [call]}]
    tool = {"type": "function", "function": {"name": "f", "mood": 1, "parameters": {"any": 1}}}
    assert read(messages, tools=[tool], logit_bias={"5": 1}, chat_template_kwargs={"any": 1}).ignored == (
        *("messages[].content[].air", "tools[].function.mood"),
        *("messages[].content[].image_url.mood", "messages[].tool_calls[].function.zeal"),
    )


def test_an_unknown_field_with_a_parameters_name_has_no_effect() -> None:
    call = read(banned_token_ids=[5], banned_sequences=[[5, 6]])
    assert call.ignored == ("banned_sequences", "banned_token_ids")
    assert unseeded(call.request.options) == GenerationOptions()


def test_usage_is_asked_for_in_stream_options_only() -> None:
    assert read(stream=True, stream_options={"include_usage": True}).include_usage is True
    assert read(stream=True, stream_options={"include_usage": None}).include_usage is False
    assert read(stream=True).include_usage is False
    assert refusal(stream_options={"include_usage": True}).param == "stream_options"
    assert read(stream=True, stream_options={"include_usage": True}).request.options.counts_progress is False
    continuous = read(stream=True, stream_options={"continuous_usage_stats": True})
    assert (continuous.include_usage, continuous.request.options.counts_progress) == (False, True)


@pytest.mark.parametrize("name", list(ChatCompletionBody.neutral_values))
def test_a_refusal_says_what_would_be_accepted_or_that_nothing_is(name: str) -> None:
    neutrals = ChatCompletionBody.neutral_values[name]
    message = refusal(**{name: {"no such": "value"}}).message
    said = message.partition(": only ")[2].removesuffix(" is accepted")
    assert [json.loads(each) for each in said.split(" or ") if each] == list(neutrals)
    assert message.startswith(f"{name} is not supported") and "this value" not in message


def test_thinking_is_switched_by_any_of_its_names() -> None:
    assert read(enable_thinking=False).request.enable_thinking is False
    nested = read(chat_template_kwargs={"enable_thinking": True, "style": "short"}).request
    assert nested.enable_thinking is True
    assert nested.template_options == {"style": "short"}
    high = read(reasoning_effort="high").request
    assert (high.reasoning_effort, high.enable_thinking) == ("high", None)
    assert read(chat_template_kwargs={"reasoning_effort": "low"}).request.reasoning_effort == "low"


def test_a_switch_that_is_set_twice_and_differently_is_refused() -> None:
    assert refusal(enable_thinking=True, chat_template_kwargs={"enable_thinking": False}).param == "enable_thinking"
    nested = {"reasoning_effort": "high"}
    assert refusal(reasoning_effort="low", chat_template_kwargs=nested).param == "reasoning_effort"


def test_an_unfinished_assistant_turn_can_be_continued() -> None:
    messages = [*HELLO, {"role": "assistant", "content": "I am"}]
    assert read(messages, continue_final_message=True, add_generation_prompt=False).request.continue_final_message
    assert refusal(continue_final_message=True).param == "continue_final_message"
    assert refusal(messages, continue_final_message=True, add_generation_prompt=True).param == "add_generation_prompt"
    assert refusal(add_generation_prompt=False).param == "add_generation_prompt"


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe", b"[" * 100_000, b'{"messages": NaN}', b'{"seed": Infinity}',
        b'{"seed": ' + b"9" * 5000 + b"}",
        b'{"messages":[{"role":"user","content":"a"}],"temperature":1e999}',
    ],
)  # fmt: skip
def test_bytes_that_are_no_request_are_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        read_chat_completion(body, ANY)


@pytest.mark.parametrize(
    ("written", "read_as"),
    [
        (r"\ud83d", "\ufffd"),
        (r"\uD83D\uD83D\uDE00", "\ufffd\U0001f600"),
        (r"\ude00\ud83d", "\ufffd\ufffd"),
        (r"a\ud83d\n\ude00b", "a\ufffd\n\ufffdb"),
        (r"\\ud83d", r"\ud83d"),
        (r"\\\ud83d\\", "\\\ufffd\\"),
        (r"\ud83d\u0041", "\ufffdA"),
    ],
)
def test_half_a_surrogate_pair_is_read_as_a_replacement_character(written: str, read_as: str) -> None:
    body = '{"messages": [{"role": "user", "content": "TEXT"}], "stop": ["TEXT"]}'.replace("TEXT", written)
    request = read_chat_completion(body.encode(), ANY).request
    assert request.messages[0].content == (TextPart(read_as),)
    assert request.options.stop_strings == (read_as,)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stop": ["x"] * 65}, "stop: list should have at most 64 items after validation, not 65"),
        ({"stop": "x" * 1025}, "stop: string should have at most 1024 characters"),
        ({"stop": 5}, "stop: input should be a string or a list"),
        ({"messages": [5]}, "messages[0]: input should be an object"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content: input should be a string or a list"),
        ({"stream_options": True}, "stream_options: input should be an object"),
        ({"stream": "yes"}, "stream: input should be true or false"),
        ({"temperature": "1"}, "temperature: input should be a number"),
        ({"n": "2"}, "n: input should be a whole number"),
    ],
)
def test_errors_speak_of_the_value_and_of_json_not_of_our_classes(fields: dict[str, Any], message: str) -> None:
    assert refusal(**fields).message == message


def test_more_messages_than_tokens_are_refused_before_anybody_looks_at_them() -> None:
    body = json.dumps({"messages": [7] * 9}).encode()
    with pytest.raises(
        ContextTooLong, match="length is 8 tokens. However, your messages resulted in at least 9"
    ) as one:
        read_chat_completion(body, ModelTraits(max_model_len=8))
    assert one.value.param == "messages"
    full = json.dumps({"messages": HELLO * 8}).encode()
    assert len(read_chat_completion(full, ModelTraits(max_model_len=8)).request.messages) == 8


@pytest.mark.parametrize("name", ["content", "tool_calls"])
def test_more_parts_or_calls_than_tokens_are_refused_by_their_path(name: str) -> None:
    body = json.dumps({"messages": [*HELLO, {"role": "assistant", name: [7] * 9}]}).encode()
    with pytest.raises(InvalidRequest, match="at most 8 elements") as caught:
        read_chat_completion(body, ModelTraits(max_model_len=8))
    assert caught.value.param == f"messages[1].{name}"


def test_only_the_first_wrong_message_is_looked_at() -> None:
    with pytest.raises(InvalidRequest) as caught:
        read([*HELLO, *[{"role": "user", "content": [{"type": "text", "text": 5}, {}]}] * 1000])
    assert caught.value.param == "messages[1].content[0].text"
    assert caught.value.__cause__.error_count() < 5


def test_what_a_prompt_may_share_with_others_is_taken_over() -> None:
    assert read(cache_salt="tenant 7").request.options.cache_salt == "tenant 7"
    assert read().request.options.cache_salt == ""


def test_characters_outside_the_basic_plane_survive_both_ways_of_writing_them() -> None:
    for text in ('"\\ud83d\\ude00"', '"😀"'):
        call = read_chat_completion(f'{{"messages": [{{"role": "user", "content": {text}}}]}}'.encode(), ANY)
        assert call.request.messages[0].content == (TextPart("😀"),)
