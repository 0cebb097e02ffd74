"""Where media may come from, and where not."""

from __future__ import annotations

import asyncio
import base64
import os
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from urllib.parse import unquote_to_bytes

import httpx
import pytest
from media.reference import picture
from media.test_image import saved
from PIL import Image

from headrace.errors import ConfigError, InvalidRequest
from headrace.media.fetch import MediaFetcher, read_data_url, split_frames
from headrace.media.remote import RemoteMedia, is_public
from headrace.types.media import MediaPolicy

PNG = saved(Image.fromarray(picture("hash", (8, 8))), "PNG")
PARAM = "messages[1].content[2]"
CLOSED = MediaPolicy()
PUBLIC = "93.184.215.14"


def read(source: str, policy: MediaPolicy = CLOSED) -> bytes:
    return asyncio.run(MediaFetcher(policy).read(source, PARAM))


def refusal(act: Callable[[], bytes]) -> str:
    with pytest.raises(InvalidRequest) as refused:
        act()
    assert refused.value.param == PARAM and PARAM in refused.value.message
    return refused.value.message


class Net:
    """A network of a few hosts. `seen`: what was asked for, as (connected to, host header, name in TLS)."""

    def __init__(
        self,
        answers: Mapping[str, Callable[[httpx.Request], httpx.Response]],
        addresses: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.answers = answers
        self.addresses = addresses or {}
        self.seen: list[tuple[str, str, str]] = []

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        if host == "unknown.example":
            raise OSError("no such host")
        return self.addresses.get(host, (PUBLIC,))

    def answer(self, request: httpx.Request) -> httpx.Response:
        host = request.headers["Host"]
        self.seen.append((str(request.url), host, request.extensions["sni_hostname"]))
        return self.answers[host](request)

    def read(self, url: str, *hosts: str, max_bytes: int = 10_000, timeout_s: float = 60.0) -> bytes:
        policy = MediaPolicy(hosts=hosts, max_bytes=max_bytes, timeout_s=timeout_s)
        remote = RemoteMedia(policy, resolve=self.resolve, transport=httpx.MockTransport(self.answer))
        return asyncio.run(MediaFetcher(policy, remote=remote).read(url, PARAM))


async def pieces(data: bytes) -> AsyncIterator[bytes]:
    """As a network delivers it; given whole, httpx would have read it before anybody asks."""
    for start in range(0, len(data), 100):
        yield data[start : start + 100]


def ok(_: httpx.Request) -> httpx.Response:
    return httpx.Response(200, content=pieces(PNG))


def moved(to: str, status: int = 302) -> Callable[[httpx.Request], httpx.Response]:
    return lambda _: httpx.Response(status, headers={"Location": to})


def test_data_urls_hold_base64_or_percent_encoded_bytes() -> None:
    text = base64.b64encode(PNG).decode()
    assert read(f"data:image/png;base64,{text}") == PNG
    assert read(f"DATA:image/png;charset=x;BASE64,{text.rstrip('=')}") == PNG
    assert read(f"data:;base64,{text[:40]}\n {text[40:]}") == PNG
    assert read("data:image/png;base64," + text.replace("+", "%2B").replace("=", "%3D")) == PNG
    assert read("data:image/png," + "".join(f"%{byte:02x}" for byte in PNG)) == PNG


def test_plain_base64_of_a_media_file_is_taken() -> None:
    for form in ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"):
        data = saved(Image.fromarray(picture("hash", (8, 8))), form)
        assert read(base64.b64encode(data).decode()) == data


@pytest.mark.parametrize(
    "source", ["data:image/png;base64", "data:image/png;base64,A", "data:;base64,!!!!", "data:,\ud800"]
)
def test_a_faulty_data_url_is_refused(source: str) -> None:
    refusal(lambda: read(source))


def test_inline_data_over_the_limit_is_refused() -> None:
    text = base64.b64encode(PNG).decode()
    small = MediaPolicy(max_bytes=len(PNG) - 1)
    for source in (f"data:;base64,{text}", text, "data:," + "a" * len(PNG)):
        assert f"the maximum of {len(PNG) - 1}" in refusal(lambda source=source: read(source, small))
    assert read(text, MediaPolicy(max_bytes=len(PNG))) == PNG


def test_files_are_read_below_the_root_only(tmp_path: Path) -> None:
    root, outside = tmp_path / "media", tmp_path / "secret.png"
    (root / "a b").mkdir(parents=True)
    (root / "a b" / "in.png").write_bytes(PNG)
    (root / "link.png").symlink_to(root / "a b" / "in.png")
    (root / "out.png").symlink_to(outside)
    (root / "up").symlink_to(tmp_path)
    (root / "circle").symlink_to(root / "circle")
    os.mkfifo(root / "pipe")
    outside.write_bytes(PNG)
    policy = MediaPolicy(root=root)
    inside = root / "a b" / "in.png"
    for source in (
        "a b/in.png",
        "link.png",
        str(inside),
        f"file://{root}/a%20b/in.png",
        inside.as_uri(),
        "x/../a b/in.png"[5:],
    ):
        assert read(source, policy) == PNG
    messages = {
        refusal(lambda source=source: read(source, policy))
        for source in (
            *(
                "../secret.png",
                "out.png",
                "up/secret.png",
                str(outside),
                outside.as_uri(),
                "missing.png",
                "a b",
                "pipe",
            ),
            *(
                "circle",
                "a\0b",
                "x" * 5000,
                f"file://elsewhere{inside}",
                "file:///etc/passwd",
                "up/media/../secret.png",
            ),
        )
    }
    assert messages == {f"{PARAM}: there is no such file in the media folder"}
    assert "holds more than the maximum of 9 bytes" in refusal(
        lambda: read("link.png", MediaPolicy(root=root, max_bytes=9))
    )


def test_without_a_root_and_hosts_nothing_but_the_request_itself_is_read(tmp_path: Path) -> None:
    (tmp_path / "in.png").write_bytes(PNG)
    for source in (str(tmp_path / "in.png"), (tmp_path / "in.png").as_uri(), "/etc/hostname"):
        assert "--media-root" in refusal(lambda source=source: read(source))
    assert "--media-hosts" in refusal(lambda: read("https://example.org/in.png"))


@pytest.mark.parametrize(
    "source",
    ["ftp://example.org/x", "gopher://example.org", "javascript:1", "", "  ", "http:", "http:///x", "http://[::1"],
)
def test_other_sources_are_refused(source: str) -> None:
    net = Net({})
    refusal(lambda: net.read(source, "*"))
    assert net.seen == []


def test_a_listed_host_is_read_at_the_address_that_was_checked() -> None:
    net = Net({"pictures.example": ok})
    assert net.read("https://pictures.example/a.png?size=1#top", "pictures.example") == PNG
    assert net.seen == [(f"https://{PUBLIC}/a.png?size=1", "pictures.example", "pictures.example")]


@pytest.mark.parametrize(
    ("entry", "url", "is_allowed"),
    [
        ("pictures.example", "http://pictures.example/x", True),
        ("pictures.example", "http://PICTURES.example./x", True),
        ("pictures.example", "http://pictures.example:8080/x", False),
        ("pictures.example:8080", "http://pictures.example:8080/x", True),
        ("pictures.example:8080", "http://pictures.example/x", False),
        ("pictures.example", "http://more.pictures.example/x", False),
        ("pictures.example", "http://badpictures.example/x", False),
        ("pictures.example", "http://pictures.example@other.example/x", False),
        ("pictures.example", "http://pictures.example:pw@pictures.example/x", False),
        ("*.example", "http://more.pictures.example/x", True),
        ("*.example", "http://example/x", False),
        ("*", "http://anything.test/x", True),
        ("*", "http://anything.test:81/x", False),
    ],
)
def test_the_list_decides_by_whole_names_and_ports(entry: str, url: str, is_allowed: bool) -> None:
    class Any(dict[str, Callable[[httpx.Request], httpx.Response]]):
        def __missing__(self, host: str) -> Callable[[httpx.Request], httpx.Response]:
            return ok

    net = Net(Any())
    if is_allowed:
        assert net.read(url, entry) == PNG
    else:
        refusal(lambda: net.read(url, entry))
        assert net.seen == []


@pytest.mark.parametrize("entry", ["", "http://a.example", "a.example/x", "a.*.example", "a:b", "*a.example"])
def test_a_list_with_something_else_than_hosts_is_a_configuration_error(entry: str) -> None:
    with pytest.raises(ConfigError, match="--media-hosts"):
        MediaFetcher(MediaPolicy(hosts=(entry,)))


NOT_PUBLIC = tuple(
    # this machine, private networks and shared ones (RFC 6890), multicast, documentation, no address at all
    "127.0.0.1 10.1.2.3 172.16.0.1 192.168.1.1 0.0.0.0 100.64.0.1 198.18.0.1 224.0.0.1 240.0.0.1 255.255.255.255 "
    "203.0.113.9 ::1 :: fe80::1 fe80::1%eth0 fc00::1 ff02::1 2001:db8::1 3fff::1 100::1 nonsense "
    # site-local (RFC 3879), IPv4-compatible (RFC 4291), unassigned
    "fec0::1 feff:ffff::1 ::7f00:1 ::a00:1 ::808:808 4000::1 5f00::1 "
    # the metadata services of AWS, Google and others, Alibaba, Oracle and Azure
    "169.254.169.254 fd00:ec2::254 fd20:ce::254 100.100.100.200 192.0.0.192 168.63.129.16 "
    # mapped, translated (RFC 6052, RFC 8215, RFC 2765), 6to4, Teredo (the client's bits are inverted)
    "::ffff:127.0.0.1 ::ffff:10.0.0.1 ::ffff:168.63.129.16 64:ff9b::7f00:1 64:ff9b::a9fe:a9fe 64:ff9b:1::808:808 "
    "::ffff:0:127.0.0.1 2002:7f00:1:: 2002:a9fe:a9fe::1 2001:0:808:808::80ff:fffe".split()
)


def test_addresses_of_private_networks_are_told_from_public_ones() -> None:
    assert [address for address in NOT_PUBLIC if is_public(address)] == []
    public = (PUBLIC, "8.8.8.8", "2606:4700:4700::1111", "64:ff9b::808:808", "::ffff:8.8.8.8")
    assert [address for address in public if not is_public(address)] == []


@pytest.mark.parametrize("addresses", [("127.0.0.1",), (PUBLIC, "10.0.0.1"), ("::1",), ()])
def test_a_listed_host_in_a_private_network_is_refused(addresses: Sequence[str]) -> None:
    net = Net({"inside.example": ok}, {"inside.example": addresses})
    assert "not on the public internet" in refusal(lambda: net.read("http://inside.example/x", "inside.example"))
    assert net.seen == []


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "2130706433", "0x7f.1", "[::1]", "[::ffff:127.0.0.1]"])
def test_no_spelling_of_this_machine_gets_through(host: str) -> None:
    refusal(lambda: read(f"http://{host}/x", MediaPolicy(hosts=("*", host))))


