"""Which network addresses a server may be sent to by its clients: public ones only."""

from __future__ import annotations

import ipaddress

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_TRANSLATED = ipaddress.ip_network("64:ff9b::/96")
"""IPv4 addresses as a NAT64 gateway reaches them (RFC 6052)."""


def is_public(address: str) -> bool:
    """Whether the address is one of the public internet, and so is every IPv4 address inside of it."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    return all(each.is_global and not each.is_multicast for each in (parsed, *_inner(parsed)))


def _inner(address: Address) -> tuple[Address, ...]:
    """IPv4 addresses that packets to this one may end at."""
    if isinstance(address, ipaddress.IPv4Address):
        return ()
    found: list[Address | None] = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    if address in _TRANSLATED:
        found.append(ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF))
    return tuple(each for each in found if each is not None)
