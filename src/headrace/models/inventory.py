"""The models on this machine: inside the package, in Headrace's folder, and in Hugging Face's cache."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from huggingface_hub import constants, scan_cache_dir
from huggingface_hub.errors import CacheNotFound

from headrace.errors import ModelError
from headrace.models.built_in import IN_PACKAGE
from headrace.models.hub import cache_of, is_complete, local_copy, split_revision
from headrace.models.in_use import unused
from headrace.models.purpose import purpose_by_name
from headrace.models.smollm2 import FOLDER
from headrace.models.source import ModelFiles, read_files, weights_bytes

_MODELS_PREFIX = "models--"

_CARD_HEAD = re.compile(r"---\s*\n(.*?)\n---", re.DOTALL)
_LICENCE = re.compile(r"^(license(?:_name)?):[ \t]*[\"']?([\w.-]+)", re.MULTILINE)

Place = Literal["package", "folder", "hub"]


@dataclass(frozen=True, slots=True)
class LocalModel:
    """name: as commands take it. files: None if it can't be served, and `refusal` says why.

    num_bytes: on the disk, those of unfinished downloads too. weights_bytes: of the files that are loaded. last_used,
    last_modified: seconds since 1970.
    """

    name: str
    place: Place
    folder: Path
    files: ModelFiles | None
    refusal: str | None
    is_complete: bool
    num_bytes: int
    weights_bytes: int
    last_used: float
    last_modified: float


def local_models(model_folder: Path) -> list[LocalModel]:
    """All that commands find by a name, and unfinished downloads."""
    found = [_in_folder(name, "package", folder) for name, folder in IN_PACKAGE.items()]
    for name, folder in models_in(model_folder).items():
        found.append(_in_folder(name if name == FOLDER else str(folder), "folder", folder))
    return [*found, *sorted(_in_cache(), key=lambda model: model.name.lower())]


def models_in(folder: Path) -> dict[str, Path]:
    """The folders of models in a folder by their names there, `name` or `owner/name`."""
    candidates = sorted((*folder.glob("*/"), *folder.glob("*/*/")))
    shown = [each for each in candidates if not any(part[0] == "." for part in each.relative_to(folder).parts)]
    complete = [each for each in shown if is_complete(each)]
    # a folder in a model's own, such as a prediction head's, is part of it
    return {str(each.relative_to(folder)): each for each in complete if each.parent not in complete}


def _in_folder(name: str, place: Place, folder: Path) -> LocalModel:
    stats = [file.stat() for file in folder.iterdir() if file.is_file()]
    used, modified = (max(getattr(stat, field) for stat in stats) for field in ("st_atime", "st_mtime"))
    return _described(name, place, folder, sum(stat.st_size for stat in stats), used, modified)


def _in_cache() -> Iterator[LocalModel]:
    try:
        scanned = scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        return
    root = Path(constants.HF_HUB_CACHE)
    sound = {repository.repo_path.name: repository for repository in scanned.repos}
    for folder in root.glob(f"{_MODELS_PREFIX}*--*/"):
        name = folder.name.removeprefix(_MODELS_PREFIX).replace("--", "/")
        num_bytes = disk_bytes(folder)
        latest = max(folder.glob("snapshots/*/"), key=lambda each: each.stat().st_mtime, default=folder)
        if (repository := sound.get(folder.name)) is not None:
            used, modified = repository.last_accessed, repository.last_modified
        else:
            used = modified = folder.stat().st_mtime
        yield _described(name, "hub", local_copy(name) or latest, num_bytes, used, modified)


def disk_bytes(folder: Path) -> int:
    """Of all files in a folder; links count nothing."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink())


def _described(name: str, place: Place, folder: Path, num_bytes: int, used: float, modified: float) -> LocalModel:
    files, refusal = None, None
    try:
        files = read_files(name, folder)
    except ModelError as error:
        refusal = error.message
    return LocalModel(
        name, place, folder, files, refusal, is_complete(folder), num_bytes, weights_bytes(folder), used, modified
    )


def kind_of(files: ModelFiles) -> str:
    """One word for a model's purpose, by its small files and its name."""
    if files.recipe is not None:
        return "embedding" if files.recipe.traits.task == "embed" else "reranker"
    if (purpose := purpose_by_name(files.name)) is not None:
        return purpose.removeprefix("an ").removeprefix("a ").partition(" ")[0]
    if files.config.get("vision_config"):
        return "vision"
    return "chat" if has_chat_template(files.directory) else "base"


def has_chat_template(folder: Path) -> bool:
    if any((folder / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    try:
        return bool(json.loads((folder / "tokenizer_config.json").read_text("utf-8")).get("chat_template"))
    except (OSError, ValueError, AttributeError):  # none, or one that loading will refuse
        return False


def licence_of(folder: Path) -> str | None:
    """As the head of a model's card states it; None without one."""
    try:
        card = (folder / "README.md").read_text("utf-8", errors="replace")
    except OSError:
        return None
    head = _CARD_HEAD.match(card)
    stated = dict(_LICENCE.findall(head[1])) if head else {}
    return stated.get("license_name") or stated.get("license")


@dataclass(frozen=True, slots=True)
class Removal:
    """What is to be deleted. commit: of the one revision of a repository; None for all of a folder."""

    name: str
    folder: Path
    commit: str | None
    num_bytes: int

    def run(self) -> None:
        """Raises ModelError if a running Headrace uses the model."""
        with unused(self.folder) as is_unused:
            if not is_unused:
                raise ModelError(f"{self.name} is in use by another Headrace; end that first")
            if self.commit is None:
                shutil.rmtree(self.folder)
            else:
                scan_cache_dir(constants.HF_HUB_CACHE).delete_revisions(self.commit).execute()


def find_removal(name: str, model_folder: Path) -> Removal:
    """Raises ModelError for what is not in a cache, and HFValidationError."""
    if Path(name).expanduser().is_dir():
        raise ModelError(f"{name} is a folder, not a model in a cache; delete it yourself")
    if name in IN_PACKAGE:
        raise ModelError(f"{name} is part of Headrace and takes {disk_bytes(IN_PACKAGE[name]) / 1e6:.0f} MB")
    if name == FOLDER:
        if not (folder := model_folder / FOLDER).is_dir():
            raise ModelError(f"{name} is not on this machine")
        return Removal(name, folder, None, disk_bytes(folder))
    if not (folder := cache_of(name)).is_dir():
        raise ModelError(f"{name} is not in the local Hugging Face cache ({constants.HF_HUB_CACHE})")
    _, revision = split_revision(name)
    if revision is None:
        return Removal(name, folder, None, disk_bytes(folder))
    return _one_revision(name, folder, revision)


def _one_revision(name: str, folder: Path, revision: str) -> Removal:
    commit = revision
    with suppress(OSError):
        commit = (folder / "refs" / revision).read_text().strip()
    commits = [each.name for each in folder.glob("snapshots/*/")]
    if commit not in commits:
        raise ModelError(f"revision {revision} of {folder.name} is not here; here are {', '.join(commits) or 'none'}")
    if commits == [commit]:
        return Removal(name, folder, None, disk_bytes(folder))
    plan = scan_cache_dir(constants.HF_HUB_CACHE).delete_revisions(commit)
    return Removal(name, folder, commit, plan.expected_freed_size)