def test_a_name_that_is_no_international_one_is_refused() -> None:
    assert "does not fetch from xn--" in refusal(lambda: read("http://xn--/", MediaPolicy(hosts=("a.example",))))


def test_the_next_address_is_tried_when_one_can_t_be_reached() -> None:
    def half(request: httpx.Request) -> httpx.Response:
        if request.url.host == "2606:4700::1":
            raise httpx.ConnectError("no route to host", request=request)
        return ok(request)

    net = Net({"a.example": half}, {"a.example": ("2606:4700::1", PUBLIC)})
    assert net.read("http://a.example/x", "a.example") == PNG
    assert [url for url, *_ in net.seen] == ["http://[2606:4700::1]/x", f"http://{PUBLIC}/x"]


def test_a_name_that_is_no_international_one_is_tried_at_its_next_address_too() -> None:
    """httpx can't decode `xn--`."""

    def half(request: httpx.Request) -> httpx.Response:
        if request.url.host == "2606:4700::1":
            raise httpx.ConnectError("no route to host", request=request)
        return ok(request)

    net = Net({"xn--": half}, {"xn--": ("2606:4700::1", PUBLIC)})
    assert net.read("http://xn--/x", "*") == PNG


def test_an_unknown_host_is_refused() -> None:
    assert "unknown.example is unknown" in refusal(lambda: Net({}).read("http://unknown.example/", "*"))


