"""Photos by URL: refused before a socket is opened, and never from anywhere but the address that was looked at."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import socket
import ssl
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import httpx2 as httpx
import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kith import Kith, Url
from service import wiring
from service.core.deadlines import Deadline
from service.core.errors import ClientGoneError
from service.inference.url_fetching import UrlFetcher
from service.security.addresses import Address, Hosts, is_public
from service.security.outbound_http import OutboundHttp
from service.server import embedded
from service.settings import load_settings
from tests.conftest import jpeg
from tests.http_files import File, Server, serving
from tests.refusals import raises_code

HOST: Final = "photos.example"
LOOPBACK: Final = "127.0.0.1"
REACHED: Final[list[tuple[str, Any]]] = []
"""Audit hook results: connected sockets and resolved names."""


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "socket.connect" and arguments[0].family != socket.AF_UNIX:
        REACHED.append(("connect", arguments[1][0]))
    elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
        REACHED.append(("look up", arguments[0]))


@pytest.fixture(scope="module", autouse=True)
def _watch_sockets() -> None:
    sys.addaudithook(_hook)  # stays for good, and sees the C library's calls too


@contextmanager
def connections(*allowed: tuple[str, str]) -> Iterator[list[tuple[str, Any]]]:
    """Nothing else may be reached within the block."""
    REACHED.clear()
    seen: list[tuple[str, Any]] = []
    yield seen
    seen += REACHED
    assert set(seen) <= set(allowed)


def is_loopback(address: Address) -> bool:
    return address.is_loopback


class Names:
    """A resolver that answers in turn what it was given, and remembers what it was asked."""

    def __init__(self, *answers: list[str] | OSError) -> None:
        self._answers = list(answers)
        self.asked: list[str] = []

    async def __call__(self, host: str) -> list[str]:
        self.asked.append(host)
        answer = self._answers[0] if len(self._answers) == 1 else self._answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer


def fetch(url: str, names: Names, hosts: str = "*.example,photos.example", **options: Any) -> bytes:
    async def run() -> bytes:
        limits = {"total_s": options.pop("total_s")} if "total_s" in options else {}
        async with OutboundHttp(Hosts.of_text(hosts), resolve=names, **options) as http:
            return await UrlFetcher(http, 1000, **limits).fetch(url)

    return asyncio.run(run())


def from_loopback(server: Server, path: str, names: Names | None = None, **options: Any) -> bytes:
    """Local server as a host on the internet: ``photos.example``, which is here."""
    parts = urlsplit(server.url)
    assert parts.port is not None
    given: dict[str, Any] = {"permits": is_loopback, "ports": {parts.port}, "http": parts.scheme == "http"} | options
    return fetch(f"{parts.scheme}://{HOST}:{parts.port}{path}", names or Names([LOOPBACK]), **given)


def photo(content: bytes = b"photo", **more: Any) -> File:
    return File(content, content_type="image/jpeg", **more)


# Refused


@pytest.mark.parametrize(
    "url",
    [
        "http://photos.example/1.jpg",
        "ftp://photos.example/1.jpg",
        "file:///etc/passwd",
        "gopher://photos.example/",
        "data:image/png;base64,AAAA",
        "//photos.example/1.jpg",
        "photos.example/1.jpg",
        "https:photos.example",
        "https:///photos.example",
        "https://user@photos.example/",
        "https://user:word@photos.example/",
        "https://photos.example@other.example.org/",
        "https://photos.example\\@other.example.org/",
        "https://other.example.org/1.jpg",
        "https://photos.example.other.org/",
        "https://photos.example:8443/",
        "https://photos.example:22/",
        "https://photos.example:0/",
        "https://photos.example:99999/",
        "https://localhost/",
        "https://127.0.0.1/",
        "https://2130706433/",
        "https://\uff11\uff12\uff17.0.0.1/",
        "https://[::1]/",
        "https://[::ffff:127.0.0.1]/",
        "https://[fe80::1%25eth0]/",
        "https://169.254.169.254/latest/meta-data/",
        "https://metadata.google.internal/",
        "https://photos.example\r\nHost: inside/",
        "https://photos.example/\n",
        "https://photos .example/",
        "https://photos.example\u202e/",
        "https://" + "a" * 2100 + ".example/",
        "https://",
        "https://.example/",
        "https://..example/",
        "",
    ],
)
def test_refused_without_a_name_looked_up_or_a_socket_opened(url: str) -> None:
    names = Names([LOOPBACK])
    with connections(), raises_code("url_refused") as refused:
        fetch(url, names)
    assert names.asked == []
    assert refused.value.detail == "photos from this URL are not allowed"


@given(st.ip_addresses().filter(lambda address: not is_public(address)))
@settings(max_examples=50)
def test_a_name_of_an_address_in_here_is_refused(address: Address) -> None:
    with connections(), raises_code("url_refused"):
        fetch(f"https://{HOST}/", Names([str(address)]))


@pytest.mark.parametrize(
    "answer",
    [
        ["8.8.8.8", "127.0.0.1"],
        ["127.0.0.1", "8.8.8.8"],
        ["8.8.8.8", "no address"],
        ["2606:4700::1%2"],
        [],
        OSError("no such name"),
    ],
)
def test_the_refusal_tells_nothing_of_what_is_in_here(answer: list[str] | OSError) -> None:
    with connections(), raises_code("url_refused") as refused:
        fetch(f"https://{HOST}/", Names(answer))
    with connections(), raises_code("url_refused") as elsewhere:
        fetch("https://nobody.listed.org/", Names(answer))
    assert refused.value.document() == elsewhere.value.document()


def test_by_default_nothing_is_fetched() -> None:
    with connections(), raises_code("url_refused", match="disabled"):
        fetch(f"https://{HOST}/", Names([LOOPBACK]), hosts="")


# Fetched


def test_a_photo_is_fetched_from_the_address_that_was_looked_at_and_named_by_its_host() -> None:
    names = Names([LOOPBACK], ["127.0.0.2"])
    with serving({"/1.jpg?size=2": photo()}) as server, connections(("connect", LOOPBACK)) as seen:
        assert from_loopback(server, "/1.jpg?size=2#top", names) == b"photo"
    assert names.asked == [HOST]
    assert seen == [("connect", LOOPBACK)]
    (headers,) = server.headers
    assert headers.pop("host") == urlsplit(server.url).netloc.replace(LOOPBACK, HOST)
    assert headers.pop("accept-encoding") == "identity"
    assert headers.keys() == {"user-agent", "accept", "connection"}  # no cookies, no credentials


def test_the_environments_proxies_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.3:9")
    with serving({"/1.jpg": photo()}) as server, connections(("connect", LOOPBACK)):
        assert from_loopback(server, "/1.jpg") == b"photo"


def test_the_next_address_is_tried_where_one_does_not_answer() -> None:
    with serving({"/1.jpg": photo()}) as server:
        assert from_loopback(server, "/1.jpg", Names(["127.0.0.9", LOOPBACK])) == b"photo"


def test_a_name_in_another_script_is_looked_up_in_ascii() -> None:
    names = Names(OSError())
    with raises_code("url_refused"):
        fetch("https://bücher.example/", names)
    assert names.asked == ["xn--bcher-kva.example"]


def test_redirects_are_followed_a_few_times_each_looked_at_anew() -> None:
    names = Names([LOOPBACK])
    with serving({"/1": File(b"", location="/2"), "/2": File(b"", location="3"), "/3": photo()}) as server:
        assert from_loopback(server, "/1", names) == b"photo"
        assert names.asked == [HOST] * 3
        server.files["/3"] = File(b"", location="/1")
        with raises_code("url_failed", match="more than 3 times"):
            from_loopback(server, "/1", names)
    assert "cookie" not in {name for headers in server.headers for name in headers}


@pytest.mark.parametrize(
    "location",
    [
        "http://127.0.0.1/",
        "http://169.254.169.254/latest/meta-data/",
        "http://[::1]/",
        "//other.org/1.jpg",
        "file:///etc/passwd",
        "https://photos.example:22/",
        "\\\\inside.example\\",
        "http://2130706433/",
    ],
)
def test_redirects_lead_nowhere_that_is_refused(location: str) -> None:
    names = Names([LOOPBACK])
    with (
        serving({"/1": File(b"", location=location)}) as server,
        connections(("connect", LOOPBACK)) as seen,
        raises_code("url_refused"),
    ):
        from_loopback(server, "/1", names)
    assert (names.asked, len(seen)) == ([HOST], 1)


def test_a_name_that_moves_inside_between_two_looks_is_refused() -> None:
    names = Names([LOOPBACK], ["10.0.0.1"])
    with (
        serving({"/1": File(b"", location="/2")}) as server,
        connections(("connect", LOOPBACK)),
        raises_code("url_refused"),
    ):
        from_loopback(server, "/1", names)


@pytest.mark.parametrize(
    ("file", "code"),
    [
        (photo(b"x" * 1001), "image_too_large"),
        (photo(b"x" * 1001, stated=False), "image_too_large"),
        (photo(b"x" * 100, cuts=[50]), "url_failed"),
        (photo(answers=[404]), "url_failed"),
        (photo(answers=[500]), "url_failed"),
        (File(b"<html>", content_type="text/html"), "url_failed"),
        (File(b"{}", content_type=""), "url_failed"),
        (photo(b"x" * 50, further={"Content-Encoding": "gzip"}), "url_failed"),
    ],
)
def test_what_is_no_photo_is_not_taken(file: File, code: str) -> None:
    with serving({"/1.jpg": file}) as server, raises_code(code):
        from_loopback(server, "/1.jpg")


def test_a_photo_of_the_most_bytes_is_taken() -> None:
    for stated in (True, False):
        with serving({"/1.jpg": photo(b"x" * 1000, stated=stated)}) as server:
            assert len(from_loopback(server, "/1.jpg")) == 1000


def test_nobody_waits_for_a_server_that_says_nothing() -> None:
    with socket.create_server((LOOPBACK, 0)) as silent:
        port = silent.getsockname()[1]
        with raises_code("url_failed", match=r"within 0\.1 s"):
            fetch(
                f"http://{HOST}:{port}/", Names([LOOPBACK]), http=True, permits=is_loopback, ports={port}, total_s=0.1
            )


def test_a_photo_is_not_fetched_any_more_once_its_client_has_left() -> None:
    async def run(port: int) -> None:
        options: dict[str, Any] = {"http": True, "permits": is_loopback, "ports": {port}}
        async with OutboundHttp(Hosts.of_text("*"), resolve=Names([LOOPBACK]), **options) as http:
            with Deadline(60) as asking:
                asyncio.get_running_loop().call_soon(asking.disconnect)
                await UrlFetcher(http, 1000).fetch(f"http://{HOST}:{port}/")

    with socket.create_server((LOOPBACK, 0)) as silent, pytest.raises(ClientGoneError):
        asyncio.run(run(silent.getsockname()[1]))


def test_names_are_looked_up_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def answer(host: str, *_: Any, **__: Any) -> Any:
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 0))] * 2

    monkeypatch.setattr(socket, "getaddrinfo", answer)

    async def run() -> None:
        async with OutboundHttp(Hosts.of_text("*")) as http:
            await UrlFetcher(http, 1000).fetch(f"https://{HOST}/")

    with connections(), raises_code("url_refused"):
        asyncio.run(run())
    assert asked == ["photos.example."]  # no search domain makes another of it


# TLS


def test_the_certificate_must_be_the_hosts(tmp_path: Path) -> None:
    asked: list[str | None] = []
    presented, trusted = _tls(tmp_path, HOST, asked)
    with serving({"/1.jpg": photo()}, presented) as server:
        assert from_loopback(server, "/1.jpg", verify=trusted) == b"photo"
        assert asked == [HOST]  # the name, though the connection goes to an address
        parts = urlsplit(server.url)
        url = f"https://other.example:{parts.port}/1.jpg"
        options: dict[str, Any] = {"permits": is_loopback, "ports": {parts.port}}
        with raises_code("url_failed"):
            fetch(url, Names([LOOPBACK]), verify=trusted, **options)
        with raises_code("url_failed"):  # untrusted certificate
            from_loopback(server, "/1.jpg")


def _tls(folder: Path, host: str, asked: list[str | None]) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """A server's, that notes which names it is asked for, and a client's that trusts it."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.DNSName(host), x509.IPAddress(ipaddress.IPv4Address("127.0.0.9"))]), False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
        .sign(key, hashes.SHA256())
    )
    pem = folder / "server.pem"
    pem.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        + certificate.public_bytes(serialization.Encoding.PEM)
    )
    presented = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    presented.load_cert_chain(pem)
    presented.sni_callback = lambda _, name, __: asked.append(name)
    return presented, ssl.create_default_context(cafile=pem)


