"""Master keys: sources, ids, creation, rotation, and rejection of wrong keys."""

from __future__ import annotations

import base64
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kith.wire.status import CheckOut
from service.api.routes.system import to_master_key_out
from service.cli.main import app
from service.cli.tools.doctor import check_master_key
from service.core.errors import MasterKeyError
from service.domain.gallery import GallerySettings
from service.resources import open_own_database
from service.security.api_keys import EVERYTHING
from service.security.master_keys import GivenKeys, KeyFile, LocalKey, MasterKeys, new_key_text
from service.security.sealing import new_key
from service.settings import Settings, load_settings
from service.storage.privacy.backup import back_up
from service.storage.repositories.api_keys import KeyStore
from service.storage.repositories.store import Store

KEY = b"k" * 32
Run = Callable[..., str]


@pytest.fixture(autouse=True)
def _keys_by_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KITH_MASTER_KEY")


def in_folder(folder: Path, **given: object) -> Settings:
    return load_settings(data_dir=folder, **given)


@contextmanager
def closing_store(settings: Settings) -> Iterator[Store]:
    with closing(Store(open_own_database(settings))) as store:
        yield store


def start(settings: Settings) -> None:
    open_own_database(settings).close()


def key_file(path: Path, text: str, mode: int = 0o600) -> KeyFile:
    path.write_text(text)
    path.chmod(mode)
    return KeyFile(path)


# Sources


def test_a_created_file_is_of_its_owner_and_read_again_for_unknown_keys(tmp_path: Path) -> None:
    path = tmp_path / "data" / "master.key"
    file, other = KeyFile(path, may_make=True), KeyFile(path)
    made = file.first()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in path.parent.iterdir()] == ["master.key"]
    wrapped = made.wrap(KEY, "gallery")
    assert other.first().unwrap(wrapped, "gallery") == KEY
    with pytest.raises(MasterKeyError, match="altered"):
        made.unwrap(wrapped, "audit")
    assert file.find(made.id) is not None  # the file is read
    added = other.add()
    assert other.ids() == file.ids() == [added.id, made.id]
    assert file.find(added.id) is not None and file.find("another") is None
    keep_first_key(other)
    assert file.ids() == [added.id]


def keep_first_key(file: KeyFile) -> None:
    """Delete the other keys, as an operator does with an editor."""
    file.path.write_text(file.path.read_text().split()[0])


@pytest.mark.parametrize("text", ["", "short", "00" * 31, "00" * 33, "é" * 32, base64.b64encode(b"k" * 31).decode()])
def test_invalid_keys_are_refused(text: str, tmp_path: Path) -> None:
    key = new_key()
    assert LocalKey.of_text(key.hex()).id == LocalKey.of_text(f" {base64.b64encode(key).decode()}\n").id
    with pytest.raises(MasterKeyError, match="32 bytes"):
        LocalKey.of_text(text)
    for read in (key_file(tmp_path / "f", text).first, lambda: GivenKeys(text, str(tmp_path / "f"))):
        with pytest.raises(MasterKeyError, match=str(tmp_path / "f")):
            read()


def test_older_keys_unwrap_while_they_are_listed(tmp_path: Path) -> None:
    old, new = new_key_text(), new_key_text()
    wrapped, known = LocalKey.of_text(old).wrap(KEY, "gallery"), LocalKey.of_text(old).id
    assert MasterKeys(GivenKeys(f"{new}, {old}", "here")).first().id == LocalKey.of_text(new).id
    for both in (GivenKeys(f"{new}, {old}", "here"), key_file(tmp_path / "f", f"{new}\n{old}\n")):
        assert MasterKeys(both).unwrap(wrapped, "gallery", known) == KEY
    assert MasterKeys(GivenKeys(new, "here"), GivenKeys(old, "there")).unwrap(wrapped, "gallery", known) == KEY
    with pytest.raises(MasterKeyError, match=f"needs master key {known}; available: {LocalKey.of_text(new).id}"):
        MasterKeys(GivenKeys(new, "here")).unwrap(wrapped, "gallery", known)


def test_only_the_owner_and_a_group_may_read_the_file(tmp_path: Path) -> None:
    for mode in (0o400, 0o600, 0o440, 0o640):
        file = key_file(tmp_path / f"{mode:o}", new_key_text(), mode)
        file.first()
        file.add()
        assert stat.S_IMODE(file.path.stat().st_mode) == mode
    for mode in (0o644, 0o604, 0o660, 0o602, 0o666):
        with pytest.raises(MasterKeyError, match=f"mode {mode:o}.*chmod 600"):
            key_file(tmp_path / f"{mode:o}", new_key_text(), mode).first()


