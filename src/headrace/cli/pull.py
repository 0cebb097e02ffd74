"""`headrace pull MODEL…`: fetches models, after saying what that takes."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from shutil import disk_usage

from huggingface_hub import constants

from headrace.backend.device import current
from headrace.cli.download_progress import downloading_text
from headrace.cli.fit import existing, fit, gb
from headrace.cli.progress_line import Waiting
from headrace.errors import ModelError
from headrace.models.built_in import built_in_folder
from headrace.models.download import fetch
from headrace.models.hub import Repository, find, hub_errors
from headrace.models.preview import preview_repository
from headrace.models.purpose import purpose_by_name
from headrace.models.smollm2 import FOLDER
from headrace.models.smollm2 import fetch as fetch_smollm2
from headrace.models.source import is_hub_id, locate
from headrace.models.vlm import runs_whole
from headrace.models.weights import has_text_model

_INTERRUPTED = 130


def run(given: argparse.Namespace) -> None:
    """Raises ModelError for a model that can't be fetched or served, and SystemExit with 130 after Ctrl-C."""
    model_folder = Path(given.model_folder).expanduser()
    wanted = [found for name in given.models if (found := _checked(name, given)) is not None]
    _check_disk(wanted, is_forced=given.force)
    before = _missing_bytes(wanted)
    try:
        for repository in wanted:
            with hub_errors(repository.name), Waiting(lambda _: downloading_text()):
                folder = fetch(repository)
            print(f"{repository.name} is here: {folder}", flush=True)
        if _names_smollm2(given.models):
            print(f"{FOLDER} is here: {fetch_smollm2(model_folder, lambda line: print(line, flush=True))}", flush=True)
    except KeyboardInterrupt:
        again = f"`headrace pull {shlex.join(given.models)}` continues"
        came = gb(before - _missing_bytes(wanted))
        print(f"headrace: interrupted; {came} came and stay, {again}", file=sys.stderr)
        raise SystemExit(_INTERRUPTED) from None


def _names_smollm2(names: Sequence[str]) -> bool:
    return FOLDER in names and not Path(FOLDER).is_dir()


def _missing_bytes(repositories: Sequence[Repository]) -> int:
    return sum(each.num_bytes - each.fetched_bytes for each in repositories)


def _checked(name: str, given: argparse.Namespace) -> Repository | None:
    """Print what is to be fetched of a model. None for one that is here, and for smollm2.

    Raises ModelError for one that can't be served here.
    """
    if _names_smollm2([name]):
        return None
    if (built_in := built_in_folder(name)) is not None or not is_hub_id(name):
        print(f"{name} is here: {locate(name) if built_in is None else built_in}", flush=True)
        return None
    with hub_errors(name):
        found = find(name)
        if isinstance(found, Path):
            print(f"{name} is here: {found}", flush=True)
            return None
        preview = preview_repository(found)
    here = f", {gb(found.fetched_bytes)} of it here already" if found.fetched_bytes else ""
    print(f"{name}: {gb(found.num_bytes)} in {len(found.files)} files{here}", flush=True)
    fitting = fit(preview, current(), given.gpu_memory_utilization, given.dtype)
    for line in fitting.lines():
        print(line, flush=True)
    if (purpose := purpose_by_name(name)) is not None:
        print(f"by its name this is {purpose}", flush=True)
    if given.force:
        return found
    if not preview.weights_bytes:
        raise ModelError(f"{name} has no model*.safetensors, so it can't be served; --force fetches it")
    if not fitting.fits:
        raise ModelError(f"{name} does not fit this machine, so it is not fetched; --force does")
    is_known = preview.files.is_encoder or has_text_model(preview.files) or runs_whole(preview.files)
    if not is_known:
        kind = preview.files.config["model_type"]
        raise ModelError(f"{name} can't be served: mlx-lm has no model of type {kind}; --force fetches it")
    return found


def _check_disk(repositories: Sequence[Repository], *, is_forced: bool) -> None:
    """Of all models together: each has room, or was refused. Raises ModelError."""
    free, missing = disk_usage(existing(Path(constants.HF_HUB_CACHE))).free, _missing_bytes(repositories)
    if missing >= free and not is_forced:
        raise ModelError(f"the disk has no room for all of them: {gb(missing)} to fetch, {gb(free)} free")
