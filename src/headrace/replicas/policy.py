"""Which replica answers a request: the one that has the conversation's prefix, unless it is much fuller than others.

Used by the router of Ray Serve and by its simulation (`benchmarks/routing.py`); the standard library only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from hashlib import blake2b

LOAD_BOUND = 1.25
"""A replica takes further conversations' requests up to this multiple of the mean load; see docs/scale.md."""

SPARE_REQUESTS = 4
"""And this many more: a few requests at once delay each other less than computing a conversation anew."""


def ranked(key: str, replicas: Collection[str]) -> list[str]:
    """The replicas in the key's order of preference (rendezvous hashing).

    Each key has a separate order, the same in every process. A replica that joins or leaves changes the first place
    of only those keys that it gets or had: 1 of N.
    """
    seeded = blake2b(key.encode(), digest_size=8)

    def score(replica: str) -> bytes:
        hashed = seeded.copy()
        hashed.update(replica.encode())
        return hashed.digest()

    return sorted(replicas, key=score, reverse=True)


def choose(
    key: str, loads: Mapping[str, int], *, bound: float = LOAD_BOUND, spare: float = SPARE_REQUESTS
) -> list[str]:
    """The replicas in the order in which to try them, for a request of the conversation `key`.

    loads: of each replica, the number of requests that it is working on. A key without text belongs to no conversation:
    the emptiest replica is first.
    """
    if not key:
        return sorted(loads, key=loads.__getitem__)
    # "Consistent hashing with bounded loads": replicas that are too full come last, and keep their order.
    most = bound * sum(loads.values()) / max(1, len(loads)) + spare
    return sorted(ranked(key, loads), key=lambda replica: loads[replica] >= most)
