"""Fetches a repository's files into huggingface_hub's cache.

That library does nearly all of it. Only large files are fetched here: it (2.4) begins an interrupted file anew, while
these go on from `blobs/SHA256.incomplete`, as in its earlier versions.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import constants, hf_hub_url, snapshot_download
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import WeakFileLock, build_hf_headers, tqdm

from headrace.cancellation import Cancellation, call_cancellable, check_cancelled, interrupted_by
from headrace.errors import ModelError
from headrace.isolation import first_line
from headrace.models.hub import HTTP_ERROR, HubFile, Repository, cache_of, split_revision, unfinished
from headrace.models.in_use import mark_in_use

_MOST_AT_ONCE = 4
"""Large files that are fetched at a time."""


@dataclass(frozen=True, slots=True)
class Download:
    """A repository that is being fetched. began: by the monotonic clock, with begun_bytes here already."""

    repository: Repository
    began: float
    begun_bytes: int


_under_way: list[Download] = []


def downloads() -> Sequence[Download]:
    return tuple(_under_way)


def fetch_small(repository: Repository) -> Path:
    """Fetch all but the weights. Returns the snapshot's folder, whose branch is not moved to it yet."""
    names = [file.name for file in repository.files if not file.name.endswith(".safetensors")]
    return _snapshot(repository, repository.commit, names) if names else repository.folder


def fetch(repository: Repository) -> Path:
    """Fetch what is missing. Returns the snapshot's folder. Raises ModelError and the hub's errors.

    A file gets its place in the snapshot when it is whole, weights after all others.
    """
    mark_in_use(cache_of(repository.name), repository.name)
    download = Download(repository, time.monotonic(), repository.fetched_bytes)
    _under_way.append(download)
    try:
        fetch_small(repository)
        _fetch_weights(repository)
        _, revision = split_revision(repository.name)
        return _snapshot(repository, revision, [file.name for file in repository.files])
    finally:
        _under_way.remove(download)


def _fetch_weights(repository: Repository) -> None:
    large = [
        each for each in repository.missing if each.is_large and each.num_bytes <= constants.MAX_HTTP_DOWNLOAD_SIZE
    ]
    pool = ThreadPoolExecutor(_MOST_AT_ONCE)
    # of all files: if one fails, the others end, too
    cancellation = Cancellation()
    try:
        with interrupted_by(cancellation.cancel):
            work = [partial(call_cancellable, cancellation, partial(_fetch_large, repository, file)) for file in large]
            calls = [pool.submit(copy_context().run, each) for each in work]
            for done in as_completed(calls):
                done.result()
    except (GatedRepoError, RepositoryNotFoundError):
        raise
    except HTTP_ERROR as error:
        raise ModelError(
            f"the download of {repository.name} broke off ({first_line(error)}); the same command continues from there"
        ) from error
    finally:
        cancellation.cancel()
        pool.shutdown(wait=False, cancel_futures=True)


class _NoBar(tqdm):
    """Several bars of files would overwrite our line. It is updated with each piece that arrives."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "disable": True})

    def update(self, n: float | None = 1) -> bool | None:
        check_cancelled()
        is_shown: bool | None = super().update(n)
        return is_shown


def _snapshot(repository: Repository, revision: str | None, files: Sequence[str]) -> Path:
    repo_id, _ = split_revision(repository.name)
    return Path(snapshot_download(repo_id, revision=revision, allow_patterns=list(files), tqdm_class=_NoBar))


def _fetch_large(repository: Repository, file: HubFile) -> None:
    """Into the cache's blobs, from where an earlier download ended."""
    cache = cache_of(repository.name)
    blob = cache / "blobs" / file.blob
    lock = cache.parent / ".locks" / cache.name / f"{file.blob}.lock"
    for folder in (blob.parent, lock.parent):
        folder.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):  # the one that huggingface_hub takes
        if blob.exists():
            return
        part = unfinished(blob)
        with part.open("ab") as out:
            if out.tell() > file.num_bytes:
                out.truncate(0)
            http_get(
                hf_hub_url(split_revision(repository.name)[0], file.name, revision=repository.commit),
                out,
                resume_size=part.stat().st_size,
                headers=build_hf_headers(),
                expected_size=file.num_bytes,
                tqdm_class=_NoBar,
            )
        if sha256_of(part) != file.blob:
            part.unlink()
            raise ModelError(f"{repository.name}: {file.name} came damaged and was deleted; fetch it again")
        part.replace(blob)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
