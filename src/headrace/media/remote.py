"""Downloads media from hosts that the operator has listed, at public addresses only."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import socket
from collections.abc import Awaitable, Callable, Sequence

import httpx

from headrace.errors import ConfigError, InvalidRequest
from headrace.types.media import MediaPolicy

log = logging.getLogger(__name__)

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Host and port to addresses."""

_PORTS = {"http": 80, "https": 443}
_ENTRY = re.compile(r"(?P<name>\*|(\*\.)?[a-z0-9_.-]+|\[[0-9a-f:.]+\])(:(?P<port>[0-9]{1,5}))?")
_REDIRECTS = frozenset({301, 302, 303, 307, 308})

_UNICAST = ipaddress.ip_network("2000::/3")
"""All allocated IPv6 addresses. Site-local, IPv4-compatible and unassigned ones are outside."""
_TRANSLATED = (ipaddress.ip_network("::ffff:0:0/96"), ipaddress.ip_network("64:ff9b::/96"))
"""IPv4 addresses mapped into IPv6 (RFC 4291), and as a NAT64 gateway reaches them (RFC 6052)."""
_NOT_PUBLIC = tuple(
    map(
        ipaddress.ip_network,
        (
            "192.0.0.0/24",  # protocols of the IETF, and Oracle's metadata service
            "168.63.129.16/32",  # the host of a virtual machine in Azure, which knows its settings
            "2001::/23",  # protocols of the IETF, Teredo tunnels among them
            "2002::/16",  # 6to4 tunnels, given up by RFC 7526
            "3fff::/20",  # documentation (RFC 9637)
        ),
    )
)
"""What `is_global` takes for public, in some versions of Python or in all."""


