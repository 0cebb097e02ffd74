"""Hostile and broken media over HTTP: each is refused by its place, and other requests are unaffected."""

from __future__ import annotations

import asyncio
import base64
import io
import struct
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from end_to_end.test_pictures import RED, circle, part, question
from loopback import serving
from media.test_fetch import Net, moved, ok
from media.video_files import video_file
from PIL import Image

from headrace.config import Config, EngineConfig, ModelConfig
from headrace.engine.engine import Engine
from headrace.media import fetch
from headrace.media.remote import RemoteMedia
from headrace.session.session import Session
from headrace.types.media import MediaLimits, MediaPolicy

SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><image href="file:///etc/passwd"/></svg>'
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(/etc/passwd) (r) file\n"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = Engine.launch(
        Config("miniature", ModelConfig(self_check=False), EngineConfig(max_num_seqs=8, prefix_cache="off"))
    )
    yield engine
    engine.stop()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *chunks: bytes) -> bytes:
    """A grey PNG of any size: as short as it is large. chunks: between its head and its pixels."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    squeeze, packed, left = zlib.compressobj(), [], height * (width + 1)
    while left:
        packed.append(squeeze.compress(bytes(min(left, 1 << 20))))
        left -= min(left, 1 << 20)
    pixels = b"".join([*packed, squeeze.flush()])
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(chunks) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def gif(width: int, height: int) -> bytes:
    """A GIF whose screen is small and whose picture is not."""
    screen = b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0x80, 0, 0) + bytes(6)
    return screen + b"," + struct.pack("<HHHHB", 0, 0, width, height, 0) + b"\x02\x02\x44\x01\x00;"


def jpeg() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (64, 64), RED).save(file, "JPEG")
    return file.getvalue()


def url(source: str, kind: str = "image") -> dict[str, Any]:
    return {"type": f"{kind}_url", f"{kind}_url": {"url": source}}


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def hostile() -> dict[str, dict[str, Any]]:
    """Parts of a message, by what is wrong with them."""
    return {
        "cut short": part(circle(RED)[:60]),
        "cut behind its head": part(jpeg()[:-200], media_type="image/jpeg"),
        "empty": part(b""),
        "noise": part(bytes(range(256))),
        "30,000 to 1": part(png(30_000, 1)),
        "100 million pixels": part(png(10_000, 10_000)),
        "a head that lies": part(png(4, 4).replace(struct.pack(">II", 4, 4), struct.pack(">II", 9000, 9000))),
        "a picture larger than its screen": part(gif(60_000, 60_000), media_type="image/gif"),
        "a text of 64 megabytes": part(png(40, 40, chunk(b"zTXt", b"x\0\0" + zlib.compress(bytes(1 << 26), 9)))),
        "a drawing": part(SVG, media_type="image/svg+xml"),
        "a drawing called PNG": part(SVG),
        "a program": part(EPS),
        "a page": url("data:text/html;base64," + encoded(b"<html><img src=x></html>")),
        "a video as an image": part(video_file(4, 4), media_type="video/mp4"),
        "an image as a video": part(circle(RED), "video", "video/mp4"),
        "a video without frames": part(video_file(0, 4), "video", "video/mp4"),
        "a video of one frame": part(video_file(1, 4), "video", "video/mp4"),
        "half a video": part(video_file(30, 8, form="avi")[:3000], "video", "video/avi"),
        "a list of frames, one broken": url(f"data:video/png;base64,{encoded(circle(RED))},{encoded(b'no')}", "video"),
        "a list of no frames": url("data:video/jpeg;base64,", "video"),
        "a playlist": part(b"#EXTM3U\n#EXTINF:5,\nfile:///etc/passwd\n", "video", "video/mp4"),
        "broken base64": url("data:image/png;base64,@@@"),
        "a file": url("file:///etc/passwd"),
        "a path": url("/etc/passwd"),
        "another scheme": url("gopher://a.example/x"),
        "a host that is not listed": url("http://b.example/x.png"),
        "this machine": url("http://127.0.0.1/x.png"),
        "a listed host inside": url("http://inside.example/x.png"),
        "moved inside": url("http://a.example/inside"),
        "moved to this machine": url("http://a.example/here"),
        "moved to a file": url("http://a.example/file"),
    }


MOVED = {
    "/inside": "http://inside.example/",
    "/here": "http://[::ffff:127.0.0.1]/",
    "/file": "file:///etc/passwd",
}


@pytest.mark.slow
def test_each_is_refused_by_its_place_and_nobody_beside_them_notices(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "x.png").write_bytes(circle(RED))
    net = Net(
        {"a.example": lambda request: moved(MOVED[request.url.path])(request), "inside.example": ok},
        {"inside.example": ("10.0.0.1",)},
    )
    remote = partial(RemoteMedia, resolve=net.resolve, transport=httpx.MockTransport(net.answer))
    monkeypatch.setattr(fetch, "RemoteMedia", remote)
    policy = MediaPolicy(hosts=("a.example", "inside.example"), root=tmp_path)
    session = Session.for_engine(engine, media=(policy, MediaLimits()))
    neighbours = [
        [question("hello")],
        [part(circle(RED)), question("What is in the picture?")],
        [part(png(1, 1)), question("What is in the picture?")],
        [url("x.png"), question("What is this?")],
    ]

    parts = hostile()

    async def scenario() -> None:
        async with serving(session) as address, httpx.AsyncClient(base_url=address, timeout=120) as client:

            async def ask(content: list[Any]) -> httpx.Response:
                body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 24}
                return await client.post("/v1/chat/completions", json={**body, "enable_thinking": False})

            def said(answers: list[httpx.Response]) -> list[str]:
                return [each.json()["choices"][0]["message"]["content"] for each in answers]

            alone = said([await ask(content) for content in neighbours])
            assert "red circle" in alone[1]
            beside = asyncio.gather(*(ask(content) for content in neighbours))
            refused = await asyncio.gather(*(ask([question("Look:"), each]) for each in parts.values()))
            for (name, asked), answer in zip(parts.items(), refused, strict=True):
                place = f"messages[0].content[1].{asked['type']}"
                assert answer.status_code == 400, name
                error = answer.json()["error"]
                assert error["param"] == place and place in error["message"], name
            assert said(await beside) == alone

    asyncio.run(scenario())
    assert {host for _, host, _ in net.seen} == {"a.example"}
