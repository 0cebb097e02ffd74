"""The words after `headrace pull`, `list`, `show` and `remove`. Imports nothing heavy."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from headrace.config_loading import Parser, parse_with_knobs

_NAMED = "a Hugging Face id, owner/name or owner/name@revision, or smollm2"
_MEMORY = ("gpu_memory_utilization", "dtype")


def parse_pull(words: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="headrace pull",
        description="Fetch models. First it says what is to be fetched, and whether disk and memory have room for it. "
        "After an interruption the same command continues where it ended.",
        allow_abbrev=False,
    )
    parser.add_argument("models", nargs="+", metavar="MODEL", help=_NAMED)
    parser.add_argument(
        "--force", action="store_true", help="fetch a model, too, that does not fit this machine or is unknown here"
    )
    return parse_with_knobs(parser, words, "model_folder", *_MEMORY)


def parse_list(words: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="headrace list",
        description="List the models on this machine: in the Hugging Face cache, in --model-folder, and built in.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print all that is known of them, as JSON")
    return parse_with_knobs(parser, words, "model_folder", "gpu_memory_utilization")


def parse_show(words: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="headrace show",
        description="Say what a model is and how it would be served. Of a model that is not on this machine, only its "
        "small files are fetched.",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help="a folder, a built-in model, or a Hugging Face id")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    return parse_with_knobs(parser, words, "model_folder", *_MEMORY)


def parse_remove(words: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="headrace remove",
        description="Delete models from the caches, after a question. Other folders are never touched.",
        allow_abbrev=False,
    )
    parser.add_argument("models", nargs="+", metavar="MODEL", help=_NAMED)
    parser.add_argument("--yes", action="store_true", help="don't ask")
    return parse_with_knobs(parser, words, "model_folder")
