"""Very many small requests, some of which are broken off and some of which are wrong."""

from __future__ import annotations

import http.client
import json
import random
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from attack.inputs import CHAT, DETOKENIZE, DIALECTS, chat
from attack.running import RunningServer
from attack.wire_inputs import head_of

SHARE_BROKEN_OFF = 0.10
SHARE_INVALID = 0.05

_NUM_CLIENTS = 4
# Prompts come again, as those of agents do: what the prefix cache keeps of them does not grow.
_NUM_TEXTS = 6


def send_many(server: RunningServer, num_requests: int, seed: int) -> dict[int, int]:
    """Sends them from a few clients side by side. Gives how often each status came; 0 for those broken off."""
    shares = [num_requests // _NUM_CLIENTS] * _NUM_CLIENTS
    with ThreadPoolExecutor(_NUM_CLIENTS) as pool:
        counts = list(
            pool.map(lambda each: _client(server, shares[each], random.Random(seed + each)), range(_NUM_CLIENTS))
        )
    return {
        status: sum(count.get(status, 0) for count in counts) for status in {key for count in counts for key in count}
    }


def _client(server: RunningServer, num_requests: int, stream: random.Random) -> dict[int, int]:
    counts: dict[int, int] = {}
    connection = http.client.HTTPConnection(*server.address, timeout=60)
    for _ in range(num_requests):
        kind = stream.random()
        if kind < SHARE_BROKEN_OFF:
            _break_off(server, stream)
            status = 0
        else:
            path, body = _invalid(stream) if kind < SHARE_BROKEN_OFF + SHARE_INVALID else _valid(stream)
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            status = answer.status
        counts[status] = counts.get(status, 0) + 1
    connection.close()
    return counts


def _valid(stream: random.Random) -> tuple[str, bytes]:
    text = f"Say {stream.randrange(_NUM_TEXTS)}."
    bodies: dict[str, dict[str, Any]] = {
        "chat": {"max_tokens": 2},
        "completion": {"max_tokens": 2},
        "response": {"max_output_tokens": 2},
        "message": {"max_tokens": 2},
        "tokenize": {},
    }
    name = stream.choice(list(bodies))
    if name != "tokenize" and stream.random() < 0.3:
        bodies[name]["stream"] = True
    if name == "chat" and stream.random() < 0.2:
        bodies[name]["guided_regex"] = f"[a-z]{{{stream.randrange(1, 9)}}}"
    return DIALECTS[name].path, json.dumps(DIALECTS[name].body(text, **bodies[name])).encode()


def _invalid(stream: random.Random) -> tuple[str, bytes]:
    return stream.choice(
        [
            (CHAT, b"{"),
            (CHAT, b'{"messages": []}'),
            (CHAT, json.dumps(chat(temperature=-1)).encode()),
            (CHAT, json.dumps(chat(guided_regex="(")).encode()),
            (DETOKENIZE, b'{"tokens": [-1]}'),
            ("/nowhere", b"{}"),
        ]
    )


def _break_off(server: RunningServer, stream: random.Random) -> None:
    """Goes away during the request, before its answer or after the first bytes of it."""
    body = json.dumps(chat(f"Tell {stream.randrange(_NUM_TEXTS)}.", stream=True, max_tokens=50)).encode()
    sent = head_of(server, CHAT, body) + body
    with socket.create_connection(server.address, timeout=60) as connection:
        match stream.randrange(3):
            case 0:
                connection.sendall(sent[: stream.randrange(1, len(sent))])
            case 1:
                connection.sendall(sent)
            case _:
                connection.sendall(sent)
                connection.recv(2000)
