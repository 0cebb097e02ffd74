"""The page's static files, as the server sends them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

_FOLDER = Path(__file__).parent

_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    data: bytes
    media_type: str
    etag: str


def page_files() -> Mapping[str, PageFile]:
    """All files by name. The page itself is index.html."""
    paths = (path for path in _FOLDER.iterdir() if path.suffix in _MEDIA_TYPES)
    return {path.name: _read(path) for path in paths}


def _read(path: Path) -> PageFile:
    data = path.read_bytes()
    return PageFile(data, _MEDIA_TYPES[path.suffix], f'"{sha256(data).hexdigest()[:32]}"')