# Operating errors


def test_a_lost_or_truncated_key_is_told_and_never_replaced(tmp_path: Path) -> None:
    start(in_folder(tmp_path))
    path = tmp_path / "master.key"
    whole = path.read_bytes()
    for kept in (0, 1, 20, len(whole) - 2):
        path.write_bytes(whole[:kept])
        with pytest.raises(MasterKeyError, match=f"{path}.*(truncated|empty)"):
            start(in_folder(tmp_path))
        assert path.read_bytes() == whole[:kept]
    path.write_bytes(whole)
    with closing_store(in_folder(tmp_path)) as server:
        elsewhere = path.rename(tmp_path / "elsewhere.key")
        server.galleries.create("g", "f" * 32, 8, GallerySettings())  # with the key in memory
        assert not path.exists()
    for _ in range(2):
        with pytest.raises(MasterKeyError, match=rf"needs master key {KeyFile(elsewhere).ids()[0]}; available: none"):
            start(in_folder(tmp_path))
        assert not path.exists()
    start(in_folder(tmp_path, master_key_file=elsewhere))
    start(in_folder(tmp_path, master_key=elsewhere.read_text()))


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("service.core.atomic_files.os.fsync", full)
        with pytest.raises(MasterKeyError, match=r"cannot be written.*No space left"):
            start(in_folder(tmp_path))
    assert [file.name for file in tmp_path.iterdir() if "key" in file.name] == []


def test_keys_added_concurrently_are_all_stored(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "f", may_make=True)
    first = file.first().id
    with ThreadPoolExecutor(8) as threads:
        added = list(threads.map(lambda _: KeyFile(file.path).add().id, range(8)))
    assert sorted(file.ids()) == sorted([first, *added])
    # A process that waits while another one creates the file uses its key.
    folder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(KeyFile(tmp_path / "g", may_make=True).first)
        time.sleep(0.2)
        made = key_file(tmp_path / "g", new_key_text()).first()
        os.close(folder)
        assert waiting.result(60).id == made.id


# Status output


def test_the_doctor_shows_the_source_of_the_key(tmp_path: Path) -> None:
    found = check_master_key(in_folder(tmp_path))
    assert (found.verdict, "created at first start" in found.detail) == ("warning", True)
    assert not (tmp_path / "master.key").exists()
    start(in_folder(tmp_path))
    found = check_master_key(in_folder(tmp_path))
    assert found.verdict == "warning"
    assert f"{KeyFile(tmp_path / 'master.key').ids()[0]} from {tmp_path / 'master.key'}" in found.detail
    elsewhere = key_file(tmp_path.parent / f"{tmp_path.name}.key", new_key_text()).path
    for given, verdict in (
        ({"master_key_file": elsewhere}, "ok"),
        ({"master_key": new_key_text()}, "ok"),
        ({"master_key": "no key"}, "error"),
    ):
        assert check_master_key(in_folder(tmp_path, **given)).verdict == verdict
    elsewhere.chmod(0o644)
    assert check_master_key(in_folder(tmp_path, master_key_file=elsewhere)).verdict == "error"


# Command line


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("KITH_DATA_DIR", str(tmp_path / "data"))

    def call(*arguments: str, fails: bool = False) -> str:
        result = CliRunner().invoke(app, [*arguments])
        if fails:
            assert isinstance(result.exception, Exception)
            return f"{result.exception} {' '.join(result.output.split())}"
        assert result.exit_code == 0, result.output
        return " ".join(result.output.split())

    return call


def test_a_key_is_distributed_rotated_to_and_the_former_removed(run: Run, tmp_path: Path) -> None:
    settings = in_folder(tmp_path / "data")
    file = KeyFile(settings.default_key_path)

    def shown(key: str, galleries: int) -> str:
        return f'"id": "{key}", "place": "{file.path}", "in_use": true, "secrets": 3, "galleries": {galleries}'

    store = Store(open_own_database(settings))
    sealed = store.galleries.create("g", "f" * 32, 8, GallerySettings()).seal.close(b"Ada", "name")
    file.add()
    new, old = file.ids()
    with closing_store(settings) as another:
        another.galleries.create("h", "f" * 32, 8, GallerySettings())
    assert shown(old, 2) in run("master", "show", "--json")  # until the rotation
    assert "now wraps the keys of 2 more galleries" in run("master", "rotate")
    assert shown(new, 2) in run("master", "show", "--json")
    assert "already wraps everything" in run("master", "rotate")
    assert old in run("master", "show")
    store.galleries.create("later", "f" * 32, 8, GallerySettings())  # by a store opened before the rotation
    store.close()
    keep_first_key(file)
    assert file.ids() == [new]
    with closing_store(settings) as again:
        assert again.galleries.get("g").seal.open(sealed, "name") == b"Ada"
        assert again.galleries.get("later").seal.pseudonym("a", "b")
        with again.database.read() as connection:
            query = "SELECT actor, details FROM audit WHERE event = 'master_key_rotated'"
            lines = connection.exec_driver_sql(query).all()
    assert [(actor, old in details, new in details) for actor, details in lines] == [("operator", True, True)]


