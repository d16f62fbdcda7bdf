"""API keys on real servers and databases: creation, rotation, revocation, rate limits, several processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from itertools import product
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import sqlalchemy as sa
from typer.testing import CliRunner

from kith import Kith, KithClientError
from kith.wire.common import Scope
from service.cli.main import app
from service.core.errors import NotFoundError
from service.resources import has_keys
from service.security.api_keys import Rights
from service.server import embedded
from service.settings import load_settings
from service.storage.db.engine import Database
from service.storage.db.tables import api_keys, audit
from service.storage.privacy.backup import back_up, restore
from service.storage.repositories.api_keys import KeyStore
from tests.databases import ON_BOTH, TEXT, open_database
from tests.postgres import DatabaseUrl
from tests.refusals import raises_code

READ = Rights(frozenset({"read"}), frozenset({"a", "b"}))


@pytest.fixture
def stores(database_url: DatabaseUrl) -> Iterator[tuple[KeyStore, KeyStore, Database]]:
    """Key stores of two processes, on each kind of database."""
    url = database_url()
    with closing(open_database(url)) as one, closing(open_database(url)) as other:
        yield KeyStore(one), KeyStore(other), one


@ON_BOTH
def test_the_next_request_to_another_process_sees_a_change(
    stores: tuple[KeyStore, KeyStore, Database],
) -> None:
    here, there, _ = stores
    assert len(there.ring()) == 0
    key, token = here.create("door", READ)
    seen = there.ring().known(token)
    assert seen == key
    assert (key.rights, key.state(datetime.now(UTC))) == (READ, "active")
    ring = there.ring()
    here.record_usage({key.id: datetime.now(UTC)})  # changes nothing that a request asks for
    assert there.ring() is ring
    here.revoke(key.id)
    revoked = there.ring().known(token)
    assert revoked is not None
    assert revoked.state(datetime.now(UTC)) == "revoked"
    assert len(there.ring()) == 1  # keeps the service closed
    with raises_code("key_not_found"):
        here.revoke("0" * 12)


def test_rotation_overlaps_without_prolonging_a_key(stores: tuple[KeyStore, KeyStore, Database]) -> None:
    here, there, _ = stores
    now = datetime.now(UTC)

    def state(token: str, minutes: float) -> str | None:
        (found, *others) = {ring.known(token) for ring in (here.ring(), there.ring())}
        assert found is not None and not others
        return found.state(now + timedelta(minutes=minutes))

    old, token = here.create("door", READ, now + timedelta(days=10))
    new, new_token = here.rotate(old.id, timedelta(hours=1))
    assert (state(token, 59), state(token, 61)) == ("active", "revoked")
    after = there.ring().known(new_token)
    assert after is not None and after.expires_at is not None
    assert (after.rights, after.name) == (old.rights, old.name)
    assert abs(after.expires_at - (now + timedelta(days=10))) < timedelta(seconds=10)
    here.revoke(new.id)
    with raises_code("key_ended", match="is revoked"):
        here.rotate(new.id, timedelta())
    with raises_code("key_ended", match="was already rotated"):
        here.rotate(old.id, timedelta(hours=1))
    here.revoke(old.id)
    at_once, of_rotated = here.create("k", READ)
    here.rotate(at_once.id, timedelta())
    with raises_code("key_ended"):
        here.rotate(at_once.id, timedelta())
    # A revocation does not depend on clocks, and a slow one sees it during an overlap.
    assert [state(one, -5) for one in (token, new_token, of_rotated)] == ["revoked"] * 3
    latest = datetime(9999, 12, 31, tzinfo=UTC)
    assert here.rotate(here.create("k", READ, latest)[0].id, timedelta())[0].expires_at == latest


@ON_BOTH
def test_a_restored_backup_does_not_reactivate_a_key(
    stores: tuple[KeyStore, KeyStore, Database], tmp_path: Path
) -> None:
    here, _, database = stores
    _, kept_token = here.create("kept", READ)
    stolen, stolen_token = here.create("stolen", READ)
    rotated, rotated_token = here.create("rotated", READ)
    overlapping, overlapping_token = here.create("overlapping", READ)
    here.rotate(overlapping.id, timedelta(hours=1))
    back_up(database, tmp_path / "b")
    for ended in (stolen, overlapping):
        here.revoke(ended.id)
    here.rotate(rotated.id, timedelta())
    later, _ = here.create("later", READ)
    restore(database, tmp_path / "b", replace=True)
    ring, now = here.ring(), datetime.now(UTC) - timedelta(minutes=5)  # by a slow clock
    tokens = (kept_token, stolen_token, rotated_token, overlapping_token)
    states = [key.state(now) for token in tokens if (key := ring.known(token))]
    assert states == ["active", "revoked", "revoked", "revoked"]
    assert here.key(later.id).state(now) == "revoked"


ALTERED: list[dict[str, Any]] = [
    {"scopes": ["admin"]},
    {"galleries": None},
    {"expires_at": None},
    {"revoked_at": None},
    {"revoked": False, "revoked_at": None},
    {"mac": "0" * 64},
    {"mac": "\u00e9"},
    # Invalid rows do not affect other keys.
    {"scopes": sa.JSON.NULL},
    {"scopes": [1, "read"]},
    {"galleries": [["staff"]]},
]


def test_writing_to_the_database_gives_a_key_no_rights(
    database_url: DatabaseUrl, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url, now = database_url(), datetime.now(UTC)
    with closing(open_database(url)) as database:
        store = KeyStore(database)
        keys = [store.create("door", READ, now + timedelta(days=1)) for _ in ALTERED]
        sound, sound_token = store.create("sound", READ)
        for (key, _), altered in zip(keys, ALTERED, strict=True):
            store.revoke(key.id)
            with database.write(NotFoundError("key", "")) as connection:
                connection.execute(api_keys.update().where(api_keys.c.id == key.id).values(**altered))
    with closing(open_database(url)) as database:
        store = KeyStore(database)
        ring = store.ring()
        other = ring.known(sound_token)
        assert other is not None and other.state(now) == "active"
        assert sound.id not in caplog.text
        for (key, token), altered in zip(keys, ALTERED, strict=True):
            found = ring.known(token)
            assert found is not None and found.state(now) == "altered", altered
            assert f"API key {key.id} was altered" in caplog.text
            with raises_code("key_ended", match="is altered"):
                store.rotate(key.id, timedelta())
        back_up(database, tmp_path / "b")
        restore(database, tmp_path / "b", replace=True)  # has no effect
        for key, _ in keys:
            assert store.key(key.id).state(now) == "altered"
            assert store.revoke(key.id).state(now) == "revoked"  # reported once


def test_the_first_key_ends_anonymous_access(tmp_path: Path) -> None:
    settings = load_settings(data_dir=tmp_path, log_level="WARNING")
    assert not has_keys(settings)
    lesser: list[tuple[list[Scope], list[str] | None]] = [
        (["identify"], None),
        (["read", "enroll"], None),
        (["admin"], ["a"]),
    ]
    with embedded(settings) as url, Kith(url) as anonymous:
        assert httpx.get(f"{url}/v1/galleries").status_code == 200
        for scopes, galleries in lesser:
            with pytest.raises(KithClientError, match="with the scope 'admin' for all galleries") as lacking:
                anonymous.create_key("first", scopes, galleries=galleries)
            assert (lacking.value.status, lacking.value.code) == (422, "invalid_request")
        assert list(anonymous.api_keys()) == []
        local = {"KITH_DATA_DIR": str(tmp_path), "KITH_MASTER_KEY": TEXT}
        token = CliRunner().invoke(app, ["keys", "create", "--scope", "admin"], env=local).stdout.strip()
        refused = httpx.get(f"{url}/v1/galleries")
        assert (refused.status_code, refused.headers["www-authenticate"]) == (401, 'Bearer realm="kith"')
        for headers in (
            {"X-API-Key": token},
            {"Authorization": f"Bearer {token}"},
            {"Authorization": f"bearer {token}"},
        ):
            assert httpx.get(f"{url}/v1/galleries", headers=headers).status_code == 200
        assert httpx.get(f"{url}/v1/galleries", headers={"Authorization": f"Basic {token}"}).status_code == 401
        with Kith(url, token) as kith:
            first = next(kith.api_keys())
            others = [kith.create_key(f"k{number}", ["identify"]) for number in range(3)]
            assert others[0].scopes == ["identify"]
            rotated = kith.rotate_key(first.id)
        with Kith(url, rotated.token) as kith:
            kith.create_gallery("mine")
            kith.revoke_key(first.id)
            kith.revoke_key(others[0].id)
            assert [key.id for key in kith.api_keys()] == [others[1].id, others[2].id, rotated.id]
            assert [key.state for key in kith.api_keys(ended=True)].count("revoked") == 2
        with Kith(url, token) as kith, pytest.raises(KithClientError, match=r"is revoked\. Ask .* for a new key"):
            kith.gallery("mine")
        assert httpx.get(f"{url}/v1/galleries").status_code == 401
    assert has_keys(settings)
    with closing(open_database(settings.sql_url)) as database, database.read() as connection:
        lines = connection.execute(
            sa.select(audit).where(audit.c.event.startswith("key_")).order_by(audit.c.number)
        ).all()
        used = KeyStore(database).key(rotated.id).used_at
        assert used is not None and used >= rotated.created_at  # written at shutdown at the latest
    by_first, by_second = f"key:{first.id}", f"key:{rotated.id}"
    assert [(line.event, line.actor) for line in lines] == [
        ("key_created", "operator"),
        *[("key_created", by_first)] * 3,
        ("key_rotated", by_first),
        *[("key_revoked", by_second)] * 2,
    ]
    assert None not in [line.request_id for line in lines]
    assert lines[0].details["key"] == first.id and lines[1].details["galleries"] is None
    assert (lines[4].details["key"], lines[4].details["new"]) == (first.id, rotated.id)
    text = json.dumps([line.details for line in lines])
    found = [text.encode(), *(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())]
    for stored, each in product(found, (token, rotated.token)):
        assert each[-64:].encode() not in stored and bytes.fromhex(each[-64:]) not in stored


def test_keys_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def kith(*arguments: str, status: int = 0) -> str:
        result = CliRunner().invoke(app, ["keys", *arguments])
        assert result.exit_code == status, result.output
        return result.stdout

    monkeypatch.setenv("KITH_API_KEY", "operator" * 8)
    with embedded(load_settings(data_dir=tmp_path, log_level="WARNING")) as url:
        monkeypatch.setenv("KITH_URL", url)
        with Kith(url, "operator" * 8) as operator:
            operator.create_gallery("a")
        key = json.loads(kith("create", "door", "--scope", "identify", "-g", "a", "--days", "2", "--json"))
        assert (key["scopes"], key["galleries"]) == (["identify"], ["a"])
        rotated = kith("rotate", key["id"], "--overlap-hours", "1")
        assert rotated.startswith("kith_")
        assert kith("revoke", key["id"]) == f"Revoked API key {key['id']}\n"
        assert [left["id"] for left in json.loads(kith("list", "--json"))] == [rotated.split("_")[1]]
        assert key["id"] in kith("list", "--ended")
        for wrong in (["create"], ["create", "--scope", "everything"], ["create", "--scope", "read", "--days", "0"]):
            kith(*wrong, status=2)
        for gallery, noted in (("a", False), ("tpyo", True)):
            made = CliRunner().invoke(app, ["keys", "create", "--scope", "read", "-g", gallery])
            assert ("do not exist yet: tpyo" in made.stderr) == noted
            assert made.stdout.startswith("kith_")
        absent = CliRunner().invoke(app, ["keys", "revoke", "0" * 12]).exception
        assert isinstance(absent, KithClientError) and "kith keys list" in absent.problem["remedy"]


# Without keys


def test_web_pages_cannot_use_an_open_server(server: str) -> None:
    port = server.rsplit(":", 1)[1]
    hosts = [f"127.0.0.1.nip.example:{port}", f"localhost:{port}@kith.example", "kith.example", "10.0.0.1", ""]
    hosts += ["[::1]kith.example", "[::1", "::1", "[127.0.0.1]", "localhost:80:80", "localhost/"]
    for headers in (
        *({"Host": host} for host in hosts),
        {"Origin": f"file://localhost:{port}", "Host": f"localhost:{port}"},
        {"Origin": "https://kith.example"},
        {"Origin": "null"},
        {"Origin": f"http://localhost:{int(port) + 1}", "Host": f"localhost:{port}"},
    ):
        refused = httpx.get(f"{server}/v1/galleries", headers=headers)
        assert (refused.status_code, refused.json()["code"]) == (403, "foreign_origin"), headers
    for headers in (
        *({"Host": host} for host in (f"localhost:{port}", f"[::1]:{port}", "127.0.0.1")),
        {"Host": f"LOCALHOST:{port}", "Origin": f"http://localhost:{port}"},
        {"Origin": server},
    ):
        assert httpx.get(f"{server}/v1/galleries", headers=headers).status_code == 200, headers
    # A health check reveals nothing and may use any host name.
    assert httpx.get(f"{server}/healthz", headers={"Host": "kith.example"}).status_code == 200


def test_anonymous_access_beyond_loopback_must_be_allowed_explicitly(tmp_path: Path) -> None:
    exposed = load_settings(data_dir=tmp_path, host="0.0.0.0", log_level="WARNING")  # noqa: S104
    with embedded(exposed) as url:  # the server listens on loopback only
        for path in ("/v1/galleries", "/docs", "/openapi.json", "/metrics", "/nowhere"):
            assert httpx.get(url + path).status_code == 401, path
        with closing(open_database(exposed.sql_url)) as database:
            _, token = KeyStore(database).create("k", READ)
        for path, status in (("/docs", 200), ("/openapi.json", 200), ("/nowhere", 404)):
            assert httpx.get(url + path, headers={"X-API-Key": token}).status_code == status, path
    said = load_settings(data_dir=tmp_path / "said", host="0.0.0.0", allow_anonymous=True, log_level="WARNING")  # noqa: S104
    with embedded(said) as url:
        assert httpx.get(f"{url}/v1/galleries", headers={"Host": "kith.example"}).status_code == 200
        with Kith(url) as kith:
            kith.create_key("k", ["admin"])
        assert httpx.get(f"{url}/v1/galleries").status_code == 401
