"""`headrace doctor [MODEL] --report FILE`: measurements of this machine and the model, to attach to an issue.

Numbers and versions only: no names of hosts, users, files or models, and nothing of any request.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from headrace import __version__
from headrace.backend.device import Device, current, release_buffers
from headrace.backend.doctor import package_versions
from headrace.backend.kernel_times import kernel_times
from headrace.config import DEFAULT_MODEL, Config
from headrace.engine.engine import Engine
from headrace.engine.measurement import LONGEST_S, Event, Prompts, measure_mlx_lm, rates
from headrace.engine.model_files import model_files
from headrace.errors import ConfigError
from headrace.types.model import ModelDescription
from headrace.types.request import GREEDY, GenerationRequest

_FORMAT = 1
_PROMPT_TOKENS = {1: 384, 8: 64}
"""Of each row, by the number of rows."""
_ANSWER_TOKENS = 64


def write_report(config: Config, file: Path) -> None:
    """Measure for some minutes, with the bundled model if none is given. Raises ConfigError, ModelError."""
    config = replace(config, model=config.model or DEFAULT_MODEL)
    _check_writable(file)
    started = time.monotonic()
    report: dict[str, Any] = {"format": _FORMAT, **_machine(current()), "kernels": kernel_times()}
    report["model"] = _described(model_files(config).text_config)
    report["settings"] = {
        "wired": config.engine.wired,
        "numerics": config.models.numerics,
        "dtype": config.models.dtype,
    }
    batches = _batches()
    report["mlx_lm"] = measure_mlx_lm(config, batches, _ANSWER_TOKENS)
    gc.collect()
    release_buffers()
    report["headrace"] = _measure_engine(config, batches)
    report["seconds"] = round(time.monotonic() - started, 1)
    file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _check_writable(file: Path) -> None:
    try:
        with file.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise ConfigError(f"--report: {file} can't be written: {error.strerror}") from error


def _machine(here: Device) -> dict[str, Any]:
    return {
        "versions": {"headrace": __version__, "python": platform.python_version(), **package_versions()},
        "system": f"{platform.system()} {platform.machine()}",
        "device": asdict(here),
        "load": round(os.getloadavg()[0], 2),
    }


def _described(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a configuration says in numbers, and the architecture."""
    numbers = {name: value for name, value in config.items() if isinstance(value, int | float)}
    quantization = config.get("quantization")
    bits = {name: value for name, value in quantization.items() if isinstance(value, int)} if quantization else None
    return {"model_type": config.get("model_type"), **numbers, "quantization": bits}


def _batches() -> list[Prompts]:
    """Random tokens that every vocabulary has."""
    random = np.random.default_rng(0)
    return [
        [[int(token) for token in random.integers(3, 150, length)] for _ in range(num_rows)]
        for num_rows, length in _PROMPT_TOKENS.items()
    ]


def _measure_engine(config: Config, batches: Sequence[Prompts]) -> dict[str, Any]:
    engine = Engine.launch(config)
    try:
        return asyncio.run(_measured(engine, batches))
    finally:
        engine.stop()


async def _measured(engine: Engine, batches: Sequence[Prompts]) -> dict[str, Any]:
    # a prompt that shares nothing with those that are timed
    await _generate(engine, [[2, *batches[0][0]]], 2)
    while not (await engine.status()).warm_up.is_over:
        await asyncio.sleep(0.05)
    measured = {str(len(batch)): await _generate(engine, batch, _ANSWER_TOKENS) for batch in batches}
    status = await engine.status()
    return {
        "rates": measured,
        "memory": asdict(status.memory),
        "drafts": None if status.drafts is None else asdict(status.drafts),
        "context": engine.model.max_model_len,
        "wired": _wired(engine.model),
    }


def _wired(model: ModelDescription) -> str | None:
    return next((line for line in model.report if line.startswith("wired: ")), None)


async def _generate(engine: Engine, batch: Prompts, max_tokens: int) -> dict[str, float]:
    events: list[Event] = []

    async def run(row: int) -> None:
        request = GenerationRequest(f"report-{time.monotonic_ns()}-{row}", tuple(batch[row]), GREEDY, max_tokens)
        stream = await engine.submit(request)
        async for output in stream:
            now = time.perf_counter()
            if output.token_ids:
                events.append((now, row, len(output.token_ids)))
            if now - started > LONGEST_S:
                break
        await stream.aclose()

    started = time.perf_counter()
    await asyncio.gather(*map(run, range(len(batch))))
    return rates(started, events, sum(map(len, batch)))
