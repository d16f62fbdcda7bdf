"""Addresses, keys, proxies, answers of other programs without their secrets, and the asynchronous client."""

from __future__ import annotations

import asyncio
import inspect
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kith import AsyncKith, Kith, KithClientError, KithUnreachableError, Photo
from kith.calls import Calls
from kith.methods import Method
from kith.requests import FileStream
from tests.conftest import jpeg
from tests.scripted import BROKEN, BUSY, ENROLLED, LIMITED, OK, Answer, answering

PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


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
def test_a_response_of_another_program_is_reported_without_its_content(answer: Answer) -> None:
    async def awaited(url: str) -> None:
        async with AsyncKith(url) as kith:
            await kith.health()

    errors = []
    with answering(answer) as script, Kith(script.url) as kith:
        for ask in (kith.health, lambda: asyncio.run(awaited(script.url)), lambda: next(kith.events())):
            with pytest.raises(KithClientError) as raised:
                ask()
            errors.append(raised.value)
        assert len(script.asked) == 3, "not retried, and a stream not followed"
    for error in errors:
        assert (error.status, error.code, error.problem["code"]) == (answer.status, "unknown", "unknown")
        assert "does not look like Kith" in str(error)
        assert "hunter2" not in str(error)


@pytest.mark.parametrize("kind", [Kith, AsyncKith])
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
        ("http://host", "hunter2schl\xfcssel", "invalid_key"),
        ("http://host", "hunter2\nX-Other: 1", "invalid_key"),
    ],
)
def test_an_invalid_address_or_key_is_refused_without_showing_it(
    kind: type[Kith | AsyncKith], url: str, key: str | None, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KithClientError) as raised:
        kind(url, key)
    assert raised.value.code == code
    assert "hunter2" not in str(raised.value)
    monkeypatch.delenv("KITH_URL", raising=False)
    with pytest.raises(KithClientError, match="KITH_URL"):
        kind()
    with Kith("http://ada:hunter2@127.0.0.1:9", attempts=1) as kith, pytest.raises(KithUnreachableError) as unreachable:
        kith.health()
    assert "http://127.0.0.1:9" in str(unreachable.value)
    assert "hunter2" not in str(unreachable.value) + str(unreachable.value.problem)


@pytest.mark.parametrize("kind", [Kith, AsyncKith])
def test_requests_to_the_local_machine_bypass_proxies(
    kind: type[Kith | AsyncKith], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def asked(client: AsyncKith) -> None:
        async with client:
            await client.health()

    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with answering(OK) as proxy, answering(OK) as script:
        for name in PROXIES:
            monkeypatch.setenv(name, proxy.url)
        client = kind(script.url, "KEY")
        if isinstance(client, Kith):
            with client:
                client.health()
        else:
            asyncio.run(asked(client))
        assert (len(script.asked), proxy.asked) == (1, [])
        with Kith("http://kith.example", attempts=1) as elsewhere:
            elsewhere.health()
        assert proxy.asked[0][1] == "http://kith.example/healthz"


@pytest.mark.parametrize("kind", [Kith, AsyncKith])
@pytest.mark.parametrize(
    ("variable", "value"),
    [("HTTP_PROXY", "hunter2:::"), ("ALL_PROXY", "gopher://hunter2"), ("SSL_CERT_FILE", "/hunter2")],
)
def test_an_invalid_environment_is_refused_without_showing_it(
    kind: type[Kith | AsyncKith], variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, value)
    kind("http://127.0.0.1:9")
    with pytest.raises(KithClientError, match=variable) as raised:
        kind("https://kith.example")
    assert raised.value.code == "invalid_environment"
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "\ud800"])
def test_values_without_a_json_form_are_not_sent(value: Any) -> None:
    with answering(OK) as script, Kith(script.url) as kith:
        with pytest.raises(KithClientError, match="as JSON") as raised:
            kith.update_subject("g", "s", metadata={"a": value})
        assert (raised.value.code, script.asked) == ("invalid_request", [])


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
    async def asked() -> None:
        async with AsyncKith(api_key=key) as kith:
            await kith.health()

    with answering(OK) as script:
        for name, value in {"KITH_URL": script.url, **variables}.items():
            monkeypatch.setenv(name, value)
        with Kith(api_key=key) as kith:
            kith.health()
        asyncio.run(asked())
    assert [headers.get("Authorization") for _, _, headers, _ in script.asked] == [sent, sent]


@pytest.mark.parametrize(
    ("detail", "said"),
    [
        ("body.top_k: too small; query.tag.0: too long", "top_k: too small; tags.0: too long"),
        ("body.images: List should have", "photos: List should have"),
    ],
)
def test_a_refusal_speaks_of_the_arguments_of_the_client(detail: str, said: str) -> None:
    error = KithClientError(422, {"code": "invalid_request", "detail": detail, "remedy": "Send the field."})
    assert said in str(error)
    assert error.problem["detail"] == detail


