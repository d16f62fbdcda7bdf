"""API keys on real servers and databases: creation, rotation, revocation, rate limits, several processes."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import sqlalchemy as sa
from pydantic import ValidationError
from typer.testing import CliRunner

from kith import Kith, KithClientError
from kith.wire.common import Scope
from kith.wire.keys import KeyIn, KeysOut
from service.cli.main import app
from service.core.errors import NotFoundError, SettingsError
from service.operations.housekeeping import KeyUses
from service.resources import has_keys
from service.security.api_keys import EVERYTHING, Keyring, Rights
from service.server import embedded
from service.settings import load_settings
from service.storage.db.engine import Database
from service.storage.db.tables import api_keys, audit
from service.storage.privacy.backup import back_up, restore
from service.storage.repositories.api_keys import KeyStore
from tests.databases import TEXT, open_database
from tests.postgres import DatabaseUrl
from tests.refusals import raises_code

READ = Rights(frozenset({"read"}), frozenset({"a", "b"}))


@pytest.fixture
def stores(database_url: DatabaseUrl) -> Iterator[tuple[KeyStore, KeyStore, Database]]:
    """Key stores of two processes, on each kind of database."""
    url = database_url()
    with closing(open_database(url)) as one, closing(open_database(url)) as other:
        yield KeyStore(one), KeyStore(other), one


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
    old, token = here.create("door", READ, now + timedelta(days=10))
    new, new_token = here.rotate(old.id, timedelta(hours=1))
    ring = there.ring()
    before, after = ring.known(token), ring.known(new_token)
    assert before is not None and after is not None
    assert before.state(now + timedelta(minutes=59)) == "active"
    assert before.state(now + timedelta(minutes=61)) == "revoked"
    assert (after.rights, after.name) == (old.rights, old.name)
    assert after.expires_at is not None
    assert abs(after.expires_at - (now + timedelta(days=10))) < timedelta(seconds=10)
    here.revoke(new.id)
    with raises_code("key_ended", match="is revoked"):
        here.rotate(new.id, timedelta())
    with raises_code("key_ended", match="was already rotated"):
        here.rotate(old.id, timedelta(hours=1))
    assert here.revoke(old.id).state(datetime.now(UTC)) == "revoked"  # earlier than planned
    at_once, _ = here.create("k", READ)
    here.rotate(at_once.id, timedelta())
    with raises_code("key_ended"):
        here.rotate(at_once.id, timedelta())


def test_a_key_revoked_during_its_overlap_is_rejected_by_every_process(
    stores: tuple[KeyStore, KeyStore, Database],
) -> None:
    here, there, _ = stores
    stolen, token = here.create("stolen", READ)
    other, _ = here.create("other", READ)
    here.rotate(stolen.id, timedelta(hours=1))
    here.rotate(other.id, timedelta(hours=2))  # the latest possible expiry
    before = there.ring().known(token)
    assert before is not None and before.state(datetime.now(UTC)) == "active"
    here.revoke(stolen.id)
    for store in (here, there):
        after = store.ring().known(token)
        assert after is not None and after.state(datetime.now(UTC)) == "revoked"


def test_a_revocation_does_not_depend_on_clocks(stores: tuple[KeyStore, KeyStore, Database]) -> None:
    here, there, _ = stores
    slow = datetime.now(UTC) - timedelta(minutes=5)
    revoked, token = here.create("k", READ)
    here.revoke(revoked.id)
    at_once, other_token = here.create("k", READ)
    here.rotate(at_once.id, timedelta())
    for one in (token, other_token):
        key = there.ring().known(one)
        assert key is not None and key.state(slow) == "revoked"


def test_a_key_with_the_latest_expiry_is_rotated(stores: tuple[KeyStore, KeyStore, Database]) -> None:
    here, _, _ = stores
    old, _ = here.create("k", READ, datetime(9999, 12, 31, tzinfo=UTC))
    assert here.rotate(old.id, timedelta())[0].expires_at == datetime(9999, 12, 31, tzinfo=UTC)


def test_a_restored_backup_does_not_reactivate_a_key(
    stores: tuple[KeyStore, KeyStore, Database], tmp_path: Path
) -> None:
    here, _, database = stores
    kept, kept_token = here.create("kept", READ)
    stolen, stolen_token = here.create("stolen", READ)
    rotated, rotated_token = here.create("rotated", READ)
    back_up(database, tmp_path / "b")
    here.revoke(stolen.id)
    here.rotate(rotated.id, timedelta())
    later, _ = here.create("later", READ)
    restore(database, tmp_path / "b", replace=True)
    ring, now = here.ring(), datetime.now(UTC)
    states = {
        key.id: key.state(now) for token in (kept_token, stolen_token, rotated_token) if (key := ring.known(token))
    }
    assert states == {kept.id: "active", stolen.id: "revoked", rotated.id: "revoked"}
    assert here.key(later.id).state(now) == "revoked"


def test_a_restored_backup_does_not_prolong_a_rotated_key(
    stores: tuple[KeyStore, KeyStore, Database], tmp_path: Path
) -> None:
    here, there, database = stores
    rotated, token = here.create("rotated", READ)
    here.rotate(rotated.id, timedelta(hours=1))
    back_up(database, tmp_path / "b")
    here.revoke(rotated.id)
    restore(database, tmp_path / "b", replace=True)
    for store in (here, there):
        key = store.ring().known(token)
        assert key is not None and key.state(datetime.now(UTC)) == "revoked"


@pytest.mark.parametrize(
    "altered",
    [
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
    ],
)
def test_writing_to_the_database_gives_a_key_no_rights(
    database_url: DatabaseUrl, altered: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url, now = database_url(), datetime.now(UTC)
    with closing(open_database(url)) as database:
        store = KeyStore(database)
        key, token = store.create("door", READ, now + timedelta(days=1))
        sound, sound_token = store.create("sound", READ)
        store.revoke(key.id)
        with database.write(NotFoundError("key", "")) as connection:
            connection.execute(api_keys.update().where(api_keys.c.id == key.id).values(**altered))
    with closing(open_database(url)) as database:
        store = KeyStore(database)
        ring = store.ring()
        found, other = ring.known(token), ring.known(sound_token)
        assert found is not None and found.state(now) == "altered"
        assert other is not None and other.state(now) == "active"
        assert f"API key {key.id} was altered" in caplog.text
        assert sound.id not in caplog.text
        with raises_code("key_ended", match="is altered"):
            store.rotate(key.id, timedelta())
        back_up(database, tmp_path / "b")
        restore(database, tmp_path / "b", replace=True)  # has no effect
        assert store.key(key.id).state(now) == "altered"
        assert store.revoke(key.id).state(now) == "revoked"  # reported once


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "a\0"},
        {"name": "\x1b[2J"},
        {"expires_at": "9999-12-31T23:59:59-14:00"},
    ],
)
def test_invalid_keys_are_rejected(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        KeyIn.model_validate({"name": "k", "scopes": ["read"], **wrong})


def test_changes_of_keys_are_audited_without_their_secrets(
    stores: tuple[KeyStore, KeyStore, Database],
) -> None:
    here, _, database = stores
    key, token = here.create("whose it is", READ)
    new, new_token = here.rotate(key.id, timedelta(hours=1))
    here.revoke(new.id)
    here.revoke(new.id)
    with database.read() as connection:
        lines = connection.execute(sa.select(audit).order_by(audit.c.number)).all()
    assert [line.event for line in lines] == ["key_created", "key_rotated", "key_revoked"]
    assert lines[0].details["key"] == key.id
    assert (lines[1].details["key"], lines[1].details["new"]) == (key.id, new.id)
    assert lines[0].details["galleries"] == ["a", "b"]
    text = json.dumps([line.details for line in lines])
    secrets = (token, token[-64:], new_token[-64:], key.digest, "whose it is")
    assert not any(secret in text for secret in secrets)


def test_unchanged_keys_are_not_read_again(tmp_path: Path) -> None:
    with closing(open_database(f"sqlite:///{tmp_path / 'k.db'}")) as database:
        store = KeyStore(database)
        key, token = store.create("k", EVERYTHING)
        ring = store.ring()
        statements = list[str]()
        sa.event.listen(database.engine, "before_cursor_execute", lambda *given: statements.append(given[2]))
        assert store.cached_ring() is ring
        assert ring.known(token) is not None
        assert statements == []
        with closing(open_database(f"sqlite:///{tmp_path / 'k.db'}")) as other:
            KeyStore(other).record_usage({key.id: datetime.now(UTC)})
        assert store.cached_ring() is None
        assert store.ring() is ring
        assert sum("SELECT" in statement for statement in statements) == 1


def test_keys_are_listed_in_pages(tmp_path: Path) -> None:
    settings = load_settings(data_dir=tmp_path, log_level="WARNING")
    with closing(open_database(settings.sql_url)) as database:
        store = KeyStore(database)
        made = [store.create(f"k{i}", EVERYTHING)[0].id for i in range(5)]
        token = store.create("last", EVERYTHING)[1]
        store.revoke(made[1])
        store.rotate(made[3], timedelta())
    with embedded(settings) as url, httpx.Client(base_url=url, headers={"X-API-Key": token}) as http:
        listed, pages, cursor = list[str](), 0, None
        while pages == 0 or cursor is not None:
            query = {"limit": 2, **({} if cursor is None else {"cursor": cursor})}
            page = http.get("/v1/keys", params=query).json()
            listed += [key["id"] for key in page["data"]]
            pages, cursor = pages + 1, page["next"]
        assert (listed[:3], len(listed), pages) == ([made[0], made[2], made[4]], 5, 3)
        assert http.get("/v1/keys", params={"cursor": "0" * 58}).json()["code"] == "invalid_request"
        with Kith(url, token) as kith:
            assert [key.id for key in kith.api_keys()] == listed
            assert len(list(kith.api_keys(ended=True))) == 7
    answered_before = '{"data": []}'
    assert KeysOut.model_validate_json(answered_before).next is None


def test_no_token_is_stored_on_disk(tmp_path: Path) -> None:
    settings = load_settings(data_dir=tmp_path, log_level="WARNING")
    with embedded(settings) as url:
        with Kith(url) as kith:
            made = kith.create_key("first", ["admin"])
        with Kith(url, made.token) as kith:
            rotated = kith.rotate_key(made.id)
            assert [key.id for key in kith.api_keys()] == [made.id, rotated.id]
        with Kith(url, rotated.token) as kith:
            kith.revoke_key(made.id)
            assert [key.id for key in kith.api_keys()] == [rotated.id]
            assert {key.state for key in kith.api_keys(ended=True)} == {"active", "revoked"}
    found = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert found
    for path in found:
        content = path.read_bytes()
        for token in (made.token, rotated.token):
            assert token[-64:].encode() not in content
            assert bytes.fromhex(token[-64:]) not in content


def test_key_usage_is_recorded_after_the_response(tmp_path: Path) -> None:
    settings = load_settings(data_dir=tmp_path, log_level="WARNING")
    with embedded(settings) as url:
        with Kith(url) as kith:
            made = kith.create_key("first", ["admin"])
        with Kith(url, made.token) as kith:
            assert next(kith.api_keys()).used_at is None  # recorded, and written at shutdown at the latest
    with closing(open_database(settings.sql_url)) as database:
        used = KeyStore(database).key(made.id).used_at
        assert used is not None
        assert used >= made.created_at


def test_a_failing_write_of_key_usage_affects_no_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    database = open_database(f"sqlite:///{tmp_path / 'k.db'}")
    uses = KeyUses(KeyStore(database))
    uses.note("0" * 12, datetime.now(UTC))
    database.close()
    with sa.create_engine(f"sqlite:///{tmp_path / 'k.db'}").begin() as connection:
        connection.execute(sa.text("DROP TABLE api_keys"))

    async def write() -> None:
        async with uses:
            pass

    asyncio.run(write())
    assert "writing the last use of keys failed" in caplog.text


def test_the_first_key_ends_anonymous_access(tmp_path: Path) -> None:
    settings = load_settings(data_dir=tmp_path, log_level="WARNING")
    assert not has_keys(settings)
    with embedded(settings) as url:
        assert httpx.get(f"{url}/v1/galleries").status_code == 200
        token = kith_command("keys", "create", "--scope", "admin", cwd=tmp_path).stdout.strip()
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
            key = next(kith.api_keys())
            kith.create_gallery("mine")
            kith.revoke_key(key.id)
            with pytest.raises(KithClientError, match=r"was revoked\. Ask .* for a new key"):
                kith.gallery("mine")
        assert httpx.get(f"{url}/v1/galleries").status_code == 401
    assert has_keys(settings)
    with closing(open_database(settings.sql_url)) as database, database.read() as connection:
        lines = connection.execute(
            sa.select(audit.c.event, audit.c.actor, audit.c.request_id)
            .where(audit.c.event.startswith("key_"))
            .order_by(audit.c.number)
        ).all()
    assert [(line.event, line.actor) for line in lines] == [
        ("key_created", "operator"),
        ("key_revoked", f"key:{key.id}"),
    ]
    assert None not in [line.request_id for line in lines]


def test_the_first_key_can_create_other_keys(tmp_path: Path) -> None:
    settings = load_settings(data_dir=tmp_path, log_level="WARNING")
    with embedded(settings) as url, Kith(url) as kith:
        lesser: list[tuple[list[Scope], list[str] | None]] = [
            (["identify"], None),
            (["read", "enroll"], None),
            (["admin"], ["a"]),
        ]
        for scopes, galleries in lesser:
            with pytest.raises(KithClientError, match="with the scope 'admin' for all galleries") as refused:
                kith.create_key("first", scopes, galleries=galleries)
            assert (refused.value.status, refused.value.code) == (422, "invalid_request")
        assert list(kith.api_keys()) == []
        token = kith.create_key("first", ["admin"]).token
        with Kith(url, token) as admin:
            assert admin.create_key("second", ["identify"]).scopes == ["identify"]
    operated = load_settings(data_dir=tmp_path / "o", api_key="operator" * 4, log_level="WARNING")
    with embedded(operated) as url, Kith(url, "operator" * 4) as kith:
        assert kith.create_key("first", ["identify"]).scopes == ["identify"]


def test_a_short_operator_key_is_rejected(tmp_path: Path) -> None:
    assert load_settings(api_key="f" * 32).api_key is not None
    short = "guessable"
    for key in (short, "f" * 31):
        with pytest.raises(SettingsError, match=r"KITH_API_KEY: .*fewer than 32 characters.*openssl rand -hex 32"):
            load_settings(api_key=key)
    started = subprocess.run(
        [sys.executable, "-m", "service.cli.main", "serve", "--port", "0"],
        cwd=tmp_path,
        env=os.environ | {"KITH_DATA_DIR": str(tmp_path), "KITH_API_KEY": short},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert started.returncode != 0
    assert "fewer than 32 characters" in started.stderr
    assert short not in started.stderr
    assert not list(tmp_path.iterdir())


@pytest.fixture
def operated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Commands use a server, with its operator's key."""
    monkeypatch.setenv("KITH_API_KEY", "operator" * 8)
    with embedded(load_settings(data_dir=tmp_path, log_level="WARNING")) as url:
        monkeypatch.setenv("KITH_URL", url)
        yield


