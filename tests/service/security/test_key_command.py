"""Master key in an external program: a real program, started for each request, with its failures."""

from __future__ import annotations

import logging
import os
import select
import shlex
import sys
import textwrap
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import pytest

from kith import Kith, KithClientError
from service.core.errors import MasterKeyError, MasterKeyUnavailableError, SettingsError
from service.domain.gallery import GallerySettings
from service.resources import master_keys, open_own_database
from service.security import key_command
from service.security.key_command import KeyCommand
from service.security.master_keys import KeyFile
from service.server import embedded
from service.settings import Settings, load_settings
from service.storage.privacy.master_key_rotation import Rewrapped, Use, rewrap, uses
from service.storage.repositories.store import Store
from tests.packs import BUNDLED_DIMENSION

KEY = b"k" * 32
# A minimal KMS that never returns its key. The file ``how`` selects a failure; ``count`` grows with each start.
PROGRAM = textwrap.dedent("""
    import base64, hashlib, hmac, json, os, pathlib, sys, time

    folder = pathlib.Path(sys.argv[1])
    with (folder / "count").open("ab") as count:
        count.write(b".")
    how = (folder / "how").read_text() if (folder / "how").exists() else ""
    if how == "hangs":
        time.sleep(60)
    if how == "fails":
        print("no route to the key service", file=sys.stderr)
        sys.exit(3)
    if how in ("nonsense", "[]", '{"id": ""}', '{"id": "i", "wrapped": "e30=", "key": "e30="}', "{}"):
        print(how)
        sys.exit()

    def keyed(*parts):
        return hmac.digest(b"the service's own", b"|".join(parts), "sha256")

    def xor(a, b):
        return bytes(x ^ y for x, y in zip(a, b))

    asked = json.load(sys.stdin)
    purpose = asked.get("purpose", "").encode()
    if asked["do"] == "id":
        answer = {"id": "hsm-1"}
    elif asked["id"] != "hsm-1":
        answer = {"refused": "no such key"}
    elif asked["do"] == "wrap":
        nonce = os.urandom(16)
        body = nonce + xor(base64.b64decode(asked["key"]), keyed(b"stream", nonce))
        answer = {"wrapped": base64.b64encode(body + keyed(b"tag", body, purpose)).decode()}
    else:
        wrapped = base64.b64decode(asked["wrapped"])
        body, tag = wrapped[:48], wrapped[48:]
        if hmac.compare_digest(tag, keyed(b"tag", body, purpose)):
            answer = {"key": base64.b64encode(xor(body[16:], keyed(b"stream", body[:16]))).decode()}
        else:
            answer = {"refused": "altered"}
    print(json.dumps(answer))
""")
Fails = Callable[[str], None]


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.delenv("KITH_MASTER_KEY")
    (tmp_path / "kms.py").write_text(PROGRAM)
    return [sys.executable, "-I", "-S", str(tmp_path / "kms.py"), str(tmp_path)]


@pytest.fixture
def fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fails:
    monkeypatch.setattr(key_command, "PAUSE_S", 0.0)

    def say(how: str) -> None:
        (tmp_path / "how").write_text(how)

    return say


@pytest.fixture
def of_program(program: list[str], tmp_path: Path) -> Settings:
    return load_settings(data_dir=tmp_path / "data", master_key_command=shlex.join(program))


def test_keys_are_wrapped_for_one_purpose(program: list[str]) -> None:
    key = KeyCommand(program).first()
    assert key.id == "hsm-1"
    wrapped = key.wrap(KEY, "gallery")
    assert KeyCommand(program).find("hsm-1").unwrap(wrapped, "gallery") == KEY
    for altered, purpose in ((wrapped, "audit"), (wrapped[:-1] + bytes([wrapped[-1] ^ 1]), "gallery")):
        with pytest.raises(MasterKeyError, match="refuses: altered") as caught:
            key.unwrap(altered, purpose)
        assert caught.value.code == "master_key"
    with pytest.raises(MasterKeyError, match="refuses: no such key"):
        KeyCommand(program).find("hsm-2").unwrap(wrapped, "gallery")


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("hangs", "did not answer within 0.3 s"),
        ("fails", "exited with status 3"),
        ("nonsense", "invalid JSON"),
        ("[]", "not an object"),
    ],
)
def test_failures_of_the_program_are_reported(
    how: str, why: str, program: list[str], fails: Fails, caplog: pytest.LogCaptureFixture
) -> None:
    wrapped = KeyCommand(program).first().wrap(KEY, "gallery")
    command = KeyCommand(program, 0.3 if how == "hangs" else 60)
    fails(how)
    with caplog.at_level(logging.WARNING), pytest.raises(MasterKeyUnavailableError, match=why) as caught:
        command.find("hsm-1").unwrap(wrapped, "gallery")
    assert caught.value.status == 503
    assert ("no route to the key service" in caplog.text) == (how == "fails")
    fails("")
    assert KeyCommand(program).find("hsm-1").unwrap(wrapped, "gallery") == KEY


def test_child_processes_of_the_program_are_killed(tmp_path: Path) -> None:
    script = tmp_path / "kms.sh"
    script.write_text(f"#!/bin/sh\nsh -c 'echo $$ > {tmp_path}/child; exec sleep 60' | cat\n")
    script.chmod(0o700)
    with pytest.raises(MasterKeyUnavailableError, match="did not answer"):
        KeyCommand([str(script)], 2).first()
    with suppress(ProcessLookupError):  # gone already
        child = os.pidfd_open(int((tmp_path / "child").read_text()))
        ended, _, _ = select.select([child], [], [], 20)
        os.close(child)
        assert ended