def test_redirects_are_followed_where_the_list_allows_them() -> None:
    net = Net({"a.example": moved("https://b.example/two"), "b.example": moved("/three", 308)})
    net.answers = {
        **net.answers,
        "b.example": lambda request: ok(request) if request.url.path == "/three" else moved("/three", 308)(request),
    }
    assert net.read("http://a.example/one", "a.example", "b.example") == PNG
    assert [url for url, *_ in net.seen] == [f"http://{PUBLIC}/one", f"https://{PUBLIC}/two", f"https://{PUBLIC}/three"]


@pytest.mark.parametrize(
    "to", ["http://other.example/", "http://inside.example/", "file:///etc/passwd", "http://127.0.0.1/", "http://[", ""]
)
def test_a_redirect_is_checked_like_the_first_url(to: str) -> None:
    net = Net({"a.example": moved(to), "inside.example": ok}, {"inside.example": ("192.168.0.1",)})
    refusal(lambda: net.read("http://a.example/", "a.example", "inside.example"))
    assert {host for _, host, _ in net.seen} == {"a.example"}


def test_redirects_come_to_an_end() -> None:
    net = Net({"a.example": moved("/again")})
    assert "redirects more than 3 times" in refusal(lambda: net.read("http://a.example/", "a.example"))
    assert len(net.seen) == 4


