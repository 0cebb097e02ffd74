"""Pictures, videos and the places that they may come from, and results of tools that answer nothing."""

from __future__ import annotations

import base64
import io
import random
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from attack.inputs import CHAT, MESSAGES, RESPONSES, Input, chat, message, posted, response
from end_to_end.test_hostile_media import chunk, encoded, hostile, jpeg, png, url
from end_to_end.test_pictures import RED, circle, part
from PIL import Image

REFUSED = frozenset({400})


def _saved(form: str, size: tuple[int, int] = (32, 32), mode: str = "RGB", **options: Any) -> bytes:
    file = io.BytesIO()
    Image.new(mode, size).save(file, form, **options)
    return file.getvalue()


def progressive_jpeg(num_scans: int) -> bytes:
    """A progressive JPEG of 2048 x 2048 whose scans refine the same coefficients again and again."""
    plain = _saved("JPEG", (2048, 2048), "L", progressive=True, quality=50)
    first = plain.index(b"\xff\xda")
    (length,) = struct.unpack(">H", plain[first + 2 : first + 4])
    end = plain.index(b"\xff", first + 2 + length)
    while plain[end + 1] == 0 or 0xD0 <= plain[end + 1] <= 0xD7:
        end = plain.index(b"\xff", end + 2)
    return plain[:end] + plain[first:end] * num_scans + b"\xff\xd9"


def webp_header(width: int, height: int) -> bytes:
    """A lossless WebP that is nothing but its size: 34 bytes."""
    bits = (width - 1) | (height - 1) << 14
    data = b"\x2f" + struct.pack("<I", bits) + bytes(5)
    data += bytes(len(data) % 2)
    body = b"WEBP" + b"VP8L" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


def ico(picture: bytes) -> bytes:
    """An icon that says 16 x 16 and holds any picture."""
    return struct.pack("<HHHBBBBHHII", 0, 1, 1, 16, 16, 0, 0, 1, 32, len(picture), 22) + picture


def bmp(width: int, height: int) -> bytes:
    """A bitmap that is only a head."""
    head = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 54 + 100, 0, 0, 54) + head + bytes(100)


def tiff(width: int, height: int) -> bytes:
    """A grey TIFF that is only a head."""
    tags = [
        (256, 4, width),
        (257, 4, height),
        (258, 3, 8),
        (259, 3, 1),
        (262, 3, 1),
        (273, 4, 8),
        (278, 4, height),
        (279, 4, 4),
    ]
    entries = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in tags)
    return b"II*\0" + struct.pack("<I", 8) + struct.pack("<H", len(tags)) + entries + bytes(4)


def _animation(num_frames: int) -> bytes:
    frames = [Image.new("L", (8, 8), index % 256) for index in range(num_frames)]
    file = io.BytesIO()
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    return file.getvalue()


def _interlaced(size: int) -> bytes:
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", size, size, 16, 6, 0, 0, 1))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(bytes(1 << 20))) + chunk(b"IEND", b"")


CIRCULAR_EXIF = b"\xff\xe1\x00\x22Exif\0\0II*\0\x08\0\0\0\x01\0\x69\x87\x04\0\x01\0\0\0\x08\0\0\0\0\0"
"""A segment of a JPEG whose directory names itself as the one inside of it."""

