"""What reaches the server before there is a request: framing, headers, paths, keys, and connections that break."""

from __future__ import annotations

import base64
import json
import random
import socket
import time
from collections.abc import Mapping
from typing import Any

from attack.inputs import CHAT, DIALECTS, RESPONSES, Input, Reply, asked, chat, posted, raw, raw_replies, response, send
from attack.running import KEY, RunningServer

BODY = json.dumps(chat()).encode()
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: HOST\r\nConnection: close\r\n"
PLAIN = HEAD + b"Content-Type: application/json\r\nContent-Length: " + str(len(BODY)).encode() + b"\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
UPGRADE = b"GET /health HTTP/1.1\r\nHost: HOST\r\nConnection: Upgrade"
GET = b"GET /health HTTP/1.1\r\nHost: HOST\r\nConnection: close\r\n"


def _chunked(*chunks: bytes) -> bytes:
    return HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(chunks)


def _chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def _lengths(*values: bytes) -> bytes:
    return HEAD + b"".join(b"Content-Length: " + value + b"\r\n" for value in values) + b"\r\n" + BODY


FRAMES: Mapping[str, bytes] = {
    "a length and chunks": HEAD + b"Content-Length: 4\r\n" + CHUNKED + b"\r\n" + _chunk(BODY) + b"0\r\n\r\n",
    "chunks and a length": HEAD + CHUNKED + b"Content-Length: 4\r\n\r\n" + _chunk(BODY) + b"0\r\n\r\n",
    "two lengths": _lengths(b"5", b"50"),
    "equal lengths": _lengths(str(len(BODY)).encode(), str(len(BODY)).encode()),
    "a list of lengths": _lengths(b"5, 5"),
    "a negative length": _lengths(b"-1"),
    "a length with a sign": _lengths(b"+5"),
    "a hexadecimal length": _lengths(b"0x10"),
    "a huge length": _lengths(b"9" * 30),
    "a length that is none": _lengths(b"many"),
    "chunks of nothing": _chunked(b"\r\n\r\n"),
    "a chunk that is no number": _chunked(b"xyz\r\n"),
    "a chunk of a negative size": _chunked(b"-5\r\nabcde\r\n0\r\n\r\n"),
    "a chunk of a huge size": _chunked(b"ffffffffffffffffffff\r\n"),
    "a chunk that is longer than it says": _chunked(b"2\r\nabcdef\r\n0\r\n\r\n"),
    "chunks of one byte": _chunked(*(_chunk(BODY[index : index + 1]) for index in range(len(BODY))), b"0\r\n\r\n"),
    "an extension of a chunk of 100 kB": _chunked(b"5;" + b"x" * 100_000 + b"\r\nabcde\r\n0\r\n\r\n"),
    "trailers": _chunked(_chunk(BODY), b"0\r\nContent-Length: 5\r\nX: y\r\n\r\n"),
    "an unknown coding": HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + _chunk(BODY) + b"0\r\n\r\n",
    "a coding in other letters": HEAD + b"Transfer-Encoding: xchunked\r\n\r\n" + _chunk(BODY) + b"0\r\n\r\n",
    "a header of 100 kB": GET + b"X: " + b"a" * 100_000 + b"\r\n\r\n",
    "10,000 headers": GET + b"".join(b"X%d: a\r\n" % index for index in range(10_000)) + b"\r\n",
    "a zero in a header": GET + b"X: a\0b\r\n\r\n",
    "a folded header": GET + b"X: a\r\n  b\r\n\r\n",
    "a blank before the colon": GET + b"X : a\r\n\r\n",
    "a header without a colon": GET + b"nothing\r\n\r\n",
    "a header without a name": GET + b": a\r\n\r\n",
    "bytes in a header": GET + bytes(range(128, 256)).join((b"X: ", b"\r\n\r\n")),
    "line feeds only": GET.replace(b"\r\n", b"\n") + b"\n",
    "carriage returns only": GET.replace(b"\r\n", b"\r") + b"\r",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /health HTTP/1.1\r\nHost: HOST\r\nHost: evil.example\r\n\r\n",
    "another host": b"GET /v1/models HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n",
    "a host that is none": b"GET /v1/models HTTP/1.1\r\nHost: [:::]:x\r\nConnection: close\r\n\r\n",
    "an absolute target": b"GET http://evil.example/v1/models HTTP/1.1\r\nHost: HOST\r\nConnection: close\r\n\r\n",
    "an authority": b"CONNECT evil.example:443 HTTP/1.1\r\nHost: evil.example\r\n\r\n",
    "an asterisk": b"OPTIONS * HTTP/1.1\r\nHost: HOST\r\nConnection: close\r\n\r\n",
    "no path": b"GET  HTTP/1.1\r\nHost: HOST\r\n\r\n",
    "a path of 60 kB": b"GET /" + b"a" * 60_000 + b" HTTP/1.1\r\nHost: HOST\r\nConnection: close\r\n\r\n",
    "bytes in a path": b"GET /\xff\xfe\x80 HTTP/1.1\r\nHost: HOST\r\nConnection: close\r\n\r\n",
    "HTTP/0.9": b"GET /health\r\n\r\n",
    "HTTP/1.0": b"GET /health HTTP/1.0\r\n\r\n",
    "HTTP/9.9": b"GET /health HTTP/9.9\r\nHost: HOST\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(100),
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)) * 2,
    "noise": bytes(range(256)) * 40,
    "a method of 10 kB": b"G" * 10_000 + b" / HTTP/1.1\r\nHost: HOST\r\n\r\n",
    "a lower method": b"get /health HTTP/1.1\r\nHost: HOST\r\nConnection: close\r\n\r\n",
    "an upgrade to a socket": UPGRADE + b"\r\nUpgrade: websocket\r\nSec-WebSocket-Key: eA==\r\n\r\n",
    "an upgrade to HTTP/2": UPGRADE + b", HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n\r\n",
    "an expectation": PLAIN + b"Expect: 100-continue\r\n\r\n" + BODY,
    "an unknown expectation": PLAIN + b"Expect: a miracle\r\n\r\n" + BODY,
    "a body of a GET": GET + b"Content-Length: 5\r\n\r\nabcde",
    "two requests in one": PLAIN.replace(b"Connection: close\r\n", b"") + b"\r\n" + BODY + GET + b"\r\n",
    "a hundred requests at once": GET.replace(b"Connection: close\r\n", b"\r\n") * 100,
    "a coded body": PLAIN + b"Content-Encoding: gzip\r\n\r\n" + BODY,
    "another media type": PLAIN.replace(b"application/json", b"text/plain; charset=utf-16") + b"\r\n" + BODY,
    "half a head": HEAD,
    "half a body": PLAIN + b"\r\n" + BODY[:10],
    "nothing": b"",
}  # fmt: skip


