"""Repositories of Hugging Face: which of their files Headrace reads, and which are in the local cache."""

from __future__ import annotations

import errno
import json
import logging
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.hf_api import RepoSibling
from huggingface_hub.utils import validate_repo_id

from headrace.errors import ModelError
from headrace.isolation import first_line

logger = logging.getLogger(__name__)

SMALL_FILES = ("*.json", "*.jinja", "*.txt", "tokenizer.model", "*.tiktoken", "README.md")
_READ_FILES = (*SMALL_FILES, "*.safetensors")
_READ_FOLDERS = re.compile(r"|mtp|additional_chat_templates|\d+_\w+")
"""Of a repository: its root, a prediction head, templates, and the modules of sentence-transformers. Others hold the
same weights in other formats."""
_COPY = "consolidated*"
"""The same weights once more, in their makers' format."""

WEIGHTS_INDEX = "model.safetensors.index.json"
"""The map from tensors to files of weights."""

_NEWER_TIMEOUT_S = 3.0
"""For the question whether there is a newer revision than the one that is here."""
_TIMEOUT_S = 10.0

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

HTTP_ERROR: type[BaseException] = next(one for one in HfHubHTTPError.__mro__ if one.__name__ == "HTTPError")
"""Of the copy of httpx that huggingface_hub uses, which may be another one than ours."""


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository. blob: its name in the cache, which is the SHA-256 of a large one."""

    name: str
    num_bytes: int
    blob: str
    is_large: bool


@dataclass(frozen=True, slots=True)
class Repository:
    """What Hugging Face says of a model at one commit. files: those that Headrace reads."""

    name: str
    commit: str
    files: tuple[HubFile, ...]
    has_gguf: bool

    @property
    def folder(self) -> Path:
        """Of the snapshot; it may be missing, or lack files."""
        return cache_of(self.name) / "snapshots" / self.commit

    @property
    def missing(self) -> list[HubFile]:
        return [file for file in self.files if not (self.folder / file.name).exists()]

    @property
    def fetched_bytes(self) -> int:
        """On this machine, those of unfinished downloads too."""
        return sum(_fetched_bytes(self, file) for file in self.files)

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


def is_read(file: str) -> bool:
    """Whether Headrace reads a file of a repository; no code, and each weight once."""
    folder, _, name = file.rpartition("/")
    return (
        _READ_FOLDERS.fullmatch(folder) is not None
        and any(fnmatch(name, pattern) for pattern in _READ_FILES)
        and not fnmatch(name, _COPY)
    )


def split_revision(name: str) -> tuple[str, str | None]:
    """`owner/name@revision` into the repository and its branch, tag or commit."""
    repository, _, revision = name.partition("@")
    return repository, revision or None


def cache_of(name: str) -> Path:
    """The folder of a repository in the cache. Raises HFValidationError."""
    repository, _ = split_revision(name)
    validate_repo_id(repository)
    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repository, repo_type="model")


def indexed_files(folder: Path) -> list[Path]:
    """The files of weights that a checkpoint's index names; none without an index, or for an invalid one."""
    try:
        shard_of = json.loads((folder / WEIGHTS_INDEX).read_text("utf-8"))["weight_map"]
        return [folder / name for name in sorted(set(shard_of.values()))]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return []


def is_complete(folder: Path) -> bool:
    """Whether a folder has a model's configuration and all weights: those of its index, or some without an index."""
    if not (folder / "config.json").is_file():
        return False
    if indexed := indexed_files(folder):
        return all(file.is_file() for file in indexed)
    return any(is_read(file.name) and "mtp" not in file.name for file in folder.glob("*.safetensors"))


def local_copy(name: str) -> Path | None:
    """The complete snapshot of a model in the cache: of its branch, else the latest one. Asks for nothing."""
    _, revision = split_revision(name)
    cache = cache_of(name)
    snapshots = cache / "snapshots"
    try:
        named = (cache / "refs" / (revision or constants.DEFAULT_REVISION)).read_text().strip()
    except OSError:
        named = revision or ""
    candidates = [snapshots / named] if named else []
    if revision is None and snapshots.is_dir():
        candidates += sorted(snapshots.iterdir(), key=lambda folder: folder.stat().st_mtime, reverse=True)
    return next((folder for folder in candidates if is_complete(folder)), None)


