"""Photos by URL: refused before a socket is opened, and never from anywhere but the address that was looked at."""

from __future__ import annotations

import asyncio
import socket
import ssl
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import httpx2 as httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from kith import Kith, Url
from service import wiring
from service.core.deadlines import Deadline
from service.core.errors import ClientGoneError
from service.inference.url_fetching import UrlFetcher
from service.security.addresses import Address, Hosts
from service.security.outbound_http import OutboundHttp
from service.server import embedded
from service.settings import load_settings
from tests.certificates import certify
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


def fetch(url: str, names: Names | None, hosts: str = "*.example,photos.example", **options: Any) -> bytes:
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
        "data:image/png;base64,AAAA",
        "photos.example/1.jpg",
        "https://user@photos.example/",
        "https://photos.example\\@other.example.org/",
        "https://other.example.org/1.jpg",
        "https://photos.example:8443/",
        "https://169.254.169.254/latest/meta-data/",
        "https://photos.example\r\nHost: inside/",
        "https://photos.example\u202e/",
        "https://" + "a" * 2100 + ".example/",
        "",
    ],
)
def test_refused_without_a_name_looked_up_or_a_socket_opened(url: str) -> None:
    names = Names([LOOPBACK])
    with connections(), raises_code("url_refused") as refused:
        fetch(url, names)
    assert names.asked == []
    assert refused.value.detail == "photos from this URL are not allowed"


@pytest.mark.parametrize(
    "answer",
    [
        ["8.8.8.8", "127.0.0.1"],
        ["10.0.0.1", "8.8.8.8"],
        ["8.8.8.8", "no address"],
        ["2606:4700::1%2"],
        [],
        OSError("no such name"),
    ],
)
def test_a_name_of_an_address_in_here_is_refused_like_one_that_does_not_exist(answer: list[str] | OSError) -> None:
    with connections(), raises_code("url_refused") as refused:
        fetch(f"https://{HOST}/", Names(answer))
    with connections(), raises_code("url_refused") as elsewhere:
        fetch("https://nobody.listed.org/", Names(answer))
    assert refused.value.document() == elsewhere.value.document()
    with connections(), raises_code("url_refused"):
        fetch(f"https://{HOST}/", Names(answer), hosts="")  # the default


# Fetched


def test_a_photo_is_fetched_from_the_address_that_was_looked_at_and_named_by_its_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.3:9")  # not asked
    names = Names([LOOPBACK], ["127.0.0.2"])
    with serving({"/1.jpg?size=2": photo()}) as server:
        with connections(("connect", LOOPBACK)) as seen:
            assert from_loopback(server, "/1.jpg?size=2#top", names) == b"photo"
        assert names.asked == [HOST]
        assert seen == [("connect", LOOPBACK)]
        # The next address is tried if one does not answer.
        assert from_loopback(server, "/1.jpg?size=2", Names(["127.0.0.9", LOOPBACK])) == b"photo"
    headers, _ = server.headers
    assert headers.pop("host") == urlsplit(server.url).netloc.replace(LOOPBACK, HOST)
    assert headers.pop("accept-encoding") == "identity"
    assert headers.keys() == {"user-agent", "accept", "connection"}  # no cookies, no credentials


def test_redirects_are_followed_a_few_times_each_looked_at_anew() -> None:
    names = Names([LOOPBACK])
    with serving({"/1": File(b"", location="/2"), "/2": File(b"", location="3"), "/3": photo()}) as server:
        assert from_loopback(server, "/1", names) == b"photo"
        assert names.asked == [HOST] * 3
        server.files["/3"] = File(b"", location="/1")
        with raises_code("url_failed", match="more than 3 times"):
            from_loopback(server, "/1", names)
        assert len(server.headers) == 3 + 4
        with connections(("connect", LOOPBACK)) as seen, raises_code("url_refused"):
            from_loopback(server, "/1", Names([LOOPBACK], ["10.0.0.1"]))  # its name moves inside between two looks
        assert len(seen) == 1
        for location in (
            "http://127.0.0.1/",
            "http://169.254.169.254/latest/meta-data/",
            "//other.org/1.jpg",
            "file:///etc/passwd",
            "https://photos.example:22/",
            "\\\\inside.example\\",
        ):
            server.files["/1"], names = File(b"", location=location), Names([LOOPBACK])
            with connections(("connect", LOOPBACK)) as seen, raises_code("url_refused"):
                from_loopback(server, "/1", names)
            assert (names.asked, len(seen)) == ([HOST], 1)
    assert "cookie" not in {name for headers in server.headers for name in headers}


