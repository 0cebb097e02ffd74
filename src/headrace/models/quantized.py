"""Quantises a model in full precision when it is loaded, and keeps the result on disk for later starts."""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import save_model

from headrace.errors import ModelError
from headrace.models.fingerprint import add_files, add_versions, weights_digest
from headrace.models.source import ModelFiles
from headrace.models.weights import Loaded, cast, evaluate_by_module, load_weights
from headrace.state.disk_folder import MODELS

logger = logging.getLogger(__name__)

FORMS: dict[str, dict[str, Any]] = {
    "4": {"bits": 4, "group_size": 64, "mode": "affine"},
    "8": {"bits": 8, "group_size": 64, "mode": "affine"},
    "mxfp4": {"bits": 4, "group_size": 32, "mode": "mxfp4"},
}
"""As mlx-lm's converter chooses them."""


def bits_per_weight(form: str) -> float:
    """With a scale and a bias of 16 bits for each group, in mxfp4 a scale of 8 bits; in float32 twice as many."""
    settings = FORMS[form]
    return float(settings["bits"] + (32 if settings["mode"] == "affine" else 8) / settings["group_size"])


_NOTES = "kept.json"


@dataclass(frozen=True, slots=True)
class Quantization:
    """form: of FORMS. folder: where results are kept, up to quota_bytes; None: nowhere. sample: tokens of a text."""

    form: str
    folder: Path | None = None
    quota_bytes: int = 0
    sample: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Distance:
    """Of the quantised model's next tokens from the original's, over the tokens of a text.

    divergence: Kullback-Leibler, the mean in nats. agreement: share of positions with the same likeliest token.
    """

    divergence: float
    agreement: float
    num_tokens: int

    def __str__(self) -> str:
        return (
            f"KL divergence {self.divergence:.4f} nats from the original, the same likeliest token at "
            f"{self.agreement:.0%} of {self.num_tokens} positions"
        )


@dataclass(frozen=True, slots=True)
class Quantized:
    """distance: None if it was not measured. place: where it is kept, for people."""

    loaded: Loaded
    distance: Distance | None
    place: str


def distance(original: mx.array, quantised: mx.array) -> Distance:
    """original, quantised: logits `[n, vocab_size]` of the same tokens."""
    expected, found = (
        logits.astype(mx.float32) - mx.logsumexp(logits.astype(mx.float32), axis=-1, keepdims=True)
        for logits in (original, quantised)
    )
    divergence = mx.mean(mx.sum(mx.exp(expected) * (expected - found), axis=-1))
    agreement = mx.mean(mx.argmax(original, axis=-1) == mx.argmax(quantised, axis=-1))
    return Distance(float(divergence), float(agreement), original.shape[0])


def refuse_quantised(files: ModelFiles) -> None:
    """Raise ModelError for a checkpoint that is quantised already."""
    for config in (files.config, files.text_config):
        if config.get("quantization") or config.get("quantization_config"):
            raise ModelError(f"--quantize: {files.name} is quantised already; name the original that it was made from")


def quantize(files: ModelFiles, form: str, dtype: str) -> Quantized:
    """Read a model and quantise it layer by layer, so that memory never holds all of the original.

    dtype: what its other weights, and scales, are held in; "stored" for as stored.
    """
    loaded = load_weights(files)
    if dtype != "stored":
        cast(loaded.model, getattr(mx, dtype))
    settings = FORMS[form]
    own = getattr(loaded.model, "quant_predicate", None)

    def chosen(path: str, module: nn.Module) -> Any:
        if not hasattr(module, "to_quantized") or module.weight.shape[-1] % settings["group_size"]:
            return False
        found = True if own is None else own(path, module)
        # a model's own settings are for the affine form
        return found if isinstance(found, bool) or settings["mode"] == "affine" else settings

    nn.quantize(loaded.model, **settings, class_predicate=chosen)
    evaluate_by_module(loaded.model)
    if not _settings_of(loaded.model):
        raise ModelError(f"--quantize: no layer of {files.name} is as wide as groups of {settings['group_size']} need")
    return Quantized(loaded, None, "not kept")


def _settings_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    return {
        path: {"bits": module.bits, "group_size": module.group_size, "mode": module.mode}
        for path, module in model.named_modules()
        if "scales" in module
    }


def find_kept(files: ModelFiles, wanted: Quantization, dtype: str) -> Quantized | None:
    """The result of an earlier start; None if there is none, or if it is damaged."""
    if wanted.folder is None:
        return None
    folder = _folder_of(files, wanted, dtype)
    try:
        notes = json.loads((folder / _NOTES).read_text("utf-8"))
        settings, digest = notes["quantization"], notes["weights"]
        measured = None if notes["distance"] is None else Distance(**notes["distance"])
        config = {**files.config, "quantization": settings}
        loaded = load_weights(replace(files, directory=folder, config=config))
        if weights_digest(loaded.model) != digest:
            raise ModelError("its weights are not those that were kept")
    except FileNotFoundError:
        return None
    except (ModelError, OSError, ValueError, LookupError, TypeError) as error:
        logger.warning("the quantised copy in %s is damaged and is made anew: %s", folder, error)
        shutil.rmtree(folder, ignore_errors=True)
        return None
    os.utime(folder)
    return Quantized(loaded, measured, f"read from {folder}")


def keep(files: ModelFiles, wanted: Quantization, dtype: str, made: Quantized) -> Quantized:
    """Store a result for later starts, unless it exceeds the quota; the oldest ones are evicted."""
    if wanted.folder is None:
        return made
    model = made.loaded.model
    parameters: Any = tree_flatten(model.parameters())
    num_bytes = sum(array.nbytes for _, array in parameters)
    if num_bytes > wanted.quota_bytes:
        logger.warning("the quantised model is not kept: %d bytes are more than --cache-disk-quota", num_bytes)
        return made
    settings = {**FORMS[wanted.form], **_settings_of(model)}
    notes = {
        "quantization": settings,
        "weights": weights_digest(model),
        "distance": None if made.distance is None else asdict(made.distance),
    }
    folder = _folder_of(files, wanted, dtype)
    try:
        wanted.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.parent.mkdir(exist_ok=True)
        _make_room(folder.parent, wanted.quota_bytes - num_bytes)
        with tempfile.TemporaryDirectory(prefix=".new-", dir=folder.parent) as name:
            unfinished = Path(name) / folder.name
            save_model(unfinished, model)
            (unfinished / "config.json").write_text(json.dumps({**files.config, "quantization": settings}))
            (unfinished / _NOTES).write_text(json.dumps(notes))
            unfinished.rename(folder)
    except (OSError, RuntimeError) as error:
        if not folder.is_dir():  # else another process was faster
            logger.warning("the quantised model can't be kept in %s: %s", folder, error)
            return made
    return replace(made, place=f"kept in {folder}")


def _folder_of(files: ModelFiles, wanted: Quantization, dtype: str) -> Path:
    assert wanted.folder is not None
    digest = blake2b(digest_size=16)
    add_files(digest, files.directory)
    add_versions(digest, f"{wanted.form} {dtype}")
    return wanted.folder / MODELS / digest.hexdigest()


def kept_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in (folder / MODELS).glob("*/*"))


def _make_room(folder: Path, quota_bytes: int) -> None:
    kept = sorted(folder.glob("[0-9a-f]*/"), key=lambda each: each.stat().st_mtime, reverse=True)
    for each in kept:
        quota_bytes -= sum(file.stat().st_size for file in each.iterdir())
        if quota_bytes < 0:
            shutil.rmtree(each, ignore_errors=True)
