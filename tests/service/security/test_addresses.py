"""No notation of a private or reserved address passes as a public host."""

from __future__ import annotations

import struct
from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from service.security.addresses import Hosts, host_name, is_public, parsed

NOT_PUBLIC = [
    "168.63.129.16/32",
    "192.0.0.0/24",
    "192.88.99.0/24",
    "198.18.0.0/15",
    "224.0.0.0/4",
    "::/8",
    "64:ff9b:1::/48",
    "2001::/23",
    "2002::/16",
    "3fff::/20",
    "5f00::/16",
    "fec0::/10",
    "ff00::/8",
]
"""With a special purpose, and taken for global by some versions of the standard library."""
METADATA = ["169.254.169.254", "169.254.170.2", "100.100.100.200", "192.0.0.192", "168.63.129.16", "fd00:ec2::254"]
ONE_INTERFACE = "2606:4700::1%eth0"
PUBLIC = ["8.8.8.8", "1.1.1.1", "93.184.216.34", "172.32.0.1", "100.128.0.1", "2606:4700:4700::1111", "2a00:1450::1"]


@pytest.mark.parametrize(
    ("address", "expected"),
    [*((each, False) for each in (*METADATA, ONE_INTERFACE)), *((each, True) for each in PUBLIC)],
)
def test_hosts_on_the_internet_are_public_and_cloud_metadata_is_not(address: str, expected: bool) -> None:
    found = parsed(address)
    assert found is not None and is_public(found) == expected


@given(st.data())
def test_networks_with_a_special_purpose_are_not_public(data: st.DataObject) -> None:
    network = data.draw(st.sampled_from(NOT_PUBLIC))
    assert not is_public(data.draw(st.ip_addresses(network=network)))


@given(st.ip_addresses(v=4))
@example(IPv4Address("8.8.8.8"))
def test_an_ipv4_address_within_an_ipv6_address_is_never_public(address: IPv4Address) -> None:
    number = int(address)
    for form in (
        f"::ffff:{address}",
        f"::{address}",
        f"::ffff:0:{address}",
        f"64:ff9b::{address}",
        f"64:ff9b:1::{address}",
        str(IPv6Address((0x2002 << 112) | (number << 80))),
        str(IPv6Address((0x20010000 << 96) | (number ^ 0xFFFFFFFF))),
    ):
        found = parsed(form)
        assert found is not None, form
        assert not is_public(found), form


@given(st.ip_addresses(v=4))
@example(IPv4Address("127.0.0.1"))
def test_no_address_notation_is_a_host_name(address: IPv4Address) -> None:
    a, b, c, d = struct.pack("!I", int(address))
    number = int(address)
    for form in (
        str(address),
        f"{address}.",
        str(number),
        hex(number),
        f"0{number:o}",
        f"{a:#x}.{b:#x}.{c:#x}.{d:#x}",
        f"0{a:o}.0{b:o}.0{c:o}.0{d:o}",
        f"{a}.{(b << 16) | (c << 8) | d}",
        f"{a}.{b}.{(c << 8) | d}",
        f"[::ffff:{address}]",
        f"::ffff:{address}",
    ):
        assert host_name(form) is None, form


def test_host_names_are_whole_and_normalized() -> None:
    for text in (
        "",
        ".",
        "localhost",
        "localhost.",
        "a..b",
        "-a.org",
        "a-.org",
        "a b.org",
        "ä.org",
        "a.org:80",
        "a/b.org",
    ):
        assert host_name(text) is None, text
    assert host_name("Photos.Example.ORG.") == "photos.example.org"
    assert host_name(f"{'a' * 63}.org") is not None
    assert host_name(f"{'a' * 64}.org") is None
    assert host_name(".".join(["abcdefg"] * 40)) is None


def test_patterns_select_host_names() -> None:
    hosts = Hosts.of_text(" photos.example.org , *.cdn.example ")
    assert hosts.allow("photos.example.org")
    assert hosts.allow("a.b.cdn.example")
    for other in (
        "example.org",
        "cdn.example",
        "evilcdn.example",
        "photos.example.org.evil.org",
        "a.photos.example.org",
    ):
        assert not hosts.allow(other)
    assert Hosts.of_text("*").allow("anything.example")
    assert not Hosts.of_text("").allow("anything.example")
    for wrong in ("10.0.0.1", "*.org.*", "https://a.org", "a.org:443", "localhost", "2130706433", "*.", "a.*"):
        with pytest.raises(ValueError, match="full host name"):
            Hosts.of_text(wrong)
