"""Where photos may be fetched from: names of hosts that somebody listed, and addresses that are everybody's. Pure."""

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
        "168.63.129.16/32",  # a public address by number: Azure's host, which answers with a machine's secrets
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
"""IANA's IPv4 Special-Purpose Address Registry, with multicast and what is reserved."""
GLOBAL_V6: Final = IPv6Network("2000::/3")
"""The only part that is given out as global unicast: ::1, mapped and compatible IPv4, NAT64, ULA, link-local and
multicast lie outside."""
REFUSED_V6: Final = tuple(
    IPv6Network(network)
    for network in (
        "2001::/23",  # protocols' own, Teredo and ORCHID among them
        "2001:db8::/32",
        "2002::/16",  # 6to4: leads to the IPv4 address within
        "2620:4f:8000::/48",
        "3fff::/20",
    )
)
"""IANA's IPv6 Special-Purpose Address Registry, as far as it lies in the global part."""

LONGEST_NAME: Final = 253
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")


def is_public(address: Address) -> bool:
    """Whether an address is one host's on the internet, whoever asks."""
    if isinstance(address, IPv4Address):
        return not any(address in network for network in REFUSED_V4)
    if address.scope_id is not None or address not in GLOBAL_V6:
        return False
    return not any(address in network for network in REFUSED_V6)


def is_loopback(host: str) -> bool:
    """Whether a host's name or address is this machine's own."""
    address = parsed(host)
    return host == "localhost" if address is None else address.is_loopback


def parsed(text: str) -> Address | None:
    try:
        return ip_address(text)
    except ValueError:
        return None


def host_name(text: str) -> str | None:
    """The normal form of a host's full name in ASCII; None: it is no name but an address in some form, a name without a
    domain, or nothing.

    What ends in a number is an address to some library, decimal, octal, hexadecimal or short
    (https://url.spec.whatwg.org/#ends-in-a-number-checker).
    """
    name = text.lower().removesuffix(".")
    labels = name.split(".")
    if len(name) > LONGEST_NAME or len(labels) < 2 or not all(_LABEL.fullmatch(label) for label in labels):
        return None
    return None if _NUMBER.fullmatch(labels[-1]) else name


@dataclass(frozen=True)
class Hosts:
    """Names, ``*.example.org`` for all below one, ``*`` for all; none: nothing is fetched."""

    patterns: tuple[str, ...] = ()

    @classmethod
    def of_text(cls, text: str) -> Hosts:
        """With commas between. Raises ValueError: one is neither."""
        patterns = tuple(pattern.strip().lower() for pattern in text.split(",") if pattern.strip())
        for pattern in patterns:
            below = f"any.{pattern[2:]}" if pattern.startswith("*.") else pattern
            if pattern != "*" and host_name(below) is None:
                raise ValueError(f"{pattern!r} is neither a host's full name nor *.example.org nor *")
        return cls(tuple(pattern.removesuffix(".") for pattern in patterns))

    @property
    def are_all(self) -> bool:
        return "*" in self.patterns

    def allow(self, name: str) -> bool:
        """Of a name in its normal form."""
        return any(
            pattern in ("*", name) or (pattern.startswith("*.") and name.endswith(pattern[1:]))
            for pattern in self.patterns
        )
