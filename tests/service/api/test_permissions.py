"""Every route with every scope and gallery restriction, and isolation of galleries between keys."""

from __future__ import annotations

import json
import re
import threading
from base64 import b64encode
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
import sqlalchemy as sa

from kith import Kith
from kith.wire.common import Scope
from service.api.http.access import needs_of
from service.api.http.openapi import PHOTO
from service.app import create_app
from service.security.api_keys import SCOPES, Rights
from service.server import embedded
from service.settings import load_settings
from service.storage.repositories.api_keys import KeyStore
from service.storage.repositories.jobs import JobStore
from service.storage.repositories.store import Store
from tests.conftest import ROOT, jpeg
from tests.databases import open_database
from tests.packs import BUNDLED_DIMENSION
from tests.service.usecases.test_bulk_enrollment import Bytes, as_zip

OPERATOR = "an operator key of sufficient length"
APP = create_app(load_settings(_env_file=None))
OWN, OTHER, ABSENT = "own", "zebra", "quail"
GRAY_PHOTO = jpeg(np.full((48, 48, 3), 128, np.uint8))
GRAY = b64encode(GRAY_PHOTO).decode()
VECTOR = [1.0, *[0.0] * (BUNDLED_DIMENSION - 1)]
NOTHING = "0" * 32


@dataclass(frozen=True)
class Row:
    """Expected permissions of a route.

    ``scope``: None if any key is enough. ``bound``: the path, body, query or job names the gallery ``own``.
    """

    scope: str | None
    all_galleries: bool
    keyless: bool
    bound: bool
    body: Any = None
    query: dict[str, str] = field(default_factory=dict)


G = "/v1/galleries/{gallery}"
FOR_BROWSERS = (
    "GET /",
    "GET /console",
    "GET /console/{file:path}",
    "GET /docs",
    "GET /docs/swagger-ui.css",
    "GET /docs/swagger-ui-bundle.js",
    "GET /openapi.json",
)
BODIES: dict[str, Any] = {
    "POST /v1/verify": {"a": {"image": GRAY}, "b": {"subject": {"gallery": OWN, "subject": "ada"}}},
    f"POST {G}/identify": {"images": [GRAY]},
    f"POST {G}/import": {},
    f"POST {G}/enrollments": {},
    f"POST {G}/albums": {},
}
"""Bodies other than the examples, which choose a risk, or of routes without an example."""
QUERIES = {"GET /v1/jobs": {"gallery": OWN}}


def rows() -> dict[str, Row]:
    """Return the permissions that the REST reference promises, and the bodies of the OpenAPI document's examples."""
    found = {route: Row(None, False, keyless=True, bound=False) for route in FOR_BROWSERS}
    examples = {
        f"{method.upper()} {path}": body.get("application/json", {}).get("example")
        for path, operations in APP.openapi()["paths"].items()
        for method, operation in operations.items()
        for body in [operation.get("requestBody", {}).get("content", {})]
    }
    lines = (ROOT / "docs" / "rest-reference.md").read_text().splitlines()
    for line in lines:
        if (
            parts := re.fullmatch(r"\| `([A-Z]+ \S+)` \| (no key|any key|`(\w+)`)(, all galleries)? \| [^|]* \|", line)
        ) is None:
            continue
        route, words, scope, everywhere = parts.groups()
        text = json.dumps(BODIES.get(route, examples[route])).replace(PHOTO, GRAY).replace('"staff"', f'"{OWN}"')
        query = QUERIES.get(route, {})
        bound = "{gallery}" in route or "{job}" in route or OWN in query.values() or route == "POST /v1/verify"
        found[route] = Row(scope or None, bool(everywhere), words == "no key", bound, json.loads(text), query)
    return found


ROWS = rows()