# Through the API


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory, astronaut: NDArray[np.uint8]) -> Iterator[tuple[str, str]]:
    """A service that takes loopback for the internet, and the URL of a photo there."""
    files = {
        "/astronaut.jpg": File(jpeg(astronaut), content_type="image/jpeg"),
        "/text": File(b"?", content_type="text/x"),
    }
    with serving(files) as photos, pytest.MonkeyPatch.context() as patch:
        port = urlsplit(photos.url).port
        assert port is not None
        loopback = partial(OutboundHttp, http=True, resolve=Names([LOOPBACK]), permits=is_loopback, ports={port})
        patch.setattr(wiring, "OutboundHttp", loopback)
        settings = load_settings(data_dir=tmp_path_factory.mktemp("fetching"), url_hosts="*.example", log_level="ERROR")
        with embedded(settings) as url:
            yield url, f"http://{HOST}:{port}"


def test_the_client_takes_urls_where_it_takes_photos(shop: tuple[str, str], astronaut: NDArray[np.uint8]) -> None:
    url, photos = shop
    urls = [f"{photos}/astronaut.jpg"]
    with Kith(url) as kith:
        kith.create_gallery("client")
        assert kith.detect(urls=urls).images == kith.detect(jpeg(astronaut)).images
        assert len(kith.embed(jpeg(astronaut), urls=urls).images) == 2
        kith.enroll("client", "ada", urls=urls, face="largest")
        for found in (kith.identify("client", urls=urls), kith.identify("client", jpeg(astronaut), urls=urls, top_k=1)):
            assert {result.subject for result in found.results} == {"ada"}
        for side in (jpeg(astronaut), Url(urls[0]), ("client", "ada")):
            assert kith.verify(Url(urls[0]), side).outcome == "same"
        kith.delete_gallery("client")