@pytest.mark.parametrize(
    ("file", "code"),
    [
        (photo(b"x" * 1000), None),
        (photo(b"x" * 1000, stated=False), None),
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
def test_a_photo_of_the_most_bytes_is_taken_and_nothing_else(file: File, code: str | None) -> None:
    with serving({"/1.jpg": file}) as server, nullcontext() if code is None else raises_code(code):
        assert from_loopback(server, "/1.jpg") == file.content


def test_nobody_waits_for_a_server_that_says_nothing() -> None:
    async def leave(url: str, options: dict[str, Any]) -> None:
        async with OutboundHttp(Hosts.of_text("*"), resolve=Names([LOOPBACK]), **options) as http:
            with Deadline(60) as asking:
                asyncio.get_running_loop().call_soon(asking.disconnect)
                await UrlFetcher(http, 1000).fetch(url)

    with socket.create_server((LOOPBACK, 0)) as silent:
        port = silent.getsockname()[1]
        url = f"http://{HOST}:{port}/"
        options: dict[str, Any] = {"http": True, "permits": is_loopback, "ports": {port}}
        with raises_code("url_failed", match=r"within 0\.1 s"):
            fetch(url, Names([LOOPBACK]), total_s=0.1, **options)
        with pytest.raises(ClientGoneError):
            asyncio.run(leave(url, options))


def test_names_are_looked_up_in_ascii_and_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def answer(host: str, *_: Any, **__: Any) -> Any:
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 0))] * 2

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    with connections(), raises_code("url_refused"):
        fetch("https://bücher.example/", None)
    assert asked == ["xn--bcher-kva.example."]  # no search domain makes another of it


def test_the_certificate_must_be_the_hosts(tmp_path: Path) -> None:
    asked, pem = list[str | None](), tmp_path / "server.pem"
    certify(pem, HOST)
    presented, trusted = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context(cafile=pem)
    presented.load_cert_chain(pem)
    presented.sni_callback = lambda _, name, __: asked.append(name)
    with serving({"/1.jpg": photo()}, presented) as server:
        assert from_loopback(server, "/1.jpg", verify=trusted) == b"photo"
        assert asked == [HOST]  # the name, though the connection goes to an address
        parts = urlsplit(server.url)
        options: dict[str, Any] = {"permits": is_loopback, "ports": {parts.port}}
        with raises_code("url_failed"):
            fetch(f"https://other.example:{parts.port}/1.jpg", Names([LOOPBACK]), verify=trusted, **options)
        with raises_code("url_failed"):  # untrusted certificate
            from_loopback(server, "/1.jpg")


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


def test_urls_are_taken_where_photos_are_and_fail_alone(shop: tuple[str, str], astronaut: NDArray[np.uint8]) -> None:
    url, photos = shop
    there = f"{photos}/astronaut.jpg"
    with Kith(url) as kith, httpx.Client(base_url=f"{url}/v1/galleries/shop") as http:
        kith.create_gallery("shop")
        assert kith.detect(urls=[there]).images == kith.detect(jpeg(astronaut)).images
        assert len(kith.embed(jpeg(astronaut), urls=[there]).images) == 2
        keyed, templates = {"Idempotency-Key": "1"}, "/subjects/ada/templates"
        body = {"urls": [there, f"{photos}/nothing", "https://10.0.0.1/"]}
        enrolled = http.post(templates, json=body, headers=keyed).json()["results"]
        codes = [entry.get("error", {}).get("code") for entry in enrolled]
        assert codes == [None, "url_failed", "url_refused"]
        again = http.post(templates, json={"urls": [there]}, headers=keyed)
        assert again.json()["code"] == "idempotency_conflict"
        request = f'{{"urls": ["{there}"], "risk": {{"threshold": 0.5}}}}'
        form = http.post("/identify", data={"request": request}, files={"images": jpeg(astronaut)}).json()
        assert [(one["image"], one["outcome"]) for one in form["results"]] == [(0, "identified"), (1, "identified")]
        for side in (jpeg(astronaut), Url(there), ("shop", "ada")):
            assert kith.verify(Url(there), side).outcome == "same"
        for urls, code in (
            (["https://10.0.0.1/"], "url_refused"),
            (["text"], "url_refused"),
            ([f"{photos}/text"], "url_failed"),
            ([], "invalid_request"),
        ):
            answer = httpx.post(f"{url}/v1/detect", json={"urls": urls})
            assert (answer.status_code, answer.json()["code"]) == (422, code)