def test_enroll_identify_export_and_import(
    server: str, astronaut: NDArray[np.uint8], actor: NDArray[np.uint8], tmp_path: Path
) -> None:
    async def work() -> None:
        async with AsyncKith(server) as kith:
            await kith.create_gallery("awaited")
            people: dict[str, Photo] = {"ada": jpeg(astronaut), "tom": actor}
            await asyncio.gather(*(kith.enroll("awaited", name, photo) for name, photo in people.items()))
            (found,) = (await kith.identify("awaited", astronaut)).results
            assert (found.outcome, found.subject) == ("identified", "ada")
            assert {subject.id async for subject in kith.subjects("awaited")} == {"ada", "tom"}
            file = tmp_path / "g.ndjson"
            file.write_bytes(b"".join([piece async for piece in kith.export_gallery("awaited")]))
            sent: list[int] = []
            taken = await kith.import_gallery("copy", file, create=True, progress=sent.append)
            assert (taken.template_count, sum(sent)) == (2, file.stat().st_size)
            assert {"awaited", "copy"} <= await kith.gallery_names()
            with pytest.raises(KithClientError, match="gallery_not_found"):
                await kith.gallery("nothing")
            for name in ("awaited", "copy"):
                await kith.delete_gallery(name)

    asyncio.run(work())


def test_cancellation_closes_the_connection() -> None:
    with answering(Answer(late=True), OK) as script:

        async def work() -> None:
            async with AsyncKith(script.url) as kith:
                call = asyncio.ensure_future(kith.ready())
                await asyncio.to_thread(script.arrived.wait, 10)
                call.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await call
                assert await asyncio.to_thread(script.gone.wait, 10)
                assert (await kith.ready()).status == "ok"

        asyncio.run(work())
    assert len(script.asked) == 2


def test_calls_above_the_connection_limit_wait(server: str) -> None:
    async def work() -> None:
        async with AsyncKith(server, connections=4, timeout_s=60) as kith:
            answers = await asyncio.gather(*(kith.health() for _ in range(300)))
            assert {answer.status for answer in answers} == {"ok"}

    asyncio.run(work())


def test_the_retry_policy_is_the_same() -> None:
    with answering(BROKEN, BUSY, LIMITED, ENROLLED, BROKEN) as script:

        async def work() -> None:
            async with AsyncKith(script.url) as kith:
                assert (await kith.enroll("g", "ada", b"photo")).subject == "ada"
                with pytest.raises(KithUnreachableError) as raised:
                    await kith.roll_back("g")
                assert raised.value.maybe_done

        asyncio.run(work())
    assert len(script.asked) == 5


def test_no_call_reads_a_photo_or_a_file_in_the_event_loop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every call is tried, so that a new one that takes a photo cannot be forgotten."""
    threads: list[int] = []

    class Opened:
        def read(self) -> bytes:
            threads.append(threading.get_ident())
            return b"photo"

    class Stream(FileStream):
        def __init__(self, *arguments: Any) -> None:
            threads.append(threading.get_ident())
            super().__init__(*arguments)

    monkeypatch.setattr("kith.calls.FileStream", Stream)
    (tmp_path / "file").write_bytes(b"content")
    samples = {"archive": tmp_path / "file", "file": tmp_path / "file", "scopes": ["read"]}

    def arguments(describe: Any) -> tuple[list[Any], bool]:
        """Return sample arguments, and whether one is a photo or a file."""
        values, reads = [], False
        for each in list(inspect.signature(describe).parameters.values())[1:]:
            photo = any(kind in str(each.annotation) for kind in ("Photo", "Side"))
            needed = each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD
            if photo or needed:
                values.append(Opened() if photo else samples.get(each.name, "x"))
                reads = reads or photo or each.name in ("archive", "file")
        return values, reads

    async def work(url: str) -> set[str]:
        reading = set()
        async with AsyncKith(url, attempts=1) as kith:
            for name, method in vars(Calls).items():
                if not isinstance(method, Method) or not (given := arguments(method.describe))[1]:
                    continue
                threads.clear()
                with pytest.raises(KithClientError):
                    await getattr(kith, name)(*given[0])
                assert threads and threading.get_ident() not in threads, name
                reading.add(name)
        return reading

    with answering(Answer(400, b'{"code": "invalid_request"}')) as script:
        reading = asyncio.run(work(script.url))
    assert reading >= {"detect", "embed", "verify", "enroll", "identify", "add_decoy", "import_gallery", "create_album"}
