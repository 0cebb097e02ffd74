"""Keys: equal exactly where the computed values are equal."""

from __future__ import annotations

from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.common_prefix import common_length
from headrace.prefix.key import MediaKey, Namespace, cache_key

CAT = sha256(b"cat").digest()
DOG = sha256(b"dog").digest()
PROMPT = (5, 6, 7, 99, 99, 99, 8)


def test_without_media_the_key_is_the_tokens() -> None:
    assert cache_key([65, 321]) == (65, 321)


def test_text_before_an_image_has_the_key_it_has_without_it() -> None:
    key = cache_key(PROMPT, [MediaKey(3, 6, CAT)])
    assert key[:3] == (5, 6, 7) and key[6:] == (8,)
    assert all(number < 0 for number in key[3:6])


def test_two_images_agree_at_no_placeholder() -> None:
    cat, dog = (cache_key(PROMPT, [MediaKey(3, 6, digest)]) for digest in (CAT, DOG))
    assert not set(cat[3:6]) & set(dog[3:6])


def test_the_same_image_has_the_same_key_wherever_it_stands() -> None:
    early = cache_key((99, 99, 1, 2), [MediaKey(0, 2, CAT)])
    late = cache_key((1, 2, 3, 99, 99), [MediaKey(3, 5, CAT)])
    assert early[:2] == late[3:]


@pytest.mark.parametrize("position", [0, 15, 31])
def test_every_byte_of_the_digest_counts(position: int) -> None:
    other = bytes(byte ^ (1 if place == position else 0) for place, byte in enumerate(CAT))
    assert cache_key(PROMPT, [MediaKey(3, 6, CAT)])[3] != cache_key(PROMPT, [MediaKey(3, 6, other)])[3]


def test_placeholders_of_one_image_differ_from_each_other() -> None:
    assert len(set(cache_key(PROMPT, [MediaKey(3, 6, CAT)])[3:6])) == 3


def test_an_image_scaled_to_fewer_placeholders_is_another_one() -> None:
    small = cache_key((99, 99), [MediaKey(0, 2, CAT)])
    large = cache_key((99, 99, 99), [MediaKey(0, 3, CAT)])
    assert not set(small) & set(large)


def test_two_images_side_by_side_are_not_the_same_two_swapped() -> None:
    both = cache_key((99, 99), [MediaKey(0, 1, CAT), MediaKey(1, 2, DOG)])
    swapped = cache_key((99, 99), [MediaKey(0, 1, DOG), MediaKey(1, 2, CAT)])
    assert both == (swapped[1], swapped[0]) and both != swapped


def test_a_video_placeholder_is_no_image_placeholder() -> None:
    assert cache_key((99,), [MediaKey(0, 1, CAT)]) != cache_key((98,), [MediaKey(0, 1, CAT)])


@pytest.mark.parametrize(
    "media",
    [
        [MediaKey(3, 3, CAT)],
        [MediaKey(5, 8, CAT)],
        [MediaKey(-1, 2, CAT)],
        [MediaKey(3, 5, CAT), MediaKey(4, 6, DOG)],
        [MediaKey(5, 6, CAT), MediaKey(3, 4, DOG)],
    ],
)
def test_spans_that_make_no_sense_are_refused(media: list[MediaKey]) -> None:
    with pytest.raises(ValueError, match="media span"):
        cache_key(PROMPT, media)


def test_a_short_digest_is_refused() -> None:
    with pytest.raises(ValueError, match="digest"):
        cache_key(PROMPT, [MediaKey(3, 6, b"cat")])


def test_namespaces_differ_by_each_of_their_parts() -> None:
    assert len({Namespace("a"), Namespace("b"), Namespace("a", adapter="b"), Namespace("a", salt="b")}) == 4


TOKENS = st.lists(st.integers(0, 1), max_size=12).map(tuple)


@given(TOKENS, TOKENS, st.integers(0, 5))
def test_common_length_is_that_of_a_plain_comparison(first: tuple[int, ...], second: tuple[int, ...], at: int) -> None:
    count = 0
    for one, two in zip(first[at:], second, strict=False):
        if one != two:
            break
        count += 1
    assert common_length(first, second, min(at, len(first))) == count