@pytest.mark.usefixtures("operated")
def test_keys_on_the_command_line() -> None:
    def kith(*arguments: str, status: int = 0) -> str:
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == status, result.output
        return result.stdout

    created = ("keys", "create", "door", "--scope", "identify", "-g", "a", "--days", "2", "--json")
    key = json.loads(kith(*created))
    assert (key["scopes"], key["galleries"]) == (["identify"], ["a"])
    kith("gallery", "create", "a")
    rotated = kith("keys", "rotate", key["id"], "--overlap-hours", "1")
    assert rotated.startswith("kith_")
    assert kith("keys", "revoke", key["id"]) == f"Revoked API key {key['id']}\n"
    assert [left["id"] for left in json.loads(kith("keys", "list", "--json"))] == [rotated.split("_")[1]]
    assert key["id"] in kith("keys", "list", "--ended")
    for wrong in (["create"], ["create", "--scope", "everything"]):
        kith("keys", *wrong, status=2)
    refused_for = CliRunner().invoke(app, ["keys", "create", "--scope", "read", "--days", "0"])
    assert (refused_for.exit_code, "--days" in refused_for.stderr) == (2, True), refused_for.output
    for gallery, noted in (("a", False), ("tpyo", True)):
        made = CliRunner().invoke(app, ["keys", "create", "--scope", "read", "-g", gallery])
        assert ("do not exist yet: tpyo" in made.stderr) == noted
        assert made.stdout.startswith("kith_")
    absent = CliRunner().invoke(app, ["keys", "revoke", "0" * 12]).exception
    assert isinstance(absent, KithClientError) and "kith keys list" in absent.problem["remedy"]
    for refused in (["create", "--scope", "read", "-g", "../a"], ["revoke", "nokey"]):
        assert isinstance(CliRunner().invoke(app, ["keys", *refused]).exception, KithClientError)


