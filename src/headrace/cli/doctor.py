"""`headrace doctor [MODEL]`: what this machine can do, what is wrong with it, and whether and how a model runs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headrace.backend.device import Device, available_memory_bytes, current
from headrace.backend.doctor import busy_advice, compiler, machine_report
from headrace.cli.configured import configured_session, configured_text_pipeline, without_missing_vision
from headrace.cli.doctor_ranks import rank_lines
from headrace.cli.doctor_report import write_report
from headrace.cli.fit import existing, fit, gb
from headrace.cli.installed import backends_advice, installed_backends, vision_advice
from headrace.config import Config
from headrace.config_loading import warn_of_unknown_variables
from headrace.engine.engine import Engine
from headrace.engine.model_files import preview
from headrace.models.quantized import bits_per_weight

_LOW_DISK_BYTES = 5_000_000_000
_LOW_MEMORY_BYTES = 2_000_000_000


@dataclass(frozen=True, slots=True)
class Resources:
    """free_memory_bytes: None where the system doesn't say. cache_folder: where fetched models are kept."""

    device: Device
    free_memory_bytes: int | None
    free_disk_bytes: int
    cache_folder: Path
    load: float = 0.0
    """Programs that wanted to run at a time, on average over the last minute."""

    def lines(self) -> Iterator[str]:
        if self.free_memory_bytes is not None:
            yield f"memory: {gb(self.free_memory_bytes)} free"
        yield f"disk: {gb(self.free_disk_bytes)} free in {self.cache_folder}"

    def advice(self) -> Iterator[str]:
        if self.device.kind == "cpu" and compiler() is None:
            yield "install a C++ compiler (g++): MLX fuses operations on a CPU with it"
        busy = busy_advice(self.device.num_cores, self.load)
        if self.device.kind == "cpu" and busy is not None:
            yield busy
        if self.device.mac is not None:
            yield from self.device.mac.advice()
        if (advice := backends_advice(installed_backends())) is not None:
            yield advice
        if (advice := vision_advice()) is not None:
            yield f"{advice} adds what images and videos need"
        if self.free_memory_bytes is not None and self.free_memory_bytes < _LOW_MEMORY_BYTES:
            yield f"end other programs: {gb(self.free_memory_bytes)} of memory are little"
        if self.free_disk_bytes < _LOW_DISK_BYTES:
            yield f"free space on the disk of {self.cache_folder}: models have gigabytes"


def resources(device: Device, cache_folder: Path) -> Resources:
    """cache_folder: may not exist yet."""
    free_disk_bytes = shutil.disk_usage(existing(cache_folder)).free
    return Resources(device, available_memory_bytes(), free_disk_bytes, cache_folder, os.getloadavg()[0])


_UNUSABLE = 1


def run(config: Config) -> None:
    """Prints what the machine can do, how a model would run on it, and what to do for the better.

    Raises ConfigError and ModelError, and SystemExit with 1 for a model that can't fit.
    """
    warn_of_unknown_variables()
    for line in machine_report(config.models.numerics):
        print(line, flush=True)
    found = resources(current(), Path(config.models.model_folder).expanduser())
    for line in found.lines():
        print(line, flush=True)
    if config.split.ranks is not None:
        for line in rank_lines(config, preview(config) if config.model else None):
            print(line, flush=True)
    elif config.model:
        _report_model(config, found)
    if config.doctor.report is not None:
        print(f"measuring for up to five minutes, for {config.doctor.report}", flush=True)
        write_report(config, Path(config.doctor.report).expanduser())
    advice = list(found.advice())
    print("\n".join(["", "what to do:", *(f"- {line}" for line in advice)]) if advice else "\nall well")


def _report_model(config: Config, here: Resources) -> None:
    models = config.models
    bits = None if models.quantize is None else bits_per_weight(models.quantize)
    knobs = config.engine
    fitting = fit(
        preview(config), here.device, knobs.gpu_memory_utilization, models.dtype, bits=bits, kv_bits=knobs.kv_bits
    )
    for line in fitting.lines():
        print(line, flush=True)
    if not fitting.fits:
        raise SystemExit(_UNUSABLE)
    if fitting.missing_bytes:
        print(f"`headrace serve {config.model}` fetches the weights; after that, doctor also says how each layer runs")
        return
    for line in _loaded_report(config):
        print(line, flush=True)


def _loaded_report(config: Config) -> list[str]:
    config = without_missing_vision(config)
    text = configured_text_pipeline(config)
    engine = Engine.launch(config, None if text is None else text.constraints)
    try:
        return [*engine.model.report, *configured_session(config, engine, text).notes]
    finally:
        engine.stop()