def wire_inputs(stream: random.Random, is_whole: bool) -> list[Input]:
    """Bytes that are no request of an ordinary client, whole and cut at any place."""
    waiting = {
        "half a head",
        "half a body",
        "nothing",
        "carriage returns only",
        "a huge length",
        "noise",
        "TLS",
        "a chunk of a huge size",
    }
    inputs = [
        raw(
            f"frame, {name}", frame, wait_s=1.0 if name in waiting else 3.0, num_answers=100 if "hundred" in name else 1
        )
        for name, frame in FRAMES.items()
    ]
    for index in range(150 if is_whole else 4):
        name = stream.choice(list(FRAMES))
        frame = bytearray(FRAMES[name] or GET)
        for _ in range(stream.randrange(1, 4)):
            frame[stream.randrange(min(len(frame), 300))] = stream.randrange(256)
        cut = bytes(frame[: stream.randrange(1, len(frame) + 1)])
        inputs.append(raw(f"frame, changed {index}: {name}", cut, wait_s=0.5))
    return inputs if is_whole else stream.sample(inputs, 26)


def path_inputs(stream: random.Random, is_whole: bool) -> list[Input]:
    """Paths that lead out, nowhere or twice to the same place, and methods that a route does not take."""
    paths = (
        *("/", "//", "/v1", "/v1/", "/v1//chat/completions", "/v1/v1/chat/completions", "/chat/completions"),
        *("/v1/chat/completions/", "/V1/CHAT/COMPLETIONS", "/v1/chat/completions%00", "/v1/chat%2Fcompletions"),
        *("/../../etc/passwd", "/v1/models/../../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/..%5c..%5cwindows"),
        *("/v1/models/%2e%2e", "/v1/models/a/b/c/d", "/v1/models/", "/health/", "/health?x=" + "y" * 5000, "/health#x"),
        *(
            "/metrics?name[]=a",
            "/v1/status?%",
            "/v1/cache?x=%ff",
            "/.git/config",
            "/favicon.ico",
            "/robots.txt",
            "/docs",
        ),
        *("/openapi.json", "/v1/files", "/v1/embeddings", "/api/generate", "/v1/chat/completions/chatcmpl-1"),
        *("/tokenizer_info", "/v1/messages/batches", "/v1/responses", "/v1/responses/", "/v1/responses//cancel"),
    )
    inputs = [asked(f"path, GET {path[:60]}", "GET", path) for path in paths]
    routes = ("/health", "/v1/status", "/v1/cache", "/metrics", "/v1/models", "/tokenize", CHAT, RESPONSES)
    for method in ("HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND", "X" * 200):
        inputs += [asked(f"path, {method[:10]} {route}", method, route) for route in routes if route != "/v1/cache"]
    inputs.append(
        asked("path, an origin", "GET", "/v1/models", {"Origin": "https://evil.example"}, statuses=frozenset({403}))
    )
    inputs.append(posted("path, a body for status", "/v1/status", b"x" * 1000))
    return inputs if is_whole else stream.sample(inputs, 14)


