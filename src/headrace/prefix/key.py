"""Keys of stored pieces: a namespace and one number per token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

NUM_DIGEST_BYTES = 16
"""Length of the shortest accepted media digest, and of the hash made from it."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """Prompts of different namespaces never share anything.

    weights: fingerprint of the weights and their format (quantisation, precision); never the model's name.
    adapter: fingerprint of the adapter, empty for none.
    salt: the client's or tenant's secret, empty for none.
    """

    weights: str
    adapter: str = ""
    salt: str = ""


@dataclass(frozen=True, slots=True)
class MediaKey:
    """The placeholder tokens `start` to `end` of one media item.

    digest: of the item's whole content and everything else that decides its embeddings, at least 16 bytes.
    """

    start: int
    end: int
    digest: bytes


def cache_key(token_ids: Sequence[int], media: Sequence[MediaKey] = ()) -> tuple[int, ...]:
    """The prompt's tokens, with media placeholders replaced by numbers unique to the item and its position.

    Text before an item has the same key as without the item; two different items never agree. Media numbers are
    negative 128-bit hashes, so they can't be token ids.

    token_ids: not negative, which the session checks. media: in the prompt's order. Raises ValueError for a media span
    that is empty, out of order, beyond the prompt or without a proper digest.
    """
    key = tuple(token_ids)
    if not media:
        return key
    parts: list[int] = []
    for span in media:
        if not len(parts) <= span.start < span.end <= len(key):
            raise ValueError(
                f"the media span {span.start} to {span.end} is empty, out of order or beyond the {len(key)} tokens"
            )
        if len(span.digest) < NUM_DIGEST_BYTES:
            raise ValueError(f"a media digest has at least {NUM_DIGEST_BYTES} bytes, not {len(span.digest)}")
        parts += key[len(parts) : span.start]
        parts += _media_numbers(span, key)
    return (*parts, *key[len(parts) :])


def _media_numbers(span: MediaKey, key: tuple[int, ...]) -> list[int]:
    """One number per placeholder. Their count is hashed too: an item scaled differently has another count."""
    item = blake2b(span.digest, digest_size=NUM_DIGEST_BYTES)
    item.update(b"/%d" % (span.end - span.start))
    numbers = []
    for index, token_id in enumerate(key[span.start : span.end]):
        place = item.copy()
        place.update(b"/%d/%d" % (index, token_id))
        numbers.append(-1 - int.from_bytes(place.digest()))
    return numbers