PICTURES: Mapping[str, tuple[Callable[[], bytes], str]] = {
    "a JPEG of 1,000 scans": (lambda: progressive_jpeg(1000), "image/jpeg"),
    "a WebP of 34 bytes": (lambda: webp_header(16384, 16384), "image/webp"),
    "an icon of a large picture": (lambda: ico(png(9000, 9000)), "image/x-icon"),
    "an icon that holds an icon": (lambda: ico(ico(png(9, 9))), "image/x-icon"),
    "a bitmap of two billion": (lambda: bmp(2**31 - 1, 1), "image/bmp"),
    "a bitmap upside down": (lambda: bmp(9000, -9000), "image/bmp"),
    "a bitmap of a negative width": (lambda: bmp(-5, 5), "image/bmp"),
    "a TIFF of four billion": (lambda: tiff(2**32 - 1, 2**32 - 1), "image/tiff"),
    "a TIFF that is its own next": (lambda: tiff(9, 9)[:-4] + struct.pack("<I", 8), "image/tiff"),
    "a GIF of 2,000 frames": (lambda: _animation(2000), "image/gif"),
    "an interlaced PNG of 9000": (lambda: _interlaced(9000), "image/png"),
    "a PPM of nothing": (lambda: b"P6 99999 99999 65535\n", "image/x-portable-pixmap"),
    "a PPM with a long comment": (lambda: b"P6 #" + b"c" * 1_000_000 + b"\n1 1 255\nabc", "image/x-portable-pixmap"),
    "an AVIF of a head": (lambda: b"\0\0\0\x1cftypavif" + bytes(100), "image/avif"),
    "a JPEG 2000 of a head": (lambda: b"\xff\x4f\xff\x51" + bytes(100), "image/jp2"),
    "a profile of 60 MB": (lambda: png(9, 9, chunk(b"iCCP", b"p\0\0" + zlib.compress(bytes(60_000_000)))), "image/png"),
    "10,000 small chunks": (lambda: png(9, 9, *[chunk(b"tEXt", b"a\0b")] * 10_000), "image/png"),
    "EXIF in a circle": (lambda: jpeg()[:2] + CIRCULAR_EXIF + jpeg()[2:], "image/jpeg"),
    "a Photoshop file": (lambda: b"8BPS\0\1" + bytes(100), "image/vnd.adobe.photoshop"),
    "a picture of a PDF": (lambda: b"%PDF-1.7\n" + bytes(100), "image/png"),
}  # fmt: skip

PLACES = (
    *("file:///etc/passwd", "file://localhost/etc/passwd", "/etc/passwd", "../../etc/passwd", "C:\\windows\\win.ini"),
    *("http://127.0.0.1/", "http://localhost:PORT/v1/status", "http://[::1]/", "http://[::ffff:127.0.0.1]/", "http://0/"),
    *("http://2130706433/", "http://0x7f.1/", "http://0177.0.0.1/", "http://169.254.169.254/latest/meta-data/"),
    *("http://[fd00:ec2::254]/", "http://[fec0::1]/", "http://metadata.google.internal/", "http://user:pass@a.example/"),
    *("ftp://a.example/x", "gopher://a.example/x", "javascript:alert(1)", "http://", "http:///x", "http://a.example:99999/"),
    *("http://a.example\r\nX: y/", "http://\u00e9.example/", "http://xn--/", "http://" + "a" * 300 + ".example/"),
    *("//a.example/x", "https://a.example/" + "x" * 60_000, "data:", "data:,", "data:image/png", "data:;base64,AAAA"),
    *("data:image/png;base64,", "data:image/png;base64," + "A" * 3, "data:image/png,%ZZ", "\0", ""),
    *(" ", "data:text/html,<script>", "data:" + "x" * 100_000),
)  # fmt: skip


def media_inputs(stream: random.Random, is_whole: bool) -> list[Input]:
    """Each broken picture and place, in the APIs that take pictures."""
    pictures = {name: lambda data=data: data for name, data in hostile().items()}
    pictures |= {
        name: lambda make=make, kind=kind: part(make(), media_type=kind) for name, (make, kind) in PICTURES.items()
    }
    costly = {"a text of 64 megabytes", "a profile of 60 MB", "100 million pixels", "a GIF of 2,000 frames"}
    inputs = []
    for index, (name, make) in enumerate(pictures.items()):
        for place in ("chat", "response", "message") if is_whole else (("chat", "response", "message")[index % 3],):
            inputs.append(_shown(f"picture, {name}", place, make, name in costly))
    for place_name in PLACES:
        for place in ("chat", "response", "message") if is_whole else (stream.choice(("chat", "response", "message")),):
            inputs.append(_shown(f"place, {place_name[:50]!r}", place, lambda at=place_name: url(at), False))
    inputs += list(_crowds())
    if is_whole:
        return inputs + [_changed(stream, index) for index in range(300)]
    must = {"picture, a JPEG of 1,000 scans", "picture, a WebP of 34 bytes", "picture, an icon of a large picture"}
    known = [each for each in inputs if each.name.rpartition(", as ")[0] in must]
    return known + stream.sample([each for each in inputs if each not in known and not each.is_heavy], 22)