def credential_inputs(stream: random.Random, is_whole: bool) -> list[Input]:
    """For a server with a key: no other key opens it, in whatever way it is sent."""
    refused = frozenset({400, 401, 431})
    wrong: dict[str, bytes] = {
        "none": b"",
        "a wrong one": b"Authorization: Bearer wrong\r\n",
        "an empty one": b"Authorization: Bearer \r\n",
        "an empty header": b"x-api-key:\r\n",
        "a beginning": b"x-api-key: " + KEY[:-1].encode() + b"\r\n",
        "one with more behind": b"x-api-key: " + KEY.encode() + b"x\r\n",
        "in other letters": b"x-api-key: " + KEY.upper().encode() + b"\r\n",
        "another scheme": b"Authorization: Basic " + base64.b64encode(b"x:" + KEY.encode()) + b"\r\n",
        "bytes": b"Authorization: Bearer \xff\xfe\xc3\xa9\r\n",
        "100 kB": b"Authorization: Bearer " + b"x" * 100_000 + b"\r\n",
        "a cookie": b"Cookie: key=" + KEY.encode() + b"\r\n",
        "a proxy's": b"Proxy-Authorization: Bearer " + KEY.encode() + b"\r\n",
        "a right one and a wrong one": b"Authorization: Bearer " + KEY.encode() + b"\r\nx-api-key: wrong\r\n",
        "a wrong one and a right one": b"Authorization: Bearer wrong\r\nx-api-key: " + KEY.encode() + b"\r\n",
        "right and wrong twice": b"x-api-key: " + KEY.encode() + b"\r\nx-api-key: wrong\r\n",
        "wrong and right twice": b"x-api-key: wrong\r\nx-api-key: " + KEY.encode() + b"\r\n",
    }
    paths = ("/v1/models", "/metrics", "/v1/status", "/v1/cache", "/nowhere", "/v1/responses/x", "/health/../v1/models")
    inputs = []
    for index, (name, header) in enumerate(wrong.items()):
        for path in paths if is_whole else (paths[index % len(paths)],):
            head = f"GET {path} HTTP/1.1\r\nHost: HOST\r\nConnection: close\r\n".encode()
            inputs.append(raw(f"key, {name}, for {path}", head + header + b"\r\n", statuses=refused))
    url = f"/v1/models?key={KEY}&api_key={KEY}".replace(" ", "%20")
    inputs.append(raw("key, in the URL", f"GET {url} HTTP/1.1\r\nHost: HOST\r\n\r\n".encode(), statuses=refused))
    for dialect in DIALECTS.values():
        large = {"x-api-key": "wrong"}
        inputs.append(
            posted(f"key, wrong, for a body to {dialect.path}", dialect.path, dialect.body(), large, statuses=refused)
        )
    inputs.append(posted("key, wrong, 8 MB", CHAT, chat("x" * 8_000_000), {"x-api-key": "w"}, statuses=refused))
    right = {"Authorization": f"bEaReR   {KEY}", "x-api-key": KEY}
    inputs.append(posted("key, right in both ways", CHAT, chat(), right, statuses=frozenset({200})))
    return inputs


def session_inputs(stream: random.Random, is_whole: bool) -> list[Input]:
    """Sessions, salts and request ids of all kinds, many of them at once."""
    odd = ("", " ", "x" * 8000, "\u00e9", "a,b", "'\"<>", "..", "\t", "%00", "null")
    inputs = []
    for value in odd:
        for name in ("x-session-id", "x-claude-code-session-id", "session-id", "x-request-id", "traceparent"):
            sent = {name: value.encode().decode("latin-1")}
            inputs.append(posted(f"session, {value[:10]!r} as {name}", CHAT, chat(), sent))
    salts: tuple[Any, ...] = ("", " ", "s" * 1_000_000, 7, None, [], "\0", "\ud83d", "e\u0301")
    for dialect in ("chat", "completion", "response", "message"):
        route = DIALECTS[dialect]
        for salt in salts:
            inputs.append(posted(f"salt, {str(salt)[:10]!r} of a {dialect}", route.path, route.body(cache_salt=salt)))
    inputs.append(Input("a thousand sessions", _thousand_sessions, is_heavy=True))
    return inputs if is_whole else stream.sample(inputs, 10)


