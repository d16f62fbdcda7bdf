"""Retries: what did not happen is repeated, what may have happened is reported unless a repetition changes nothing."""

from __future__ import annotations

import time
from pathlib import Path

import httpx2 as httpx
import pytest

from kith import KithClientError, KithUnreachableError
from kith.requests import Call, FileStream
from kith.retries import MAX_DELAY_S, retry_s
from tests.scripted import BROKEN, BUSY, ENROLLED, OK, WITH_BOTH, Answer, Kind, answering, ask

REQUEST = httpx.Request("POST", "http://127.0.0.1:9/v1/galleries")
RETRIED, MAYBE_DONE, FAILED = "retried", "maybe done", "failed"


def response(status: int, code: str | None = None, **headers: str) -> httpx.Response:
    body = b"<html>" if code is None else f'{{"code": "{code}"}}'.encode()
    return httpx.Response(status, headers=headers, content=body, request=REQUEST)


def outcome(failure: httpx.Response | httpx.TransportError, repeatable: bool, attempt: int = 0) -> str:
    """Return what happens after this attempt of two."""
    try:
        retry_s(Call("POST", "/v1/galleries", bytes, repeatable=repeatable), attempt, 2, failure)
    except KithClientError as error:
        assert isinstance(error, KithUnreachableError) is isinstance(failure, httpx.TransportError)
        assert ("Check before you repeat" in str(error)) is error.maybe_done
        return MAYBE_DONE if error.maybe_done else FAILED
    return RETRIED


@pytest.mark.parametrize(
    ("failure", "repeatable", "other"),
    [
        (response(503, "overloaded"), RETRIED, RETRIED),
        (response(429, "too_many_streams"), RETRIED, RETRIED),
        (response(503, "storage_unavailable"), RETRIED, MAYBE_DONE),
        (response(502), RETRIED, MAYBE_DONE),
        (response(504, "node_lost"), RETRIED, MAYBE_DONE),
        (response(504, "deadline_exceeded"), FAILED, FAILED),
        (response(404), FAILED, FAILED),
        (response(429, **{"Retry-After": str(int(MAX_DELAY_S) + 1)}), FAILED, FAILED),
        (response(429, "rate_limited", **{"Retry-After": "soon"}), RETRIED, RETRIED),
        (httpx.ReadError("reset", request=REQUEST), RETRIED, MAYBE_DONE),
        (httpx.ReadTimeout("timed out", request=REQUEST), RETRIED, MAYBE_DONE),
        (httpx.ConnectError("refused", request=REQUEST), RETRIED, RETRIED),
        (httpx.UnsupportedProtocol("gopher", request=REQUEST), FAILED, FAILED),
    ],
    ids=str,
)
def test_what_is_safe_is_retried_until_the_last_attempt(
    failure: httpx.Response | httpx.TransportError, repeatable: str, other: str
) -> None:
    assert (outcome(failure, True), outcome(failure, False)) == (repeatable, other)
    last = MAYBE_DONE if other == MAYBE_DONE else FAILED
    assert (outcome(failure, True, attempt=1), outcome(failure, False, attempt=1)) == (FAILED, last)


def test_the_delay_is_exponential_and_at_least_what_the_server_asks_for() -> None:
    call = Call("GET", "/", bytes)
    assert 17 <= retry_s(call, 0, 9, response(503, "overloaded", **{"Retry-After": "17"})) < 18
    delays = [retry_s(call, attempt, 99, response(503, "overloaded")) for attempt in range(12)]
    for delay_s, doubled in zip(delays, [0.2 * 2**attempt for attempt in range(12)], strict=True):
        assert min(MAX_DELAY_S, doubled) / 2 <= delay_s <= min(MAX_DELAY_S, doubled)


@WITH_BOTH
def test_a_call_is_repeated_with_the_same_key_and_body(kind: Kind) -> None:
    before = time.monotonic()
    with answering(BROKEN, BUSY, ENROLLED, BROKEN) as script:
        assert ask(kind, script.url, lambda kith: kith.enroll("g", "ada", b"photo")).subject == "ada"
        assert time.monotonic() - before >= 0.3, "two delays passed"
        assert len({(body, headers["Idempotency-Key"]) for _, _, headers, body in script.asked}) == 1
        with pytest.raises(KithUnreachableError) as raised:
            ask(kind, script.url, lambda kith: kith.roll_back("g"))
    assert raised.value.maybe_done
    assert len(script.asked) == 4


@WITH_BOTH
def test_attempts_are_counted_and_each_has_a_timeout(kind: Kind) -> None:
    for answer, timeout_s, said in ((BUSY, 60, "overloaded"), (Answer(late=True), 0.1, r"\((timed out|ReadTimeout)\)")):
        with answering(answer) as script, pytest.raises(KithClientError, match=said):
            ask(kind, script.url, lambda kith: kith.ready(), attempts=2, timeout_s=timeout_s)
        assert len(script.asked) == 2
    with pytest.raises(KithUnreachableError, match="Check that the server runs"):
        ask(kind, "http://127.0.0.1:9", lambda kith: kith.ready(), attempts=1)


@WITH_BOTH
def test_an_archive_is_uploaded_again_and_its_progress_counted_once(kind: Kind, tmp_path: Path) -> None:
    (tmp_path / "people.zip").write_bytes(b"PK" * 1_500_000)
    sent: list[int] = []
    with answering(BROKEN, BUSY) as script, pytest.raises(KithClientError, match="overloaded"):
        archive = FileStream(tmp_path / "people.zip", sent.append)
        ask(kind, script.url, lambda kith: kith.enroll_archive("g", archive), attempts=2)
    assert sent == [1_000_000] * 3
    assert [body for *_, body in script.asked] == [b"PK" * 1_500_000] * 2


@WITH_BOTH
def test_a_gallery_that_may_exist_is_created_again(kind: Kind) -> None:
    exists = Answer(409, b'{"code": "gallery_exists"}')
    with answering(BROKEN, exists, OK) as script, pytest.raises(KithClientError):
        ask(kind, script.url, lambda kith: kith.create_gallery("g", exist_ok=True))  # OK describes no gallery
    assert [method for method, *_ in script.asked] == ["POST", "POST", "GET"]


@WITH_BOTH
def test_a_stream_is_repeated_until_it_begins(kind: Kind) -> None:
    whole, cut = (Answer(body=b"{}", headers={"Content-Length": size, "Connection": "close"}) for size in ("2", "100"))
    with answering(BUSY, whole, cut) as script:
        assert b"".join(ask(kind, script.url, lambda kith: kith.export_gallery("g"))) == b"{}"
        with pytest.raises(KithUnreachableError):
            ask(kind, script.url, lambda kith: kith.export_gallery("g"))
    assert len(script.asked) == 3