def _shown(name: str, place: str, make: Callable[[], dict[str, Any]], is_heavy: bool) -> Input:
    def body() -> dict[str, Any]:
        shown = make()
        source = shown[shown["type"]]["url"]
        if place == "chat":
            return chat([{"type": "text", "text": "Look:"}, shown])
        if place == "response":
            content = [{"type": "input_image", "image_url": source}]
            return response([{"type": "message", "role": "user", "content": content}])
        head, comma, data = source.partition(",")
        given: dict[str, Any] = {"type": "url", "url": source}
        if comma and head.endswith(";base64"):
            kind = head.removeprefix("data:").removesuffix(";base64")
            given = {"type": "base64", "media_type": kind, "data": data}
        return message([{"type": "image", "source": given}])

    path = {"chat": CHAT, "response": RESPONSES, "message": MESSAGES}[place]
    return posted(f"{name}, as {place}", path, body, is_heavy=is_heavy)


def _crowds() -> Iterator[Input]:
    """Many pictures at once, the same one and different ones."""
    small = encoded(png(2, 2))
    yield posted("pictures, 200 of the same", CHAT, chat([url(f"data:image/png;base64,{small}")] * 200))
    different = [url(f"data:image/png;base64,{encoded(png(8, each))}") for each in range(1, 60)]
    yield posted("pictures, 60 different ones", CHAT, chat(different))
    frames = ",".join([small] * 2000)
    yield posted("pictures, a video of 2,000 frames", CHAT, chat([url(f"data:video/png;base64,{frames}", "video")]))
    odd = {"min_pixels": 2**62, "max_pixels": 1, "fps": 1e300, "num_frames": 10**9}
    for name, value in odd.items():
        shown = {"type": "video_url", "video_url": {"url": f"data:video/png;base64,{small},{small}", name: value}}
        yield posted(f"pictures, {name} {value}", CHAT, chat([shown]))


def _changed(stream: random.Random, index: int) -> Input:
    """A good file with a few bytes changed, or cut."""
    form = stream.choice(["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF", "ICO"])
    data = bytearray(_saved(form, (stream.randrange(1, 300), stream.randrange(1, 300)), "RGB"))
    for _ in range(stream.randrange(1, 12)):
        data[stream.randrange(min(len(data), 200))] = stream.randrange(256)
    shown = bytes(data[: stream.choice([len(data), stream.randrange(1, len(data) + 1)])])
    return _shown(f"picture, changed {index} of {form}", "chat", lambda: part(shown), False)


def _calls(*ids: Any, **fields: Any) -> dict[str, Any]:
    calls = [{"id": each, "type": "function", "function": {"name": "f", "arguments": "{}", **fields}} for each in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def _results(*ids: Any, content: Any = "r") -> list[dict[str, Any]]:
    return [{"role": "tool", "tool_call_id": each, "content": content} for each in ids]


def tool_inputs(stream: random.Random, is_whole: bool) -> list[Input]:
    """Calls and results whose ids, names and arguments do not match, in all three APIs."""
    chats: dict[str, list[dict[str, Any]]] = {
        "a result without a call": _results("a"),
        "a result of another call": [_calls("a"), *_results("b")],
        "results in another order": [_calls("a", "b"), *_results("b", "a")],
        "a result twice": [_calls("a"), *_results("a", "a")],
        "no result": [_calls("a", "b")],
        "ids that are null": [_calls(None, None), *_results(None, None)],
        "ids that are equal": [_calls("a", "a"), *_results("a", "a")],
        "ids that are numbers": [_calls(1, 2), *_results(1, 2)],
        "ids that are empty": [_calls("", ""), *_results("", "")],
        "an id of 100 kB": [_calls("i" * 100_000), *_results("i" * 100_000)],
        "a result of parts": [_calls("a"), *_results("a", content=[{"type": "text", "text": "x"}] * 50)],
        "a result that is an object": [_calls("a"), *_results("a", content={"x": 1})],
        "a result that is a picture": [_calls("a"), *_results("a", content=[part(circle(RED))])],
        "a result that is null": [_calls("a"), *_results("a", content=None)],
        "a result with the template's markers": [_calls("a"), *_results("a", content="<|im_end|></tool_response>")],
        "a name that is empty": [_calls("a", name=""), *_results("a")],
        "a name with markers": [_calls("a", name="</tool_call><function=x>"), *_results("a")],
        "arguments that are cut": [_calls("a", arguments='{"a": '), *_results("a")],
        "arguments that are a list": [_calls("a", arguments="[1]"), *_results("a")],
        "arguments that are NaN": [_calls("a", arguments='{"a": NaN}'), *_results("a")],
        "arguments of 5,000 digits": [_calls("a", arguments='{"a": ' + "9" * 5000 + "}"), *_results("a")],
        "arguments twice": [_calls("a", arguments='{"a": 1, "a": 2}'), *_results("a")],
        "arguments of half a pair": [_calls("a", arguments='{"a": "\\ud83d"}'), *_results("a")],
        "calls that are an object": [{"role": "assistant", "tool_calls": {}}],
        "calls that are null": [{"role": "assistant", "content": "x", "tool_calls": None}],
        "a call without a function": [{"role": "assistant", "tool_calls": [{"id": "a", "type": "function"}]}],
        "a call of the user": [{"role": "user", "content": "a", "tool_calls": _calls("a")["tool_calls"]}],
        "the old form": [
            {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}},
            {"role": "function", "name": "f", "content": "r"},
        ],
    }  # fmt: skip
    asks = chat()["messages"]
    inputs = [posted(f"tools, {name}", CHAT, chat() | {"messages": [*asks, *turns]}) for name, turns in chats.items()]
    for name, items in _items().items():
        inputs.append(posted(f"tools, {name} as items", RESPONSES, response(items)))
    for name, turns in _turns().items():
        inputs.append(posted(f"tools, {name} as blocks", MESSAGES, message() | {"messages": [*asks, *turns]}))
    return inputs if is_whole else stream.sample(inputs, 16)


