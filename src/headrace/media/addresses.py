"""The network addresses that clients may make the server fetch from: public ones only."""

from __future__ import annotations

import ipaddress

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


def is_public(address: str) -> bool:
    """Whether an address, and the IPv4 address it may embed, are on the public internet."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if any(parsed in network for network in _TRANSLATED):
        parsed = ipaddress.IPv4Address(int(parsed) & 0xFFFF_FFFF)
    if any(parsed in network for network in _NOT_PUBLIC):
        return False
    return parsed.is_global and not parsed.is_multicast and (parsed.version == 4 or parsed in _UNICAST)
