"""A slow request does not restore what was erased meanwhile, and a repeated deletion answers the first receipt."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numpy.typing import NDArray

from kith import Kith
from kith.wire.erasures import DeletedOut
from tests.conftest import jpeg
from tests.refusals import refusal

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class SlowRequest:
    """Request whose head was sent and whose body the server waits for."""

    def __init__(self, server: str, request: str, body: bytes, kind: str = "application/json") -> None:
        self._body = body
        port = int(server.rpartition(":")[2])
        self._connection = socket.create_connection(("127.0.0.1", port), timeout=60)
        head = [f"{request} HTTP/1.1", "Host: localhost", f"Content-Type: {kind}", f"Content-Length: {len(body)}"]
        head += ["Expect: 100-continue", "Connection: close", "", ""]
        self._connection.sendall("\r\n".join(head).encode())
        said = b""
        while len(said) < len(CONTINUE):
            said += self._connection.recv(len(CONTINUE) - len(said))
        assert said == CONTINUE

    def end(self) -> tuple[int, dict[str, object]]:
        with self._connection as connection:
            connection.sendall(self._body)
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        head, _, document = answer.partition(b"\r\n\r\n")
        return int(head.split()[1]), json.loads(document)


@pytest.fixture
def vector(kith: Kith, rng: np.random.Generator) -> list[float]:
    drawn: list[float] = rng.normal(size=kith.model().dimension).tolist()
    return drawn


def test_a_slow_body_does_not_restore_an_erased_subject(
    server: str, kith: Kith, gallery: str, vector: list[float]
) -> None:
    subject = f"/v1/galleries/{gallery}/subjects/eve"
    for request, body in (
        (f"POST {subject}/templates", {"embeddings": [vector]}),
        (f"PUT {subject}", {"name": "Eve"}),
        (f"PATCH {subject}", {"name": "Eve"}),
    ):
        kith.enroll(gallery, "eve", embeddings=[vector])
        slow = SlowRequest(server, request, json.dumps(body).encode())
        kith.delete_subject(gallery, "eve")
        if "PATCH" in request:
            kith.put_subject(gallery, "eve")  # created again after the request began
        status, answer = slow.end()
        assert (status, answer["code"]) == (409, "subject_erased")
        assert [(each.id, each.name) for each in kith.subjects(gallery)] == [("eve", None)] * ("PATCH" in request)


@pytest.mark.parametrize("created_again", [False, True])
def test_a_slow_body_does_not_restore_a_deleted_gallery(
    server: str, kith: Kith, gallery: str, vector: list[float], created_again: bool
) -> None:
    kith.enroll(gallery, "eve", embeddings=[vector])
    file, home = b"".join(kith.export_gallery(gallery)), f"POST /v1/galleries/{gallery}"
    slow = [
        SlowRequest(server, f"{home}/import?create=true", file, "application/x-ndjson"),
        SlowRequest(server, f"{home}/subjects/eve/templates", json.dumps({"embeddings": [vector]}).encode()),
    ]
    kith.delete_gallery(gallery)
    if created_again:
        kith.create_gallery(gallery)
    for request in slow:
        status, answer = request.end()
        assert (status, answer["code"]) == (404, "gallery_not_found")
    assert kith.create_gallery(gallery, exist_ok=True).subject_count == 0


def once(delete: Callable[..., DeletedOut], *arguments: str) -> DeletedOut:
    """Delete several times at once, and again: each answer is the first one."""
    with ThreadPoolExecutor(4) as desks:
        answers = [each.result() for each in [desks.submit(delete, *arguments) for _ in range(4)]]
    # Whether SQLite's log is empty depends on the time of the answer.
    first, *others = (each.model_dump(exclude={"receipt": {"log_emptied"}}) for each in (*answers, delete(*arguments)))
    assert all(other == first for other in others)
    return answers[0]


def test_of_a_subject_a_template_a_stranger_and_a_gallery(
    kith: Kith, gallery: str, rng: np.random.Generator, astronaut: NDArray[np.uint8]
) -> None:
    embeddings = list(rng.normal(size=(2, kith.model().dimension)).astype(np.float32))
    enrolled = kith.enroll(gallery, "ada", embeddings=embeddings, allow_duplicate=True, allow_inconsistent=True)
    one, two = (str(result.template) for result in enrolled.results)
    kith.put_subject(gallery, "tom")
    template = once(kith.delete_template, gallery, "ada", one)
    for subject, other in (("tom", one), ("tom", two), ("ada", "0" * 32)):
        assert refusal(kith.delete_template, gallery, subject, other) == (404, "template_not_found")
    first = once(kith.delete_subject, gallery, "ada")
    assert first.template_count == 1
    assert once(kith.delete_template, gallery, "ada", one).receipt.id == template.receipt.id
    assert refusal(kith.delete_subject, gallery, "adda") == (404, "subject_not_found")  # never existed
    kith.put_subject(gallery, "ada")  # a new decision
    second = once(kith.delete_subject, gallery, "ada")
    assert (second.template_count, second.receipt.id != first.receipt.id) == (0, True)
    assert len(list(kith.erasures(gallery, "ada"))) == 3

    kith.update_gallery(gallery, remember_strangers_days=30)
    stranger = kith.identify(gallery, jpeg(astronaut), faces="largest").results[0].stranger
    assert stranger is not None
    once(kith.forget_stranger, gallery, stranger.id)

    name = kith.create_gallery("deleted-twice").name
    kith.put_subject(name, "ada")
    assert once(kith.delete_gallery, name).subject_count == 1
    kith.create_gallery(name)
    assert kith.delete_gallery(name).subject_count == 0
    assert refusal(kith.delete_gallery, "never-created") == (404, "gallery_not_found")