@dataclass(frozen=True)
class House:
    """Server with two galleries and the name of a third. ``tokens``: by scope and galleries."""

    url: str
    http: httpx.Client
    jobs: dict[str, str]
    tokens: dict[tuple[Scope, str], str]
    bad: dict[str, str | None]
    revoked: str
    database: str

    def ask(self, token: str | None, route: str, gallery: str = OWN, **options: Any) -> httpx.Response:
        method, _, path = route.replace("{file:path}", "main.js").partition(" ")
        known = {"gallery": gallery, "subject": "ada", "job": self.jobs.get(gallery, NOTHING), "group": "g1"}
        path = re.sub("{([a-z]+)}", lambda name: (known | {"key": self.revoked}).get(name[1], NOTHING), path)
        headers = {name.encode(): value.encode() for name, value in options.pop("headers", {}).items()}
        if token is not None:
            headers[b"Authorization"] = f"Bearer {token}".encode()
        with self.http.stream(method, path, headers=headers, **options) as answer:
            if answer.headers.get("content-type", "").startswith("text/event-stream"):
                return httpx.Response(answer.status_code, headers=answer.headers)  # its body has no end
            answer.read()
        return answer

    def create(self, kith: Kith, gallery: str) -> None:
        """Create a gallery with a subject and a job."""
        kith.create_gallery(gallery)
        self.jobs[gallery] = kith.enroll_archive(gallery, Bytes(as_zip({"bo/one.jpg": GRAY_PHOTO}))).id
        kith.wait_for(self.jobs[gallery], 60)

    def restore(self, route: str) -> None:
        """Create again what the request deleted."""
        others = ("template", "stranger", "album")
        if route.startswith("DELETE /v1/galleries") and not any(other in route for other in others):
            with Kith(self.url, OPERATOR) as kith:
                if "subject" not in route:
                    self.create(kith, OWN)
                kith.enroll(OWN, "ada", embeddings=[VECTOR], allow_duplicate=True)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    settings = load_settings(data_dir=tmp_path_factory.mktemp("house"), api_key=OPERATOR, log_level="WARNING")
    with (
        embedded(settings) as url,
        Kith(url, OPERATOR) as kith,
        closing(open_database(settings.sql_url)) as database,
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        store, of = KeyStore(database), {OWN: frozenset({OWN}), OTHER: frozenset({OTHER}), "all": None}
        tokens = {
            (scope, galleries): store.create("k", Rights(frozenset({scope}), names))[1]
            for scope in SCOPES
            for galleries, names in of.items()
        }
        everything = Rights(frozenset(SCOPES), None)
        revoked, ended = store.create("k", everything)
        store.revoke(revoked.id)
        bad = {
            "none": None,
            "expired": store.create("k", everything, datetime.now(UTC) - timedelta(seconds=1))[1],
            "revoked": ended,
            "wrong secret": tokens["admin", "all"][:-1] + "x",
            "unknown id": f"kith_{'0' * 12}_{'0' * 64}",
            "of no form": "kith_",
            "not ASCII": "\N{LATIN SMALL LETTER E WITH ACUTE}",
        }
        made = House(url, http, {}, tokens, bad, revoked.id, settings.sql_url)
        for name in (OWN, OTHER):
            made.create(kith, name)
            kith.enroll(name, "ada", embeddings=[VECTOR], allow_duplicate=True)
        yield made


def test_the_table_covers_every_route_and_scope(house: House) -> None:
    assert {row.scope for row in ROWS.values()} <= {*SCOPES, None}
    needs = {route: need for route, need in needs_of(APP.routes).items() if not route.startswith("HEAD ")}
    assert ROWS.keys() == needs.keys()
    assert {route for route, need in needs.items() if need is None} == {
        route for route, row in ROWS.items() if row.keyless
    }
    document = house.ask(None, "GET /openapi.json").json()
    served = {f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods}
    assert served | {*FOR_BROWSERS} == ROWS.keys()


@pytest.mark.parametrize("route", ROWS)
def test_every_route_with_every_scope(house: House, route: str) -> None:
    row = ROWS[route]
    options: dict[str, Any] = {"params": row.query} | ({} if row.body is None else {"json": row.body})
    for (scope, galleries), token in house.tokens.items():
        refused, lacks_scope = None, row.scope not in (None, scope) and scope != "admin"
        if lacks_scope and galleries != OTHER:
            continue  # a key of no use is refused whatever its galleries
        answer = house.ask(token, route, **options)
        if lacks_scope:
            refused = (403, "forbidden")
            assert scope not in answer.json().get("scope", ""), answer.text
        elif row.all_galleries and galleries != "all":
            refused = (403, "forbidden")
        elif row.bound and galleries == OTHER:
            refused = (404, "job_not_found" if "{job}" in route else "gallery_not_found")
        if refused is None:
            assert _was_admitted(answer), (route, scope, galleries, answer.text[:300])
            house.restore(route)
        else:
            assert (answer.status_code, answer.json()["code"]) == refused, (route, scope, galleries, answer.text[:300])
    assert _was_admitted(house.ask(OPERATOR, route, **options)), route
    house.restore(route)
    for what, bad in house.bad.items():
        answer = house.ask(bad, route, **options)
        if row.keyless:
            assert _was_admitted(answer), (route, what)
        else:
            assert answer.status_code == 401, (route, what, answer.text)
            assert "www-authenticate" in answer.headers


def _was_admitted(answer: httpx.Response) -> bool:
    """Return whether the request passed all permissions. It may fail later, such as for an unknown template."""
    if answer.status_code < 400:
        return True
    refusals = ("gallery_not_found", "job_not_found")
    return 404 <= answer.status_code < 500 and answer.json()["code"] not in refusals


# Isolation of galleries between keys


@pytest.fixture
def statements() -> Iterator[list[str]]:
    """SQL statements of requests, without those that check keys after a write."""
    seen = list[str]()

    def note(_connection: Any, _cursor: Any, statement: str, *_others: Any) -> None:
        of_request = threading.current_thread().name.startswith(("blocking", "kith-server", "imports", "exports"))
        if of_request and not re.search("api_key|FROM secrets|BEGIN", statement):
            seen.append(statement)

    sa.event.listen(sa.engine.Engine, "before_cursor_execute", note)
    yield seen
    sa.event.remove(sa.engine.Engine, "before_cursor_execute", note)


def _shown(answer: httpx.Response) -> tuple[int, dict[str, str], str]:
    """Return the response without request-specific values and echoed input."""
    headers = {name: value for name, value in answer.headers.items() if name not in ("date", "x-request-id")}
    text = re.sub(r'"request_id":"[0-9a-f]{32}"', "", answer.text)
    return answer.status_code, headers, re.sub(rf"{OTHER}|{ABSENT}|(?<=')[0-9a-f]{{32}}(?=')", "", text)


@pytest.mark.long
@pytest.mark.parametrize("scope", SCOPES)
def test_a_gallery_outside_the_key_looks_missing(house: House, statements: list[str], scope: Scope) -> None:
    token, compared = house.tokens[scope, OWN], 0
    for route, row in ROWS.items():
        if row.keyless or not (row.bound or row.all_galleries):
            continue
        for body in (row.body, {"wrong": 1}, [1], None):
            told = []
            for name in (OTHER, ABSENT):
                text = json.dumps(body).replace(OWN, name) if body is not None else None
                query = {key: value.replace(OWN, name) for key, value in row.query.items()}
                json_type = {"Content-Type": "application/json"}
                statements.clear()
                answer = house.ask(token, route, name, content=text, params=query, headers=json_type)
                told.append((_shown(answer), list(statements)))
                if row.bound and scope in (row.scope, "admin") and body in (row.body, None):
                    assert answer.status_code in (404, 422), (route, answer.text)
            assert told[0] == told[1], (route, body)
            compared += 1
    assert compared > 100


def test_no_response_to_a_restricted_key_reveals_another_gallery(house: House) -> None:
    for route, row in ROWS.items():
        options: dict[str, Any] = {"params": row.query} | ({} if row.body is None else {"json": row.body})
        answer = house.ask(house.tokens["admin", OWN], route, **options)
        assert OTHER not in answer.text, route
        assert house.jobs[OTHER] not in answer.text, route
        house.restore(route)
    ask = partial(house.ask, house.tokens["read", OWN])
    assert [gallery["name"] for gallery in ask("GET /v1/galleries").json()["data"]] == [OWN]
    assert [gallery["name"] for gallery in ask("GET /v1/galleries", params={"limit": 1}).json()["data"]] == [OWN]
    assert ask("GET /v1/galleries", params={"limit": 1}).json()["next"] is None
    assert {job["gallery"] for job in ask("GET /v1/jobs").json()["data"]} == {OWN}
    everything = partial(house.ask, house.tokens["read", "all"])
    assert {gallery["name"] for gallery in everything("GET /v1/galleries").json()["data"]} == {OWN, OTHER}
    first = everything("GET /v1/jobs", params={"limit": 1}).json()
    rest = everything("GET /v1/jobs", params={"cursor": first["next"]}).json()
    jobs = [job["id"] for job in first["data"] + rest["data"]]
    assert {*house.jobs.values()} <= {*jobs} and len({*jobs}) == len(jobs)


def test_only_an_admin_cancels_a_job_other_than_an_enrollment(house: House) -> None:
    with closing(open_database(house.database)) as database:
        other = JobStore(database).create(Store(database).galleries.get(OWN), "of_another_kind", {})
    wanted: list[tuple[Scope, str, int]] = [("enroll", OTHER, 404), ("enroll", OWN, 403), ("admin", OWN, 200)]
    for scope, gallery, status in wanted:
        answer = house.http.post(f"/v1/jobs/{other.id}/cancel", headers={"X-API-Key": house.tokens[scope, gallery]})
        assert answer.status_code == status, (scope, answer.text)
