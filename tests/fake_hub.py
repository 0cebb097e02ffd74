"""A model hub on this machine that serves folders over HTTP as Hugging Face does, and records what is asked for."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub(ThreadingHTTPServer):
    """repositories: folders by `owner/name`. asked: method and path of each request."""

    def __init__(self, repositories: Mapping[str, Path]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories = repositories
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def downloaded(self) -> set[str]:
        """Names of the files whose contents were fetched."""
        return {line.rpartition("/")[2] for line in self.asked if line.startswith("GET ") and "/resolve/" in line}


@contextmanager
def fake_hub(repositories: Mapping[str, Path]) -> Iterator[FakeHub]:
    with FakeHub(repositories) as hub:
        thread = threading.Thread(target=hub.serve_forever, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


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
        path = urlsplit(self.path).path
        self.server.asked.append(f"{self.command} {path}")
        for name, folder in self.server.repositories.items():
            if path.startswith(f"/api/models/{name}"):
                told = _files(folder) if "/tree/" in path else {"id": name, "sha": COMMIT, "siblings": _files(folder)}
                body = json.dumps(told).encode()
                self._begin(200, len(body), {"Content-Type": "application/json"})
                self.wfile.write(body)
                return None
            prefix = f"/{name}/resolve/"
            if path.startswith(prefix):
                file = folder / path.removeprefix(prefix).partition("/")[2]
                return self._send(file) if file.is_file() else self._refuse("EntryNotFound")
        return self._refuse("RepoNotFound")

    def _refuse(self, code: str) -> None:
        self._begin(404, 0, {"X-Error-Code": code})

    def _send(self, file: Path) -> None:
        self._begin(200, file.stat().st_size, {"X-Repo-Commit": COMMIT, "ETag": f'"{_digest(str(file))}"'})
        if self.command == "GET":
            with file.open("rb") as opened:
                shutil.copyfileobj(opened, self.wfile)

    def _begin(self, status: int, num_bytes: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for header, value in {"Content-Length": str(num_bytes), **headers}.items():
            self.send_header(header, value)
        self.end_headers()


def _files(folder: Path) -> list[dict[str, object]]:
    """As the hub lists a repository and its tree; the two listings name a file in different fields."""
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    names = [str(file.relative_to(folder)) for file in files]
    return [
        {"type": "file", "path": name, "rfilename": name, "size": file.stat().st_size, "oid": _digest(name)}
        for name, file in zip(names, files, strict=True)
    ]


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()
