"""Hosts and IP addresses from which photos may be fetched. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Final

Address = IPv4Address | IPv6Address

REFUSED_V4: Final = tuple(
    IPv4Network(network)
    for network in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "168.63.129.16/32",  # Azure's metadata host, which serves machine secrets from a public address
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.31.196.0/24",
        "192.52.193.0/24",
        "192.88.99.0/24",
        "192.168.0.0/16",
        "192.175.48.0/24",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/3",
    )
)
"""IANA's IPv4 Special-Purpose Address Registry, plus multicast and reserved addresses."""
GLOBAL_V6: Final = IPv6Network("2000::/3")
"""The only part that is given out as global unicast: ::1, mapped and compatible IPv4, NAT64, ULA, link-local and
multicast lie outside."""
REFUSED_V6: Final = tuple(
    IPv6Network(network)
    for network in (
        "2001::/23",  # IETF protocol assignments, including Teredo and ORCHID
        "2001:db8::/32",
        "2002::/16",  # 6to4: routes to the embedded IPv4 address
        "2620:4f:8000::/48",
        "3fff::/20",
    )
)
"""The part of IANA's IPv6 Special-Purpose Address Registry that lies within GLOBAL_V6."""

MAX_NAME_LENGTH: Final = 253
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")


def is_public(address: Address) -> bool:
    """Return whether an address is globally reachable unicast."""
    if isinstance(address, IPv4Address):
        return not any(address in network for network in REFUSED_V4)
    if address.scope_id is not None or address not in GLOBAL_V6:
        return False
    return not any(address in network for network in REFUSED_V6)


def is_loopback(host: str) -> bool:
    """Return whether a host name or address belongs to this machine."""
    address = parsed(host)
    return host == "localhost" if address is None else address.is_loopback


def parsed(text: str) -> Address | None:
    try:
        return ip_address(text)
    except ValueError:
        return None


def host_name(text: str) -> str | None:
    """Return the normal form of a fully qualified ASCII host name. Returns None for IP addresses in any notation, names
    without a domain, and malformed names.

    Some libraries read a name that ends in a number as a decimal, octal, hexadecimal or short IPv4 address
    (https://url.spec.whatwg.org/#ends-in-a-number-checker).
    """
    name = text.lower().removesuffix(".")
    labels = name.split(".")
    if len(name) > MAX_NAME_LENGTH or len(labels) < 2 or not all(_LABEL.fullmatch(label) for label in labels):
        return None
    return None if _NUMBER.fullmatch(labels[-1]) else name


@dataclass(frozen=True)
class Hosts:
    """Allowed host names: ``*.example.org`` allows all subdomains, ``*`` allows every host. Empty: no host is
    allowed."""

    patterns: tuple[str, ...] = ()

    @classmethod
    def of_text(cls, text: str) -> Hosts:
        """Parse comma-separated patterns. Raises ValueError on an invalid pattern."""
        patterns = tuple(pattern.strip().lower() for pattern in text.split(",") if pattern.strip())
        for pattern in patterns:
            below = f"any.{pattern[2:]}" if pattern.startswith("*.") else pattern
            if pattern != "*" and host_name(below) is None:
                raise ValueError(f"{pattern!r} is not a full host name, *.example.org or *")
        return cls(tuple(pattern.removesuffix(".") for pattern in patterns))

    @property
    def are_all(self) -> bool:
        return "*" in self.patterns

    def allow(self, name: str) -> bool:
        """Return whether a host name is allowed. ``name``: as :func:`host_name` returns it."""
        return any(
            pattern in ("*", name) or (pattern.startswith("*.") and name.endswith(pattern[1:]))
            for pattern in self.patterns
        )