def test_a_key_that_kith_created_is_reported_until_it_is_backed_up(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = in_folder(tmp_path / "data")
    start(settings)
    file = KeyFile(tmp_path / "data" / "master.key", may_make=True)
    (message,) = [record.getMessage() for record in caplog.records if record.name == "service.security.master_keys"]
    assert message.startswith(f"created the master key {file.path}. Without it all stored data is lost.")
    assert "kith master backup FILE" in message
    assert "never backed up" in check_master_key(settings).detail
    reported = to_master_key_out(MasterKeys(file))
    assert reported is not None
    assert (reported.ok, "kith master backup FILE" in str(reported.remedy)) == (False, True)
    assert "is in the folder of the key" in run("master", "backup", str(file.path.with_name("copy")), fails=True)
    copy = tmp_path / "copy.key"
    assert run("master", "backup", str(copy)) == f"Wrote {copy}: {file.ids()[0]}"
    assert (KeyFile(copy).ids(), stat.S_IMODE(copy.stat().st_mode)) == (file.ids(), 0o600)
    assert "never backed up" not in check_master_key(settings).detail
    assert to_master_key_out(MasterKeys(file)) == CheckOut(name="master_key", ok=True)
    assert "exists" in run("master", "backup", str(copy), fails=True)
    run("master", "rotate", "--new")
    assert "never backed up" in check_master_key(settings).detail
    assert to_master_key_out(MasterKeys(KeyFile(copy))) is None


def test_rotation_uses_the_new_key_although_others_are_listed_first(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = key_file(tmp_path / "f", new_key_text())
    monkeypatch.setenv("KITH_MASTER_KEY", new_key_text())
    monkeypatch.setenv("KITH_MASTER_KEY_FILE", str(file.path))
    start(in_folder(tmp_path / "data"))
    (before,) = file.ids()
    said = run("master", "rotate", "--new")
    made, kept = file.ids()
    assert kept == before and f"Master key {made} now wraps the keys of 0 more galleries" in said
    assert f'"id": "{made}", "place": "{file.path}", "in_use": true, "secrets": 3' in run("master", "show", "--json")


def test_a_backup_needs_its_key_and_does_not_contain_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, file = in_folder(tmp_path / "data"), tmp_path / "backup"
    with closing_store(settings) as store:
        gallery = store.galleries.create("g", "f" * 32, 8, GallerySettings())
        store.subjects.put(gallery, "ada", "Ada", {}, [])
        _, token = KeyStore(store.database).create("of somebody", EVERYTHING)
        manifest = back_up(store.database, file)
    key = settings.default_key_path.read_text().strip()
    assert manifest.master_keys == KeyFile(settings.default_key_path).ids()
    for form in (key.encode(), base64.b64decode(key)):
        assert form not in file.read_bytes()

    monkeypatch.setenv("KITH_DATA_DIR", str(tmp_path / "other"))
    needed = f"needs master key {manifest.master_keys[0]}"
    assert needed in run("restore", str(file), fails=True)
    assert not (tmp_path / "other").exists()
    start(in_folder(tmp_path / "other"))  # has a key of its own
    assert needed in run("restore", str(file), "--replace", fails=True)
    with (tmp_path / "other" / "master.key").open("a") as own:
        own.write(key)
    run("restore", str(file), "--replace")
    with closing_store(in_folder(tmp_path / "other")) as store:
        (gallery,) = store.galleries.list_page(None, 9)
        assert store.subjects.get(gallery, "ada").name == "Ada"
        ring = KeyStore(store.database).ring()
        assert ring.known(token) is not None and ring.known(f"{token[:-1]}x") is None
    said = run("audit", "verify")
    assert ": sound" in said and "were not checked" not in said