def _thousand_sessions(server: RunningServer) -> list[Reply]:
    body = json.dumps(chat(max_tokens=1)).encode()
    return [send(server, "POST", CHAT, body, {"x-session-id": f"s{index}"}) for index in range(1000)]


def connection_inputs(stream: random.Random, is_whole: bool) -> list[Input]:
    """Streams that are cut and begun again, readers that read slowly or not at all, senders that stop in the middle."""
    inputs = [
        Input("cut, after the first event", lambda server: _cut(server, 1)),
        Input("cut, before the answer", lambda server: _cut(server, 0)),
        Input("cut, and begun again five times", lambda server: [each for _ in range(5) for each in _cut(server, 1)]),
        Input("cut, a stored response", _cut_and_fetched),
        Input("slow, a reader that stops", lambda server: _slow_reader(server, 1.0)),
        Input("slow, a sender of single bytes", _slow_sender, may_close=True),
        Input("cut, 50 connections without a word", lambda server: _silent(server, 50)),
        Input("cut, 700 connections without a word", lambda server: _silent(server, 700), is_heavy=True),
        Input("cut, in the middle of a body", _half_body, may_close=True),
    ]
    for index in range(60 if is_whole else 2):
        num_events, dialect = stream.randrange(4), stream.choice(["chat", "completion", "response", "message"])
        inputs.append(
            Input(
                f"cut, {index}: a {dialect} after {num_events}",
                lambda server, num_events=num_events, dialect=dialect: _cut(server, num_events, dialect),
            )
        )
    return inputs


def head_of(server: RunningServer, path: str, body: bytes) -> bytes:
    host = "{}:{}".format(*server.address)
    key = f"Authorization: Bearer {server.key}\r\n" if server.key is not None else ""
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\n{key}Connection: close\r\nContent-Length: {len(body)}"
    return f"{head}\r\n\r\n".encode()


def _cut(server: RunningServer, num_events: int, dialect: str = "chat") -> list[Reply]:
    route = DIALECTS[dialect]
    body = json.dumps(route.body("Tell me a long story.", stream=True) | _long(dialect)).encode()
    answer = b""
    with socket.create_connection(server.address, timeout=30) as connection:
        connection.sendall(head_of(server, route.path, body) + body)
        while answer.count(b"data: ") < num_events and (more := connection.recv(65536)):
            answer += more
    return raw_replies(answer) if num_events else []


def _long(dialect: str) -> dict[str, Any]:
    return {"max_output_tokens" if dialect == "response" else "max_tokens": 400}


def _cut_and_fetched(server: RunningServer) -> list[Reply]:
    """A response whose client goes away, asked for afterwards by its id."""
    body = json.dumps(response("Tell me a long story.", stream=True, max_output_tokens=400)).encode()
    answer = b""
    with socket.create_connection(server.address, timeout=30) as connection:
        connection.sendall(head_of(server, RESPONSES, body) + body)
        while b'"id":"resp_' not in answer and (more := connection.recv(65536)):
            answer += more
    response_id = answer.partition(b'"id":"')[2].partition(b'"')[0].decode()
    paths = (f"{RESPONSES}/{response_id}", f"{RESPONSES}/{response_id}/input_items")
    fetched = [send(server, "GET", path) for path in paths]
    return [*fetched, send(server, "POST", f"{paths[0]}/cancel"), send(server, "DELETE", paths[0])]


def _slow_reader(server: RunningServer, pause_s: float) -> list[Reply]:
    body = json.dumps(chat("Tell me a long story.", stream=True, max_tokens=300, n=8, logprobs=True, top_logprobs=20))
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(30)
        connection.connect(server.address)
        connection.sendall(head_of(server, CHAT, body.encode()) + body.encode())
        answer = connection.recv(1000)
        time.sleep(pause_s)
    return raw_replies(answer)


def _slow_sender(server: RunningServer) -> list[Reply]:
    body = json.dumps(chat()).encode()
    answer = b""
    with socket.create_connection(server.address, timeout=30) as connection:
        for byte in head_of(server, CHAT, body) + body:
            connection.sendall(bytes([byte]))
            time.sleep(0.003)
        while b"choices" not in answer and (more := connection.recv(65536)):
            answer += more
    return raw_replies(answer)


def _silent(server: RunningServer, num: int) -> list[Reply]:
    connections = [socket.create_connection(server.address, timeout=10) for _ in range(num)]
    for connection in connections:
        connection.close()
    return []


def _half_body(server: RunningServer) -> list[Reply]:
    body = json.dumps(chat()).encode()
    with socket.create_connection(server.address, timeout=10) as connection:
        connection.sendall(head_of(server, CHAT, body) + body[:20])
        connection.shutdown(socket.SHUT_WR)
        try:
            answer = connection.recv(65536)
        except OSError:
            answer = b""
    return raw_replies(answer)
