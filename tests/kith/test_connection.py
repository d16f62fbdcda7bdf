"""Addresses, keys, proxies, answers of other programs without their secrets, and the asynchronous client."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kith import AsyncKith, Kith, KithClientError, KithUnreachableError
from kith.requests import FileStream
from tests.scripted import OK, WITH_BOTH, Answer, Kind, answering, ask

PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


@WITH_BOTH
@pytest.mark.parametrize(
    "answer",
    [
        Answer(404, b"<html>nothing here</html>"),
        Answer(404, b'{"error": "nothing here"}'),
        Answer(400, b'{"code": null, "remedy": null}'),
        Answer(400, b'["code"]'),
        Answer(200, b"<html>welcome, hunter2</html>", {"Content-Type": "text/html"}),
        Answer(200, b'{"password": "hunter2"}'),
        Answer(200, b"\xff\xfe"),
        Answer(200, b"no gzip", {"Content-Encoding": "gzip"}),
        Answer(500, b"no gzip", {"Content-Encoding": "gzip"}),
    ],
    ids=str,
)
def test_a_response_of_another_program_is_reported_without_its_content(kind: Kind, answer: Answer) -> None:
    with answering(answer) as script:
        for call in (lambda kith: kith.health(), lambda kith: kith.events()):
            with pytest.raises(KithClientError) as raised:
                ask(kind, script.url, call)
            error = raised.value
            assert (error.status, error.code, error.problem["code"]) == (answer.status, "unknown", "unknown")
            assert "does not look like Kith" in str(error)
            assert "hunter2" not in str(error)
        assert len(script.asked) == 2, "not retried, and a stream not followed"


@pytest.mark.parametrize(
    ("url", "key", "code"),
    [
        ("http://host:abc", None, "invalid_address"),
        ("ftp://host", None, "invalid_address"),
        ("localhost:8000", None, "invalid_address"),
        ("http://", None, "invalid_address"),
        ("http://ada:hunter2", None, "invalid_address"),
        ("http://127.0.0.1/kith?key=hunter2", None, "invalid_address"),
        ("http://127.0.0.1/kith#hunter2", None, "invalid_address"),
        (None, None, "invalid_address"),
        ("http://host", "hunter2schl\xfcssel", "invalid_key"),
        ("http://host", "hunter2\nX-Other: 1", "invalid_key"),
    ],
)
def test_an_invalid_address_or_key_is_refused_without_showing_it(url: str | None, key: str | None, code: str) -> None:
    with pytest.raises(KithClientError) as raised:
        Kith(url, key)
    assert raised.value.code == code
    assert "hunter2" not in str(raised.value)


def test_a_password_in_the_address_is_not_reported() -> None:
    with Kith("http://ada:hunter2@127.0.0.1:9", attempts=1) as kith, pytest.raises(KithUnreachableError) as raised:
        kith.health()
    assert "http://127.0.0.1:9" in str(raised.value)
    assert "hunter2" not in str(raised.value) + str(raised.value.problem)


def test_requests_to_the_local_machine_bypass_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with answering(OK) as proxy, answering(OK) as script:
        for name in PROXIES:
            monkeypatch.setenv(name, proxy.url)
        for url in (script.url, "http://kith.example"):
            with Kith(url, attempts=1) as kith:
                kith.health()
        assert len(script.asked) == 1
        assert [path for _, path, _, _ in proxy.asked] == ["http://kith.example/healthz"]


@pytest.mark.parametrize(
    ("variable", "value"),
    [("HTTP_PROXY", "hunter2:::"), ("ALL_PROXY", "gopher://hunter2"), ("SSL_CERT_FILE", "/hunter2")],
)
def test_an_invalid_environment_is_refused_without_showing_it(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, value)
    Kith("http://127.0.0.1:9")
    with pytest.raises(KithClientError, match=variable) as raised:
        Kith("https://kith.example")
    assert raised.value.code == "invalid_environment"
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "\ud800"])
def test_values_without_a_json_form_are_not_sent(value: Any) -> None:
    with Kith("http://127.0.0.1:9") as kith, pytest.raises(KithClientError, match=r"invalid_request.*as JSON"):
        kith.update_subject("g", "s", metadata={"a": value})


@pytest.mark.parametrize(
    ("variables", "key", "sent"),
    [
        ({"KITH_API_KEY": "operator"}, None, "Bearer operator"),
        ({"KITH_API_KEY": "operator", "KITH_CLIENT_KEY": "client"}, None, "Bearer client"),
        ({"KITH_API_KEY": "operator", "KITH_CLIENT_KEY": ""}, None, "Bearer operator"),
        ({"KITH_API_KEY": "operator"}, "given\n", "Bearer given"),
        ({"KITH_API_KEY": "operator"}, "", None),
    ],
)
def test_address_and_key_are_read_from_the_environment(
    variables: dict[str, str], key: str | None, sent: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with answering(OK) as script:
        for name, value in {"KITH_URL": script.url, **variables}.items():
            monkeypatch.setenv(name, value)
        with Kith(api_key=key) as kith:
            kith.health()
    assert [headers.get("Authorization") for _, _, headers, _ in script.asked] == [sent]


@WITH_BOTH
def test_a_list_is_read_to_its_last_page(kind: Kind) -> None:
    item = '{"item": "%s", "outcome": "enrolled", "subject": null, "problem": null, "at": "2026-01-31T12:00:00Z"}'
    pages = [f'{{"data": [{item % "a"}, {item % "b"}], "next": "c"}}', f'{{"data": [{item % "c"}], "next": null}}']
    with answering(*(Answer(body=page.encode()) for page in pages)) as script:
        assert [each.item for each in ask(kind, script.url, lambda kith: kith.job_items("j"))] == ["a", "b", "c"]
    assert ["cursor=c" in path for _, path, _, _ in script.asked] == [False, True]


def test_neither_a_long_answer_nor_a_call_above_the_connection_limit_times_out(tmp_path: Path) -> None:
    async def work(url: str) -> None:
        async with AsyncKith(url, connections=1, timeout_s=0.2, attempts=1) as kith:
            importing = asyncio.ensure_future(kith.import_gallery("g", tmp_path / "file"))
            await asyncio.to_thread(script.arrived.wait, 10)
            waiting = asyncio.ensure_future(kith.health())
            await asyncio.sleep(0.5)
            assert (len(script.asked), importing.done(), waiting.done()) == (1, False, False)
            importing.cancel()
            assert (await waiting).status == "ok"

    (tmp_path / "file").touch()
    with answering(Answer(late=True), OK) as script:
        asyncio.run(work(script.url))


def test_no_photo_or_file_is_read_in_the_event_loop(tmp_path: Path) -> None:
    threads: list[int] = []

    class Opened:
        def read(self) -> bytes:
            threads.append(threading.get_ident())
            return b"photo"

    class Archive(FileStream):
        def __iter__(self) -> Iterator[bytes]:
            threads.append(threading.get_ident())
            yield from super().__iter__()

    (tmp_path / "file").write_bytes(b"content")
    archive = Archive(tmp_path / "file")
    calls = (
        lambda kith: kith.detect(Opened()),
        lambda kith: kith.verify([0.5], Opened()),
        lambda kith: kith.add_decoy("g", "ada", Opened()),
        lambda kith: kith.enroll_archive("g", archive),
    )
    with answering(Answer(400, b'{"code": "invalid_request"}')) as script:
        for number, call in enumerate(calls, 1):
            with pytest.raises(KithClientError, match="invalid_request"):
                ask(AsyncKith, script.url, call)
            assert len(threads) == number
    assert threading.get_ident() not in threads
