"""Pictures and videos for a question: from files, from URLs, and dragged into the terminal."""

from __future__ import annotations

import base64
import shlex
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from headrace.cli import chat_files
from headrace.cli.chat_files import dragged_files, read_media
from headrace.errors import ConfigError
from headrace.types.chat import MediaPart


class Pictures(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(404 if "missing" in self.path else 200)
        self.send_header("content-type", "text/html; charset=utf-8" if "page" in self.path else "image/webp")
        self.end_headers()
        self.wfile.write(b"pixels")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def pictures() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Pictures)
    threading.Thread(target=lambda: server.serve_forever(poll_interval=0.01), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def data_url(media_type: str, data: bytes = b"pixels") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    file = tmp_path / "a 'nice' picture.png"
    file.write_bytes(b"pixels")
    return file


def test_a_file_is_read_by_its_path_or_its_url(picture: Path) -> None:
    expected = MediaPart("image", data_url("image/png"))
    assert read_media(str(picture), "image") == expected
    assert read_media(picture.as_uri(), "image") == expected


def test_a_url_is_fetched(pictures: str) -> None:
    assert read_media(f"{pictures}/a", "image") == MediaPart("image", data_url("image/webp"))


def test_what_can_not_be_shown_is_refused(
    pictures: str, picture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "notes.txt").write_text("text")
    (tmp_path / "film.mp4").write_bytes(b"frames")
    for source, message in (
        (f"{pictures}/missing", "can't be fetched: .*404"),
        (f"{pictures}/page", "is no image, but text/html"),
        ("http://127.0.0.1:9/a", "can't be fetched"),
        ("http://[::1/a", "can't be fetched"),
        (str(tmp_path / "notes.txt"), "is no image, but text/plain"),
        (str(tmp_path / "film.mp4"), "is no image, but video/mp4"),
        (str(tmp_path / "none.png"), "can't be read: No such file"),
        (str(tmp_path), "can't be read: Is a directory"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_media(source, "image")
    monkeypatch.setattr(chat_files, "_MOST_BYTES", 5)
    for source in (str(picture), f"{pictures}/a", "/dev/zero"):
        with pytest.raises(ConfigError, match="larger than 5 bytes"):
            read_media(source, "image")


@pytest.mark.parametrize("written", ["'{}'", '"{}"', "{}"])
@pytest.mark.parametrize("line", ["{} ", "What is this? {} ", "{} What is this?"])
def test_a_dragged_file_is_taken_out_of_the_line(tmp_path: Path, written: str, line: str) -> None:
    file = tmp_path / "a picture.png"
    file.write_bytes(b"pixels")
    path = str(file) if "'" in written or '"' in written else str(file).replace(" ", "\\ ")
    files, text = dragged_files(line.format(written.format(path)))
    assert files == [("image", str(file))]
    assert text == line.replace("{}", "").strip()


def test_names_with_quotes_and_urls_and_several_files_are_taken(picture: Path, tmp_path: Path) -> None:
    (tmp_path / "film.mp4").write_bytes(b"frames")
    escaped = str(picture).replace(" ", "\\ ").replace("'", "\\'")
    files, text = dragged_files(f"{escaped} {tmp_path}/film.mp4 compare")
    assert (files, text) == ([("image", str(picture)), ("video", str(tmp_path / "film.mp4"))], "compare")
    assert dragged_files(picture.as_uri()) == ([("image", picture.as_uri())], "")


def test_other_words_stay_as_they_are(picture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("text")
    (tmp_path / "small.png").write_bytes(b"pixels")
    for line in (
        "it's 5 o'clock, \"quoted\" and \\escaped",
        "what is small.png for?",
        f"{tmp_path}/notes.txt",
        f"{tmp_path}/none.png",
        f"/{'x' * 5000}.png",
        "/help",
        "~/none.png",
        f"a log\nwith {shlex.quote(str(tmp_path / 'small.png'))}",
        '"""one"""',
        "",
    ):
        assert dragged_files(line) == ((), line)