def test_invalid_responses_are_refused(program: list[str], fails: Fails) -> None:
    key = KeyCommand(program).first()
    fails('{"id": ""}')
    with pytest.raises(MasterKeyError, match="1 to 64 characters"):
        KeyCommand(program).first()
    fails("{}")
    with pytest.raises(MasterKeyError, match="no base64 value"):
        key.wrap(KEY, "gallery")
    with pytest.raises(MasterKeyError, match="no base64 value"):
        key.unwrap(b"wrapped", "gallery")
    fails('{"id": "i", "wrapped": "e30=", "key": "e30="}')
    with pytest.raises(MasterKeyError, match="key of 2 bytes"):
        key.unwrap(b"wrapped", "gallery")


def test_requests_fail_immediately_after_a_failure(program: list[str], tmp_path: Path) -> None:
    command = KeyCommand(program)
    command.first()
    (tmp_path / "how").write_text("fails")
    for _ in range(20):
        with pytest.raises(MasterKeyUnavailableError, match="status 3"):
            command.first()
    assert (tmp_path / "count").read_bytes() == b".."


def test_the_command_is_run_without_a_shell(program: list[str], tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="KITH_MASTER_KEY_COMMAND"):
        master_keys(load_settings(master_key_command="'"))
    with pytest.raises(SettingsError, match="is empty: give a command"):
        master_keys(load_settings(master_key_command=" "))
    line = f"{shlex.join(program)} ; touch {tmp_path / 'touched'}"
    assert master_keys(load_settings(master_key_command=line)).first().id == "hsm-1"
    assert not (tmp_path / "touched").exists()
    with pytest.raises(MasterKeyUnavailableError, match="cannot be started"):
        master_keys(load_settings(master_key_command=str(tmp_path / "absent"))).first()


def test_keys_move_from_a_file_to_the_program_and_back(of_program: Settings, tmp_path: Path) -> None:
    by_file = load_settings(data_dir=tmp_path / "data")
    with closing(Store(open_own_database(by_file))) as store:
        gallery = store.galleries.create("g", "f" * 32, 8, GallerySettings())
        sealed = gallery.seal.close(b"Ada", "name")
    (old,) = KeyFile(by_file.default_key_path).ids()
    with pytest.raises(MasterKeyError, match="no such key"):
        open_own_database(of_program)
    both = of_program.model_copy(update={"master_key_file": by_file.default_key_path})
    for to, alone in (("hsm-1", of_program), (old, by_file)):
        with closing(open_own_database(both)) as database:
            assert rewrap(database, database.vault.master.of(to)) == Rewrapped(Use(4, 1))
            with database.read() as connection:
                assert uses(connection) == {to: Use(4, 1)}
        with closing(Store(open_own_database(alone))) as store:
            assert store.galleries.get("g").seal.open(sealed, "name") == b"Ada"


def test_changes_and_lists_of_galleries_do_not_wait_for_the_program(of_program: Settings, tmp_path: Path) -> None:
    by_file = load_settings(data_dir=tmp_path / "data")
    open_own_database(by_file).close()
    both = of_program.model_copy(update={"master_key_file": by_file.default_key_path})

    def starts() -> int:
        return (tmp_path / "count").stat().st_size

    with closing(Store(open_own_database(both))) as server:
        gallery = server.galleries.create("g", "f" * 32, 8, GallerySettings())
        with closing(open_own_database(both)) as database:
            assert rewrap(database, database.vault.master.of("hsm-1")) == Rewrapped(Use(4, 1))
        before = starts()
        server.subjects.put(gallery, "ada", "Ada", {}, [])  # its line in the audit is signed
        assert starts() == before
    with closing(open_own_database(of_program)) as database:
        before = starts()
        assert [one.name for one in Store(database).galleries.list_page(None, 9)] == ["g"]
        database.unwrap_secrets()  # cached since the database was opened
        assert starts() == before
        assert Store(database).subjects.get(gallery, "ada").name == "Ada"


def test_rotation_stops_at_a_key_that_cannot_unwrap(of_program: Settings, fails: Fails, tmp_path: Path) -> None:
    with closing(open_own_database(load_settings(data_dir=tmp_path / "data"))) as database:
        before = KeyFile(tmp_path / "data" / "master.key").ids()
        key = master_keys(of_program).first()
        fails('{"id": "i", "wrapped": "e30=", "key": "e30="}')
        with pytest.raises(MasterKeyError, match="key of 2 bytes"):
            rewrap(database, key)
        with database.read() as connection:
            assert list(uses(connection)) == before


def test_searches_continue_while_the_program_fails(of_program: Settings, fails: Fails) -> None:
    with embedded(of_program) as url, Kith(url) as kith:
        for name in ("open", "closed"):
            kith.create_gallery(name)
    with embedded(of_program) as url, Kith(url, attempts=1) as kith:
        probe = [[1.0] + [0.0] * (BUNDLED_DIMENSION - 1)]
        kith.enroll("open", "ada", embeddings=probe)
        fails("fails")
        assert kith.identify("open", embeddings=probe, risk={"threshold": 0.9}).results[0].subject == "ada"
        kith.enroll("open", "grace", embeddings=[[0.0, 1.0] + [0.0] * (BUNDLED_DIMENSION - 2)])
        with pytest.raises(KithClientError, match="master_key_unavailable") as closed:
            kith.gallery("closed")
        with pytest.raises(KithClientError, match="master_key_unavailable") as new:
            kith.create_gallery("new")
        assert (closed.value.status, new.value.status) == (503, 503)
        fails("")
        assert kith.gallery("closed").name == "closed"
        kith.create_gallery("new")