def test_an_answer_over_the_limit_is_cut_off_whether_it_says_so_or_not() -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 1000
            yield bytes(1000)

    honest = Net({"a.example": lambda _: httpx.Response(200, content=bytes(5001))})
    silent = Net({"a.example": lambda _: httpx.Response(200, content=endless())})
    for net in (honest, silent):
        assert "more than the maximum of 5000 bytes" in refusal(
            lambda net=net: net.read("http://a.example/", "a.example", max_bytes=5000)
        )
    assert sent == 6000


def test_a_host_that_does_not_deliver_is_given_up() -> None:
    async def never() -> AsyncIterator[bytes]:
        yield b"x"
        await asyncio.Event().wait()

    net = Net({"a.example": lambda _: httpx.Response(200, content=never())})
    assert "within 0.01 s" in refusal(lambda: net.read("http://a.example/", "a.example", timeout_s=0.01))


def test_a_host_that_fails_is_named_as_such() -> None:
    def breaks(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("connection refused", request=request)

    zipped = httpx.Response(200, headers={"Content-Encoding": "gzip"}, content=b"")
    for answer, words in (
        (lambda _: httpx.Response(404), "status 404"),
        (lambda _: httpx.Response(206, content=PNG), "status 206"),
        (breaks, "reading from the host failed (ConnectError)"),
        (lambda _: zipped, "compressed"),
    ):
        net = Net({"a.example": answer})
        assert words in refusal(lambda net=net: net.read("http://a.example/", "a.example"))


def test_percent_encoded_bytes_are_those_of_the_standard_library(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(8)
    for length in (1, 2, 3, 5, 64 * 1024):
        monkeypatch.setattr("headrace.media.fetch._SLICE_CHARACTERS", length)
        for _ in range(100):
            data = "".join(draw.choices(["%41", "%e2", "%", "%4", "b", "é"], k=draw.randrange(30)))
            assert read_data_url(f"data:,{data}", 1000, "image") == unquote_to_bytes(data)


def test_more_frames_than_are_looked_at_are_refused_unseen() -> None:
    with pytest.raises(InvalidRequest, match="video holds 1000001 frames, but must hold 1 to 768"):
        split_frames("data:video/jpeg;base64," + 1_000_000 * ",", 768, "video")
    assert split_frames("data:video/jpeg;base64,a,b", 2, "video") == ("data:;base64,a", "data:;base64,b")