def kith_command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "KITH_DATA_DIR": str(cwd), "KITH_MASTER_KEY": TEXT, "COLUMNS": "150"}
    command = [sys.executable, "-m", "service.cli.main", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)


# Without keys, and too many requests


def test_web_pages_cannot_use_an_open_server(server: str) -> None:
    port = server.rsplit(":", 1)[1]
    for headers in (
        {"Host": "kith.example"},
        {"Host": f"127.0.0.1.nip.example:{port}"},
        {"Host": "10.0.0.1"},
        {"Host": ""},
        {"Host": f"localhost:{port}@kith.example"},
        {"Host": "localhost:1@kith.example"},
        {"Host": "[::1]kith.example"},
        {"Host": "[::1"},
        {"Host": "::1"},
        {"Host": "[127.0.0.1]"},
        {"Host": "localhost:80:80"},
        {"Host": "localhost/"},
        {"Origin": f"file://localhost:{port}", "Host": f"localhost:{port}"},
        {"Origin": "https://kith.example"},
        {"Origin": "null"},
        {"Origin": f"http://localhost:{int(port) + 1}", "Host": f"localhost:{port}"},
    ):
        refused = httpx.get(f"{server}/v1/galleries", headers=headers)
        assert (refused.status_code, refused.json()["code"]) == (403, "foreign_origin"), headers
    for headers in (
        {"Host": f"localhost:{port}"},
        {"Host": f"[::1]:{port}"},
        {"Host": "127.0.0.1"},
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


def test_the_text_of_a_key_ring_reveals_no_key() -> None:
    assert "secret" not in repr(Keyring(b"secret" * 6, []))