_found: dict[Path, Path] = {}
"""Complete snapshots by `_key`: a process asks the hub once for each."""


def find(name: str) -> Path | Repository:
    """A complete copy, if it is the newest or the hub doesn't answer soon; else the repository, to be fetched."""
    _, revision = split_revision(name)
    known = _found.get(_key(name))
    if known is not None and is_complete(known):
        return known
    copy = local_copy(name)
    if copy is None:
        return ask(name)
    try:
        repository = None if revision == copy.name else ask(name, _NEWER_TIMEOUT_S)
    except (HTTP_ERROR, OSError) as error:
        if not constants.HF_HUB_OFFLINE:
            reason = first_line(error)
            logger.warning("the copy of %s that is here is used: Hugging Face can't be asked (%s)", name, reason)
        repository = None
    if repository is not None and repository.missing:
        return repository
    return remember(name, copy if repository is None else repository.folder)


def remember(name: str, folder: Path) -> Path:
    """Take a complete snapshot for the newest one from here on."""
    _found[_key(name)] = folder
    return folder


def _key(name: str) -> Path:
    repository, revision = split_revision(name)
    return cache_of(repository) / (revision or "")


def ask(name: str, timeout_s: float = _TIMEOUT_S) -> Repository:
    """What a repository holds, by one question to the hub. Raises its errors, and TimeoutError."""
    repository, revision = split_revision(name)
    # the client's own limit holds for each read, and not for finding the host
    pool, client_s = ThreadPoolExecutor(1), 2 * timeout_s
    try:
        call = pool.submit(HfApi().model_info, repository, revision=revision, files_metadata=True, timeout=client_s)
        info = call.result(timeout_s)
    except TimeoutError as error:
        raise TimeoutError(f"no answer within {timeout_s:.0f} seconds") from error
    finally:
        pool.shutdown(wait=False)
    listed = info.siblings or ()
    files = tuple(_described(each) for each in listed if is_read(each.rfilename))
    return Repository(name, str(info.sha), files, any(each.rfilename.endswith(".gguf") for each in listed))


def _described(file: RepoSibling) -> HubFile:
    blob = file.blob_id or "" if file.lfs is None else file.lfs.sha256
    return HubFile(file.rfilename, file.size or 0, blob, file.lfs is not None)


def unfinished(blob: Path) -> Path:
    return blob.with_name(f"{blob.name}.incomplete")


def _fetched_bytes(repository: Repository, file: HubFile) -> int:
    blob = cache_of(repository.name) / "blobs" / file.blob
    for path in (repository.folder / file.name, blob, unfinished(blob)):
        try:
            return min(path.stat().st_size, file.num_bytes)
        except OSError:
            continue
    return 0


@contextmanager
def hub_errors(name: str) -> Iterator[None]:
    """Translate download errors to ModelError."""
    repository, revision = split_revision(name)
    try:
        yield
    except HFValidationError as error:
        raise ModelError(f"{name!r} is neither a folder nor a Hugging Face id such as owner/name") from error
    except GatedRepoError as error:
        raise ModelError(
            f"{name!r} is gated: accept its terms on its Hugging Face page and log in with a token of that account"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"{name!r} is neither a folder here nor a repository on Hugging Face") from error
    except RevisionNotFoundError as error:
        raise ModelError(f"{repository} has no branch, tag or commit {revision} on Hugging Face") from error
    except (HTTP_ERROR, LocalEntryNotFoundError, OSError) as error:
        if isinstance(error, OSError) and error.errno in _NO_SPACE:
            raise ModelError(
                f"{name!r} can't be fetched: the disk is full ({constants.HF_HUB_CACHE}); what has come stays, "
                "and the same command continues from there"
            ) from error
        # by name: the hub library may bring another copy of httpx than ours
        if any(type(cause).__name__ == "ProxyError" for cause in _causes(error)):
            raise ModelError(
                f"{name!r} can't be fetched: the proxy that HTTPS_PROXY or ALL_PROXY names fails"
            ) from error
        raise ModelError(
            f"{name!r} is not a folder here, not (or not all of it) in the local Hugging Face cache, "
            f"and Hugging Face can't be reached: {first_line(error)}"
        ) from error


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
