"""Retries: safe failures are repeated, ambiguous ones are reported."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kith import AsyncKith, Kith, KithClientError, KithUnreachableError
from kith.requests import FileStream
from kith.retries import MAX_DELAY_S, parse_retry_after_s
from tests.conftest import jpeg
from tests.faults.servers import Server
from tests.scripted import BROKEN, BUSY, ENROLLED, LIMITED, LOST, OK, Answer, answering


@pytest.mark.parametrize("answers", [[BUSY, LIMITED], [BROKEN, BUSY], [Answer(502), LOST]], ids=str)
def test_a_repeatable_call_is_retried_with_the_same_key_and_body(answers: list[Answer]) -> None:
    with answering(*answers, ENROLLED) as script, Kith(script.url) as kith:
        before = time.monotonic()
        assert kith.enroll("g", "ada", b"photo").subject == "ada"
        waited = time.monotonic() - before
    assert waited >= sum(float(answer.headers.get("Retry-After", 0)) for answer in answers)
    keys = {headers["Idempotency-Key"] for _, _, headers, _ in script.asked}
    assert (len(script.asked), len(keys)) == (3, 1)
    assert {body for *_, body in script.asked} == {b"photo"}


@pytest.mark.parametrize(
    "failure", [BROKEN, Answer(502), LOST, Answer(503, b'{"code": "storage_unavailable"}')], ids=str
)
def test_a_call_that_may_have_succeeded_is_not_repeated(failure: Answer) -> None:
    calls: tuple[Callable[[Kith], object], ...] = (
        lambda kith: kith.create_gallery("g"),
        lambda kith: kith.create_key("door", ["read"]),
        lambda kith: kith.rotate_key("0" * 12),
        lambda kith: kith.create_webhook("https://example.org/"),
        lambda kith: kith.create_album("g", FileStream(Path(__file__))),
    )
    for ask in calls:
        with answering(failure, OK) as script, Kith(script.url) as kith, pytest.raises(KithClientError) as raised:
            ask(kith)
        assert len(script.asked) == 1
        assert isinstance(raised.value, KithUnreachableError) is (failure is BROKEN)
        assert raised.value.maybe_done
        assert "Check before you repeat" in str(raised.value)


def test_a_call_that_was_not_done_says_so_and_is_repeated() -> None:
    made = Answer(201, b'{"name": "g"}')
    with answering(BUSY, LIMITED, made) as script, Kith(script.url) as kith:
        with pytest.raises(KithClientError, match="does not look like Kith"):
            kith.create_gallery("g")
        assert len(script.asked) == 3
    with answering(BUSY) as script, Kith(script.url, attempts=1) as kith, pytest.raises(KithClientError) as raised:
        kith.create_key("door", ["read"])
    assert not raised.value.maybe_done
    with Kith("http://127.0.0.1:9", attempts=2) as kith:
        for ask in (kith.ready, lambda: kith.create_gallery("g")):
            with pytest.raises(KithUnreachableError, match="Check that the server runs") as unreachable:
                ask()
            assert not unreachable.value.maybe_done
    with pytest.raises(ValueError, match="at least 1"):
        Kith("http://127.0.0.1:9", attempts=0)


def test_an_archive_is_uploaded_again_and_its_progress_counted_once(tmp_path: Path) -> None:
    """The server enrolls a photo once."""
    (tmp_path / "people.zip").write_bytes(b"PK" * 1_500_000)
    sent: list[int] = []

    async def awaited(url: str) -> None:
        async with AsyncKith(url, attempts=2) as kith:
            await kith.enroll_archive("g", FileStream(tmp_path / "people.zip", sent.append))

    with answering(BROKEN, BUSY) as script, Kith(script.url, attempts=2) as kith:
        with pytest.raises(KithClientError, match="overloaded"):
            kith.enroll_archive("g", FileStream(tmp_path / "people.zip", sent.append))
        assert sent == [1_000_000] * 3
        sent.clear()
        with pytest.raises(KithClientError, match="overloaded"):
            asyncio.run(awaited(script.url))
    assert sent == [1_000_000] * 3
    assert {body for *_, body in script.asked} == {b"PK" * 1_500_000}
    assert len(script.asked) == 4


def test_a_gallery_that_may_exist_is_created_again() -> None:
    exists = Answer(409, b'{"code": "gallery_exists"}')
    with answering(BROKEN, exists, OK) as script, Kith(script.url) as kith, pytest.raises(KithClientError):
        kith.create_gallery("g", exist_ok=True)  # the last answer describes no gallery
    assert [method for method, *_ in script.asked] == ["POST", "POST", "GET"]


@pytest.mark.parametrize(
    ("answer", "attempts", "asked"),
    [
        (BUSY, 3, 3),
        (Answer(404, b"nothing here"), 3, 1),
        (Answer(504, b'{"code": "deadline_exceeded"}'), 3, 1),
        (Answer(429, b"", {"Retry-After": str(int(MAX_DELAY_S) + 1)}), 3, 1),
    ],
    ids=str,
)
def test_the_last_response_is_raised(answer: Answer, attempts: int, asked: int) -> None:
    with answering(answer) as script, Kith(script.url, attempts=attempts) as kith:
        with pytest.raises(KithClientError) as raised:
            kith.ready()
        assert raised.value.status == answer.status
        assert len(script.asked) == asked


def test_retry_after_is_parsed() -> None:
    assert parse_retry_after_s(None) == 0
    assert parse_retry_after_s("17") == 17
    assert parse_retry_after_s("soon") == 0
    at = datetime.now(UTC) + timedelta(seconds=90)
    assert parse_retry_after_s(format_datetime(at, usegmt=True)) == pytest.approx(90, abs=5)
    assert parse_retry_after_s(format_datetime(at - timedelta(days=1))) == 0


def test_a_late_response_is_retried_then_reported_as_a_timeout() -> None:
    late = Answer(late=True)
    with answering(late, OK) as script, Kith(script.url, timeout_s=1) as kith:
        assert kith.ready().status == "ok"
        assert len(script.asked) == 2
    with (
        answering(late) as script,
        Kith(script.url, timeout_s=0.1, attempts=2) as kith,
        pytest.raises(KithUnreachableError, match="timed out"),
    ):
        kith.ready()


def test_a_truncated_export_raises() -> None:
    cut = Answer(body=b"{}", headers={"Content-Length": "100", "Connection": "close"})
    with answering(BUSY, cut) as script, Kith(script.url) as kith:
        pieces = kith.export_gallery("g")
        assert next(pieces) == b"{}"
        script.answers[0] = BROKEN
        with pytest.raises(KithUnreachableError):
            list(pieces)


def test_an_enrollment_survives_a_server_crash_and_happens_once(tmp_path: Path, astronaut: NDArray[np.uint8]) -> None:
    """The server is killed during the requests, and started again."""
    server = Server(tmp_path)
    server.wait_until_ready()
    try:
        with server.client(attempts=1) as kith:
            kith.create_gallery("g")
        asking = threading.Event()

        def enroll() -> None:
            with Kith(server.url, attempts=12) as client:
                for number in range(4):
                    asking.set()
                    done.append(client.enroll("g", f"ada-{number}", jpeg(astronaut), allow_duplicate=True))

        done: list[Any] = []
        thread = threading.Thread(target=enroll)
        thread.start()
        asking.wait(60)
        server.kill()
        server.launch()
        thread.join(90)
        assert [len(answer.results) for answer in done] == [1] * 4
        with server.client(attempts=4) as kith:
            assert {subject.id: subject.template_count for subject in kith.subjects("g")} == {
                f"ada-{n}": 1 for n in range(4)
            }
    finally:
        server.kill()