def test_each_photo_by_url_is_enrolled_or_fails_alone(shop: tuple[str, str], astronaut: NDArray[np.uint8]) -> None:
    url, photos = shop
    there = f"{photos}/astronaut.jpg"
    with httpx.Client(base_url=url) as client:
        client.post("/v1/galleries", json={"name": "shop"}).raise_for_status()
        body = {"urls": [there, f"{photos}/nothing", "https://10.0.0.1/"]}
        enrolled = client.post(
            "/v1/galleries/shop/subjects/ada/templates", json=body, headers={"Idempotency-Key": "1"}
        ).json()
        assert [entry.get("error", {}).get("code") for entry in enrolled["results"]] == [
            None,
            "url_failed",
            "url_refused",
        ]
        again = client.post(
            "/v1/galleries/shop/subjects/ada/templates", json={"urls": [there]}, headers={"Idempotency-Key": "1"}
        )
        assert again.json()["code"] == "idempotency_conflict"
        form = client.post(
            "/v1/galleries/shop/identify",
            data={"request": f'{{"urls": ["{there}"], "risk": {{"threshold": 0.5}}}}'},
            files={"images": jpeg(astronaut)},
        ).json()
        assert [(one["image"], one["outcome"]) for one in form["results"]] == [(0, "identified"), (1, "identified")]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"urls": ["https://10.0.0.1/"]}, "url_refused"),
        ({"urls": ["text"]}, "url_refused"),
        ({"urls": ["PHOTOS/text"]}, "url_failed"),
        ({"urls": ["PHOTOS/text"] * 17}, "invalid_request"),
        ({"urls": ["x" * 2049]}, "invalid_request"),
        ({"urls": []}, "invalid_request"),
        ({"urls": [None]}, "invalid_request"),
    ],
)
def test_a_lone_url_that_gives_no_photo_fails_the_call(shop: tuple[str, str], body: dict[str, Any], code: str) -> None:
    url, photos = shop
    known: Callable[[Any], Any] = lambda one: one.replace("PHOTOS", photos) if isinstance(one, str) else one  # noqa: E731
    answer = httpx.post(f"{url}/v1/detect", json={"urls": [known(one) for one in body["urls"]]})
    assert (answer.status_code, answer.json()["code"]) == (422, code)
