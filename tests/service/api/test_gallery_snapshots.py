"""A request does not restore what was erased after its head arrived."""

from __future__ import annotations

import json
import socket

import numpy as np
import pytest

from kith import Kith, KithClientError

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


def vector_of(kith: Kith, rng: np.random.Generator) -> list[float]:
    vector: list[float] = rng.normal(size=kith.model().dimension).tolist()
    return vector


@pytest.mark.parametrize("request_", ["POST templates", "PUT", "PATCH"])
def test_a_slow_body_does_not_restore_an_erased_subject(
    server: str, kith: Kith, gallery: str, rng: np.random.Generator, request_: str
) -> None:
    vector = vector_of(kith, rng)
    kith.enroll(gallery, "eve", embeddings=[vector])
    method, _, rest = request_.partition(" ")
    body = {"embeddings": [vector]} if rest else {"name": "Eve"}
    path = "/".join([f"{method} /v1/galleries/{gallery}/subjects/eve", *rest.split()])
    slow = SlowRequest(server, path, json.dumps(body).encode())
    kith.delete_subject(gallery, "eve")
    if method == "PATCH":
        kith.put_subject(gallery, "eve")  # created again after the request began
    status, answer = slow.end()
    assert (status, answer["code"]) == (409, "subject_erased")
    if method == "PATCH":
        assert kith.subject(gallery, "eve").name is None
    else:
        with pytest.raises(KithClientError, match="no subject"):
            kith.subject(gallery, "eve")


@pytest.mark.parametrize("created_again", [False, True])
def test_a_slow_body_does_not_restore_a_deleted_gallery(
    server: str, kith: Kith, gallery: str, rng: np.random.Generator, created_again: bool
) -> None:
    vector = vector_of(kith, rng)
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
    if created_again:
        assert kith.gallery(gallery).subject_count == 0
    else:
        kith.create_gallery(gallery)  # succeeds, as none exists