async def system_addresses(host: str, port: int) -> Sequence[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


class RemoteMedia:
    """Downloads http(s) URLs under a policy.

    A host is resolved once, all its addresses must be public, and the connection goes to one of these: resolving the
    name to another address later has no effect. Proxies and other environment settings are ignored.

    transport: replaces the network, for tests. Raises ConfigError for an invalid host entry.
    """

    def __init__(
        self,
        policy: MediaPolicy,
        *,
        resolve: Resolve = system_addresses,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._policy = policy
        self._hosts = tuple(map(_host_pattern, policy.hosts))
        self._resolve = resolve
        self._transport = transport

    async def read(self, url: str, param: str) -> bytes:
        """The content of a URL. Raises InvalidRequest that names `param`."""
        try:
            async with asyncio.timeout(self._policy.timeout_s), self._client() as client:
                return await self._follow(client, url, param)
        except (TimeoutError, httpx.TimeoutException) as error:
            message = f"{param}: the host did not deliver within {self._policy.timeout_s:g} s"
            raise InvalidRequest(message, param=param) from error
        except httpx.HTTPError as error:
            raise InvalidRequest(
                f"{param}: reading from the host failed ({type(error).__name__})", param=param
            ) from error

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            transport=self._transport,
            trust_env=False,
            timeout=self._policy.timeout_s,
            headers={"Accept": "image/*, video/*, */*;q=0.5", "Accept-Encoding": "identity", "User-Agent": "headrace"},
        )

    async def _follow(self, client: httpx.AsyncClient, url: str, param: str) -> bytes:
        for _ in range(self._policy.max_redirects + 1):
            target = self._check_url(url, param)
            response = await _connect(client, target, await self._addresses(target, param))
            try:
                if response.status_code not in _REDIRECTS:
                    return await self._body(response, param)
                url = str(target.join(response.headers.get("Location", "")))
            except httpx.InvalidURL as error:
                raise InvalidRequest(f"{param}: the host redirects to an invalid URL", param=param) from error
            finally:
                await response.aclose()
        most = self._policy.max_redirects
        raise InvalidRequest(f"{param}: the host redirects more than {most} times", param=param)

    def _check_url(self, url: str, param: str) -> httpx.URL:
        """The URL, parsed. Raises InvalidRequest if its host is not on the list."""
        try:
            target = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise InvalidRequest(f"{param}: the URL is not valid", param=param) from error
        if target.scheme not in _PORTS or not target.raw_host:  # `host` raises for a name that is no IDNA
            raise InvalidRequest(f"{param}: the URL must be http: or https: with a host", param=param)
        if target.userinfo:
            raise InvalidRequest(f"{param}: the URL must not hold a name or password", param=param)
        host = target.raw_host.decode("ascii").rstrip(".").lower()
        if not any(_matches(pattern, host, target) for pattern in self._hosts):
            raise InvalidRequest(
                f"{param}: this server does not fetch from {target.netloc.decode('ascii')}; "
                "send a data: URL, or start it with --media-hosts",
                param=param,
            )
        return target

    async def _addresses(self, target: httpx.URL, param: str) -> Sequence[str]:
        """Addresses to connect to. Raises InvalidRequest if the host is unknown or private."""
        host = target.raw_host.decode("ascii")
        try:
            addresses = await self._resolve(host, _port(target))
        except (OSError, UnicodeError) as error:
            raise InvalidRequest(f"{param}: the host {host} is unknown", param=param) from error
        if not addresses or not all(map(is_public, addresses)):
            raise InvalidRequest(f"{param}: the host {host} is not on the public internet", param=param)
        return addresses

    async def _body(self, response: httpx.Response, param: str) -> bytes:
        most = self._policy.max_bytes
        if response.status_code != httpx.codes.OK:
            raise InvalidRequest(f"{param}: the host answers with status {response.status_code}", param=param)
        if response.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise InvalidRequest(f"{param}: the host sends compressed data, which was not requested", param=param)
        too_long = InvalidRequest(f"{param} holds more than the maximum of {most} bytes", param=param)
        declared = response.headers.get("Content-Length", "")
        if declared.isdecimal() and int(declared) > most:
            raise too_long
        data = bytearray()
        async for piece in response.aiter_raw():
            data += piece
            if len(data) > most:
                raise too_long
        return bytes(data)


async def _connect(client: httpx.AsyncClient, target: httpx.URL, addresses: Sequence[str]) -> httpx.Response:
    *others, last = addresses
    for address in others:
        try:
            return await _get(client, target, address)
        except httpx.ConnectError as error:
            log.debug("%s can't be reached at %s: %s", target.raw_host.decode("ascii"), address, error)
    return await _get(client, target, last)


async def _get(client: httpx.AsyncClient, target: httpx.URL, address: str) -> httpx.Response:
    request = client.build_request(
        "GET",
        target.copy_with(host=address, fragment=None),
        headers={"Host": target.netloc.decode("ascii")},
        extensions={"sni_hostname": target.raw_host.decode("ascii")},
    )
    return await client.send(request, stream=True)


def _port(target: httpx.URL) -> int:
    return target.port or _PORTS[target.scheme]


def _host_pattern(entry: str) -> tuple[str, int | None]:
    """An entry of the list as name and port. Raises ConfigError."""
    match = _ENTRY.fullmatch(entry.strip().lower())
    if match is None:
        raise ConfigError(
            f"--media-hosts takes names like example.org, *.example.org or example.org:8443, not {entry!r}"
        )
    return match["name"].strip("[]"), int(match["port"]) if match["port"] else None


def _matches(pattern: tuple[str, int | None], host: str, target: httpx.URL) -> bool:
    name, port = pattern
    if _port(target) != (port or _PORTS[target.scheme]):
        return False
    return name in ("*", host) or (name.startswith("*.") and host.endswith(name[1:]))


def is_public(address: str) -> bool:
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if any(parsed in network for network in _TRANSLATED):
        parsed = ipaddress.IPv4Address(int(parsed) & 0xFFFF_FFFF)
    if any(parsed in network for network in _NOT_PUBLIC):
        return False
    return parsed.is_global and not parsed.is_multicast and (parsed.version == 4 or parsed in _UNICAST)
