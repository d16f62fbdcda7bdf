"""Idempotency-Key on requests that create, on a real server with each kind of database."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx2 as httpx
import pytest
import sqlalchemy as sa

from kith import Kith
from service.server import embedded
from service.settings import load_settings
from service.storage.db.tables import answers
from tests.conftest import url_maker

MASTER: Final = "the first key of the service, which signs in"


@dataclass
class Served:
    http: httpx.Client
    database_url: str
    folder: Path

    def post(self, path: str, body: dict[str, Any] | bytes, key: str, token: str = MASTER) -> httpx.Response:
        sent: dict[str, Any] = {"content": body} if isinstance(body, bytes) else {"json": body}
        headers = {"Idempotency-Key": key, "Authorization": f"Bearer {token}"}
        return self.http.post(path, **sent, headers=headers)


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder: Path = tmp_path_factory.mktemp("idempotency")
    url = url_maker(request, folder)()
    settings = load_settings(
        data_dir=folder, database_url=url, api_key=MASTER, webhook_hosts="example.org", log_level="WARNING"
    )
    with embedded(settings) as address, httpx.Client(base_url=address, timeout=60) as http:
        with Kith(address, MASTER) as kith:
            kith.create_gallery("staff")
        yield Served(http, url, folder)


def archive(photo: bytes = b"no photo") -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as packed:
        packed.writestr("ada/1.jpg", photo)
    return file.getvalue()


CREATIONS: Final[list[tuple[str, dict[str, Any] | bytes, dict[str, Any] | bytes, str]]] = [
    ("/v1/galleries", {"name": "NAME"}, {"name": "NAME-other"}, "/v1/galleries?limit=1000"),
    (
        "/v1/keys",
        {"name": "NAME", "scopes": ["read"]},
        {"name": "NAME", "scopes": ["identify"]},
        "/v1/keys?limit=1000",
    ),
    (
        "/v1/webhooks",
        {"url": "https://example.org/NAME"},
        {"url": "https://example.org/other"},
        "/v1/webhooks",
    ),
    ("/v1/galleries/staff/enrollments", archive(), archive(b"another"), "/v1/jobs?limit=1000"),
]
NAMES: Final = ["gallery", "key", "webhook", "archive"]


def named(body: dict[str, Any] | bytes, name: str) -> dict[str, Any] | bytes:
    if isinstance(body, bytes):
        return body
    return {field: value.replace("NAME", name) if isinstance(value, str) else value for field, value in body.items()}


def count(served: Served, path: str) -> int:
    return len(served.http.get(path, headers={"Authorization": f"Bearer {MASTER}"}).json()["data"])


@pytest.mark.parametrize(("path", "body", "other", "listed"), CREATIONS, ids=NAMES)
def test_a_repeated_creation_gets_the_first_answer(
    served: Served, path: str, body: dict[str, Any] | bytes, other: dict[str, Any] | bytes, listed: str
) -> None:
    before, body = count(served, listed), named(body, "repeated")
    first = served.post(path, body, "repeated")
    assert first.status_code in (201, 202), first.text
    assert "idempotency-replayed" not in first.headers
    again = served.post(path, body, "repeated")
    assert (again.status_code, again.json()) == (first.status_code, first.json())
    assert again.headers["idempotency-replayed"] == "true"
    conflict = served.post(path, named(other, "repeated"), "repeated")
    assert (conflict.status_code, conflict.json()["code"]) == (409, "idempotency_conflict")
    assert count(served, listed) == before + 1


@pytest.mark.parametrize(("path", "body", "other", "listed"), CREATIONS, ids=NAMES)
def test_concurrent_repetitions_create_once(
    served: Served, path: str, body: dict[str, Any] | bytes, other: dict[str, Any] | bytes, listed: str
) -> None:
    before, body = count(served, listed), named(body, "concurrent")
    with ThreadPoolExecutor(8) as senders:
        sent = list(senders.map(lambda _: served.post(path, body, "concurrent"), range(8)))
    assert {answer.status_code for answer in sent} <= {201, 202}, [answer.text for answer in sent]
    assert len({answer.text for answer in sent}) == 1
    assert sum("idempotency-replayed" in answer.headers for answer in sent) == 7
    assert count(served, listed) == before + 1


def test_a_repeated_rotation_gets_the_same_token(served: Served) -> None:
    made = served.post("/v1/keys", {"name": "old", "scopes": ["read"]}, "to-rotate").json()
    path = f"/v1/keys/{made['id']}/rotate"
    first = served.post(path, {"overlap_s": 60}, "rotation")
    assert served.post(path, {"overlap_s": 60}, "rotation").json()["token"] == first.json()["token"]
    assert served.post(path, {"overlap_s": 60}, "another").json()["code"] == "key_ended"


def test_a_refused_creation_leaves_no_answer(served: Served) -> None:
    body = {"name": "taken"}
    assert served.post("/v1/galleries", body, "first").status_code == 201
    refused = served.post("/v1/galleries", body, "second")
    assert (refused.status_code, refused.json()["code"]) == (409, "gallery_exists")
    served.http.delete("/v1/galleries/taken", headers={"Authorization": f"Bearer {MASTER}"})
    for key in ("second", "second"):
        assert served.post("/v1/galleries", body, key).status_code == 201


def test_after_the_gallery_was_deleted_a_repetition_creates_it_again(served: Served) -> None:
    body = {"name": "again"}
    first = served.post("/v1/galleries", body, "again")
    served.http.delete("/v1/galleries/again", headers={"Authorization": f"Bearer {MASTER}"})
    second = served.post("/v1/galleries", body, "again")
    assert second.status_code == 201
    assert "idempotency-replayed" not in second.headers
    assert second.json()["created_at"] > first.json()["created_at"]


def test_another_caller_never_gets_the_answer(served: Served) -> None:
    body = {"name": "secret", "scopes": ["read"]}
    admin = served.post("/v1/keys", {"name": "other admin", "scopes": ["admin"]}, "other-admin").json()["token"]
    token = served.post("/v1/keys", body, "shared").json()["token"]
    others = served.post("/v1/keys", body, "shared", admin)
    assert others.status_code == 201
    assert others.json()["token"] != token


def test_stored_answers_are_sealed(served: Served) -> None:
    token = served.post("/v1/keys", {"name": "sealed", "scopes": ["read"]}, "a-key-nobody-guesses").json()["token"]
    engine = sa.create_engine(served.database_url.replace("postgresql://", "postgresql+psycopg://"))
    with engine.connect() as connection:
        rows = connection.execute(sa.select(answers)).all()
    engine.dispose()
    assert rows
    stored = repr([tuple(row) for row in rows]).encode()
    assert b"a-key-nobody-guesses" not in stored
    assert all(token.encode() not in row.sealed for row in rows)


def test_the_client_repeats_creations_by_itself(served: Served) -> None:
    address = str(served.http.base_url).rstrip("/")
    with Kith(address, MASTER) as kith:
        calls: list[Callable[[], Any]] = [
            lambda: kith.create_gallery("by-client", idempotency_key="client"),
            lambda: kith.create_key("by-client", ["read"], idempotency_key="client"),
            lambda: kith.create_webhook("https://example.org/client", idempotency_key="client"),
        ]
        for call in calls:
            assert call() == call()
