"""Hosts and IP addresses from which photos may be fetched. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final

Address = IPv4Address | IPv6Address

GLOBAL_V6: Final = IPv6Network("2000::/3")
"""The only part that is given out as global unicast: ::1, mapped and compatible IPv4, NAT64, ULA, link-local and
multicast lie outside."""
REFUSED: Final = tuple(
    ip_network(network)
    for network in (
        "168.63.129.16/32",  # Azure's metadata host, which serves machine secrets from a public address
        "192.0.0.0/24",
        "192.31.196.0/24",
        "192.52.193.0/24",
        "192.88.99.0/24",
        "192.175.48.0/24",
        "2001::/23",  # IETF protocol assignments, including Teredo and ORCHID
        "2002::/16",  # 6to4: routes to the embedded IPv4 address
        "2620:4f:8000::/48",
        "3fff::/20",
    )
)
"""Of IANA's Special-Purpose Address Registries, what Python of any version takes for global."""

MAX_NAME_LENGTH: Final = 253
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")


def is_public(address: Address) -> bool:
    """Return whether an address is globally reachable unicast."""
    if isinstance(address, IPv6Address) and (address.scope_id is not None or address not in GLOBAL_V6):
        return False
    is_unicast = address.is_global and not address.is_multicast
    return is_unicast and not any(address in network for network in REFUSED)


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

    def allow(self, name: str) -> bool:
        """Return whether a host name is allowed. ``name``: as :func:`host_name` returns it."""
        return any(
            pattern in ("*", name) or (pattern.startswith("*.") and name.endswith(pattern[1:]))
            for pattern in self.patterns
        )
