"""All syntaxes by name."""

from __future__ import annotations

from headrace.text.formats.deepseek import DeepSeekCalls
from headrace.text.formats.dsml import DSML
from headrace.text.formats.gemma4 import GemmaCalls
from headrace.text.formats.glm import GLM
from headrace.text.formats.harmony import HarmonyCall
from headrace.text.formats.hermes import ToolCallTags
from headrace.text.formats.hunyuan import Hunyuan
from headrace.text.formats.json_calls import JsonCalls
from headrace.text.formats.kimi import KimiCalls
from headrace.text.formats.llama import LlamaCalls
from headrace.text.formats.minimax import MINIMAX
from headrace.text.formats.mistral import MistralCalls
from headrace.text.formats.pythonic import PythonCalls
from headrace.text.formats.seed import SEED
from headrace.text.formats.tagged import TaggedCalls
from headrace.text.formats.tool_format import ToolFormat

FORMATS: dict[str, ToolFormat] = {
    "deepseek_v3": DeepSeekCalls(),
    "deepseek_v31": DeepSeekCalls(),
    "dsml": TaggedCalls(*DSML, takes_bare_calls=True),
    "gemma4": GemmaCalls(),
    "glm": TaggedCalls(GLM),
    # Granite 3.1 first writes plain text that it never closes.
    "granite3": JsonCalls(("<|tool_call|>", "<tool_call>"), "</tool_call>", ("<|tool_call|>",)),
    "harmony": HarmonyCall(),
    "hermes": ToolCallTags(bare_function=False),
    "hunyuan": Hunyuan(),
    "kimi_k2": KimiCalls(),
    "lfm2": PythonCalls("<|tool_call_start|>", "<|tool_call_end|>"),
    "llama_json": LlamaCalls(),
    "minimax_m2": TaggedCalls(MINIMAX, takes_bare_calls=True),
    "mistral_args": MistralCalls(),
    "mistral_json": MistralCalls(),
    "pythonic": PythonCalls("<|python_start|>", "<|python_end|>"),
    "qwen_xml": ToolCallTags(bare_function=True),
    "seed_oss": TaggedCalls(SEED, takes_bare_calls=True),
    "toolcall_list": JsonCalls(("<TOOLCALL>",), "</TOOLCALL>", ("<TOOLCALL>", "</TOOLCALL>")),
}
