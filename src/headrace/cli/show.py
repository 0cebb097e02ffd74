"""`headrace show MODEL`: what a model is, and how it would be served, without loading its weights."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from headrace.backend.device import Device, current
from headrace.cli.fit import Fit, fit, gb
from headrace.config import Config, ModelConfig
from headrace.engine.memory import fitting_context
from headrace.engine.model_files import preview
from headrace.errors import ModelError
from headrace.models.inventory import kind_of, licence_of
from headrace.models.preview import ModelEstimate, Preview, estimate
from headrace.session.text_pipeline import TextPipeline, load_text_pipeline


def run(given: argparse.Namespace) -> None:
    """Raises ModelError."""
    config = Config(given.model, models=ModelConfig(dtype=given.dtype, model_folder=given.model_folder))
    found, here = preview(config), current()
    facts = _facts(found, here, fit(found, here, given.gpu_memory_utilization, given.dtype))
    if given.json:
        print(json.dumps(facts, indent=1, ensure_ascii=False))
        return
    for line in _lines(facts):
        print(line)


def _facts(found: Preview, here: Device, fitting: Fit) -> dict[str, Any]:
    files = found.files
    estimated = estimate(files.config, 4 if here.kind == "cpu" else 2)
    modalities = ["text", *(["images", "videos"] if files.config.get("vision_config") else ())]
    return {
        "name": files.name,
        "folder": str(files.directory),
        "kind": kind_of(files),
        "architecture": next(iter(files.config.get("architectures") or ()), None),
        "model_type": files.model_type,
        "parameters": None if estimated is None else estimated.num_parameters,
        "quantization": _quantization(files.config),
        "context": files.context_length,
        "modalities": modalities,
        **_text_facts(files.directory, files.model_type),
        "layers": None if estimated is None else dict(estimated.layers),
        "weights_bytes": found.weights_bytes,
        "missing_bytes": found.missing_bytes,
        "fits": fitting.fits if found.weights_bytes else None,
        "fitting_context": _fitting_context(fitting, estimated),
        "state_bytes_per_token": None if estimated is None else _bytes_per_token(estimated),
        "licence": licence_of(files.directory),
    }


def _quantization(config: Mapping[str, Any]) -> str:
    """As MLX's converters state it, else as others do, else the precision."""
    if isinstance(own := config.get("quantization"), dict) and "bits" in own:
        return f"{own['bits']} bits, {own.get('mode', 'affine')}, groups of {own.get('group_size', 64)}"
    if isinstance(others := config.get("quantization_config"), dict):
        return str(others.get("quant_method", "unknown"))
    return f"none ({config.get('dtype') or config.get('torch_dtype') or 'precision not stated'})"


def _text_facts(folder: Path, model_type: str) -> dict[str, Any]:
    try:
        text: TextPipeline | None = load_text_pipeline(folder, model_type)
        problem = None
    except ModelError as error:
        text, problem = None, error.message
    family = None if text is None else text.family
    return {
        "family": None if family is None else family.name,
        "chat_template": None if text is None else text.tokenizer.chat_template is not None,
        "tool_format": None if family is None else family.tool_format,
        "thinking": None if family is None else family.think_open is not None,
        "switches_thinking": None if family is None else family.switches_thinking,
        "tokenizer_problem": problem,
    }


def _fitting_context(fitting: Fit, estimated: ModelEstimate | None) -> int | None:
    """The longest context that memory has room for beside the weights."""
    if estimated is None or not fitting.fits:
        return None
    left = fitting.usable_bytes - fitting.held_bytes
    return fitting_context(left, estimated.cost.num_bytes, fitting.own_context)


def _bytes_per_token(estimated: ModelEstimate) -> int:
    return estimated.cost.record_bytes(2) - estimated.cost.record_bytes(1)


def _lines(facts: Mapping[str, Any]) -> Iterator[str]:
    yield f"{facts['name']}: {facts['kind']}, {facts['architecture'] or facts['model_type']} ({facts['model_type']})"
    yield f"family: {facts['family'] or 'unknown'}"
    parameters = facts["parameters"]
    part = ", of the text model" if "images" in facts["modalities"] else ""
    yield f"parameters: {'not known before loading' if parameters is None else _count(parameters) + part}"
    yield f"quantisation: {facts['quantization']}"
    yield f"context: {facts['context'] or 'not stated'} tokens"
    yield f"takes: {', '.join(facts['modalities'])}"
    yield f"chats: {_words(facts['chat_template'], 'by its template', 'no, it has no chat template')}"
    yield f"tool calls: {facts['tool_format'] or 'none known'}"
    switch = "can be switched" if facts["switches_thinking"] else "can't be switched"
    yield f"thinking: {_words(facts['thinking'], switch, 'none')}"
    if facts["tokenizer_problem"] is not None:
        yield f"tokenizer: {facts['tokenizer_problem']}"
    if facts["layers"] is not None:
        yield f"layers: {', '.join(f'{name}: {level}' for name, level in facts['layers'].items())}"
    here = f"{gb(facts['missing_bytes'])} to fetch" if facts["missing_bytes"] else f"in {facts['folder']}"
    weights = facts["weights_bytes"]
    yield f"weights: {gb(weights) if weights else 'none (no model*.safetensors)'}, {here}"
    yield f"fits: {_words(facts['fits'], _room(facts), 'no, `headrace doctor MODEL` says why')}"
    yield f"licence: {facts['licence'] or 'not stated in its files'}"


def _room(facts: Mapping[str, Any]) -> str:
    context = facts["fitting_context"]
    return "yes" if context is None else f"yes, with a context of {context} tokens"


def _words(value: bool | None, if_true: str, if_false: str) -> str:
    return "unknown" if value is None else if_true if value else if_false


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} billion" if number >= 1e9 else f"{number / 1e6:.1f} million"
