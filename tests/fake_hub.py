"""A model hub on this machine that serves folders over HTTP as Hugging Face does, and records what is asked for."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

_PART_BYTES = 1 << 16


class FakeHub(ThreadingHTTPServer):
    """repositories: folders by `owner/name`. asked: method and path of each request, ranges: those asked for.

    is_silent: no request is answered until `goes_on` is set. pauses_at: bytes of a file after which its content stops
    until then.
    breaks_at: bytes of a file after which the connection ends, and every request fails.
    """

    daemon_threads = True

    def __init__(self, repositories: Mapping[str, Path]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories = repositories
        self.asked: list[str] = []
        self.ranges: list[str] = []
        self.is_silent = False
        self.pauses_at: int | None = None
        self.goes_on = threading.Event()
        self.breaks_at: int | None = None
        self.is_broken = self.is_over = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def downloaded(self) -> set[str]:
        """Names of the files whose contents were fetched."""
        return {line.rpartition("/")[2] for line in self.asked if line.startswith("GET ") and "/resolve/" in line}

    def commit(self, name: str) -> str:
        """Of what the folder holds now."""
        return hashlib.sha1(json.dumps(_files(self.repositories[name])).encode()).hexdigest()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that ends in mid-download is no news."""


@contextmanager
def fake_hub(repositories: Mapping[str, Path]) -> Iterator[FakeHub]:
    with FakeHub(repositories) as hub:
        thread = threading.Thread(target=hub.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.is_over = True  # connections that are kept open, too
            hub.goes_on.set()
            hub.shutdown()
            thread.join()


def use_hub(monkeypatch: pytest.MonkeyPatch, url: str, cache: Path) -> None:
    """Let huggingface_hub ask this hub, and keep files in this cache."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeHub

    def do_GET(self) -> None:
        self._serve()

    def do_HEAD(self) -> None:
        self._serve()

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _serve(self) -> None:
        if self.server.is_over:
            self.close_connection = True
            return None
        if self.server.is_broken:
            return self._begin(500, 0, {})
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append(f"{self.command} {path}")
        if self.server.is_silent:
            self.server.goes_on.wait(60)
        for name, folder in self.server.repositories.items():
            if path.startswith((f"/api/models/{name}/", f"/api/models/{name}?")) or path == f"/api/models/{name}":
                files = _files(folder)
                told = files if "/tree/" in path else {"id": name, "sha": self.server.commit(name), "siblings": files}
                body = json.dumps(told).encode()
                self._begin(200, len(body), {"Content-Type": "application/json"})
                self.wfile.write(body)
                return None
            prefix = f"/{name}/resolve/"
            if path.startswith(prefix):
                file = folder / path.removeprefix(prefix).partition("/")[2]
                return self._send(file, self.server.commit(name)) if file.is_file() else self._refuse("EntryNotFound")
        return self._refuse("RepoNotFound")

    def _refuse(self, code: str) -> None:
        self._begin(404, 0, {"X-Error-Code": code})

    def _send(self, file: Path, commit: str) -> None:
        size, start = file.stat().st_size, 0
        headers = {"X-Repo-Commit": commit, "ETag": f'"{_blob(file)}"', "Accept-Ranges": "bytes"}
        if (asked := self.headers.get("Range")) is not None:
            self.server.ranges.append(asked)
            start = int(asked.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {start}-{size - 1}/{size}"
        self._begin(206 if start else 200, size - start, headers)
        if self.command == "GET":
            with file.open("rb") as opened:
                opened.seek(start)
                while part := opened.read(_PART_BYTES):
                    self.wfile.write(part)
                    at = opened.tell()
                    if self.server.pauses_at is not None and at >= self.server.pauses_at:
                        self.server.goes_on.wait(60)
                    if self.server.breaks_at is not None and at >= self.server.breaks_at:
                        self.server.is_broken = self.close_connection = True
                        return

    def _begin(self, status: int, num_bytes: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for header, value in {"Content-Length": str(num_bytes), **headers}.items():
            self.send_header(header, value)
        self.end_headers()


def _files(folder: Path) -> list[dict[str, object]]:
    """As the hub lists a repository and its tree; the two listings name a file in different fields."""
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    return [_listed(file, str(file.relative_to(folder))) for file in files]


def _listed(file: Path, name: str) -> dict[str, object]:
    size, blob = file.stat().st_size, _blob(file)
    told: dict[str, object] = {
        "type": "file",
        "path": name,
        "rfilename": name,
        "size": size,
        "oid": blob,
        "blobId": blob,
    }
    if _is_large(file):
        told["lfs"] = {"oid": blob, "sha256": blob, "size": size, "pointerSize": 134}
    return told


def _is_large(file: Path) -> bool:
    return file.suffix in (".safetensors", ".bin", ".gguf")


def _blob(file: Path) -> str:
    """SHA-256 of a large file, and of others Git's hash."""
    content = file.read_bytes()
    if _is_large(file):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