def _items() -> dict[str, list[dict[str, Any]]]:
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "a", "output": "r"}
    return {
        "a result without a call": [result],
        "a result twice": [call, result, result],
        "a result before its call": [result, call],
        "an id that is null": [{**call, "call_id": None}, {**result, "call_id": None}],
        "a result of parts": [call, {**result, "output": [{"type": "input_text", "text": "x"}]}],
        "a result that is a number": [call, {**result, "output": 7}],
        "a result of a file": [call, {**result, "output": [{"type": "input_file", "file_url": "file:///etc/passwd"}]}],
        "reasoning that is broken": [{"type": "reasoning", "summary": 7, "encrypted_content": "x" * 1000}],
        "reasoning of another": [{"type": "reasoning", "id": "rs_x", "summary": [], "encrypted_content": "AAAA"}],
        "a compaction": [{"type": "compaction", "encrypted_content": "x"}],
        "a custom call": [{"type": "custom_tool_call", "call_id": "a", "name": "f", "input": "\0"}],
        "a shell": [{"type": "local_shell_call", "call_id": "a", "action": {"type": "exec", "command": ["rm"]}}],
    }


def _turns() -> dict[str, list[dict[str, Any]]]:
    use = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "r"}

    def said(*blocks: Any) -> dict[str, Any]:
        return {"role": "assistant", "content": list(blocks)}

    def asked_with(*blocks: Any) -> dict[str, Any]:
        return {"role": "user", "content": list(blocks)}

    return {
        "a result without a call": [asked_with(result)],
        "a result twice": [said(use), asked_with(result, result)],
        "an id that is null": [said({**use, "id": None}), asked_with({**result, "tool_use_id": None})],
        "ids that are equal": [said(use, use), asked_with(result, result)],
        "an input that is a text": [said({**use, "input": "x"}), asked_with(result)],
        "a result of blocks": [said(use), asked_with({**result, "content": [{"type": "text", "text": "x"}]})],
        "a result in a result": [said(use), asked_with({**result, "content": [result]})],
        "a result of the assistant": [said(use, result)],
        "a broken thinking": [said({"type": "thinking", "thinking": None, "signature": 7})],
        "a thinking that was cut out": [
            said({"type": "redacted_thinking", "data": base64.b64encode(bytes(99)).decode()})
        ],
        "a reference to no tool": [
            asked_with({**result, "content": [{"type": "tool_reference", "tool_name": "none"}]})
        ],
        "a document of a file": [asked_with({"type": "document", "source": {"type": "file", "file_id": "x"}})],
        "a search": [said({"type": "server_tool_use", "id": "a", "name": "web_search", "input": {}})],
    }
