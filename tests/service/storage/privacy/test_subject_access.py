"""Subject access exports contain all data about a subject, and erasure removes all of it. Checked for every table."""

from __future__ import annotations

import base64
import json
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import sqlalchemy as sa
from typer.testing import CliRunner

from kith import Kith
from kith.wire.crops import CropIn
from kith.wire.fields import rfc3339
from service.cli.main import app
from service.core.errors import StorageError, SubjectNotFoundError
from service.domain.gallery import Gallery, NewTemplate
from service.security.sealing import SealBrokenError
from service.storage.audit.log import AuditFilter, listed_lines
from service.storage.db.engine import Database
from service.storage.db.row_sealing import subject_lookup
from service.storage.db.tables import metadata
from service.storage.privacy.subject_access import everything_about, everything_about_stranger
from service.storage.repositories.store import Store
from tests.databases import ON_BOTH, open_database
from tests.postgres import DatabaseUrl
from tests.service.storage.privacy.test_erasure import OF_NOBODY
from tests.service.storage.scene import DIMENSION, filled

SHARED: Final = {"albums", "data_keys", "evidence", "generations", "index_states", "jobs"}
"""Tables with data of galleries, whose rows several people share."""
UNTOLD: Final = {"album_faces.photo", "audit.subject", "changes.sequence", "erasures.key"}
"""Columns that the export leaves out, beside keys of rows, or has once for all lines."""
WORDS: Final = (b"ada Somebody", b"tag ada", b"ada/1.jpg", b"ada.jpg", b"another to ada", b"key of ada", b"of ada")


def test_the_export_contains_all_data_of_one_subject_only(database: Database, rng: np.random.Generator) -> None:
    gallery, ada = filled(database, rng)
    found = concerning(database, gallery, *names_of(database, gallery, ada))
    others = OF_NOBODY.keys() - {"erasures", "audit"} | SHARED
    assert found.keys() == {table.name for table in metadata.sorted_tables} - others
    document = everything_about(database, gallery, "ada")
    text = json.dumps(document)
    for table, rows in found.items():
        for name, value in ((name, value) for row in rows for name, value in row.items()):
            if name.endswith("pk") or f"{table}.{name}" in UNTOLD or isinstance(value, bytes):
                continue
            told = rfc3339(value) if isinstance(value, datetime) else value
            assert f'"{name}": {json.dumps(told)}' in text, f"{table}.{name}"
    assert [word for word in WORDS if word.decode() not in text] == [b"key of ada"]  # kept as a hash
    about = document["subject"]
    assert (about["id"], about["metadata"]) == ("ada", {"born": "ada", "odd": [None, 1.5]})
    assert {t["id"] for t in about["templates"]} == {t.id for t in ada}
    for template in about["templates"]:
        (original,) = [t for t in ada if t.id == template["id"]]
        assert np.allclose(template["vectors"][0]["vector"], original.vector, atol=1e-6)
        assert original.crop is not None
        assert base64.b64decode(template["crops"][0]["image"]) == original.crop.image
    (face,), ((decoy,),) = about["album_faces"], [each["templates"] for each in about["decoys"]]
    assert len(face["vector"]) == DIMENSION and face["crop"]["image"] and face["box"]
    assert decoy["vectors"] == [{"generation": 0}, {"generation": 1}]  # of another person
    assert (face["albums"].keys(), document["job_items"][0]["jobs"].keys(), document["recognizers"][1].keys()) == (
        {"id", "generation", "created_at", "expires_at"},
        {"id", "kind"},
        {"generation", "fingerprint", "model", "dimension"},
    )
    assert "bob" not in text
    exported = [line["event"] for line in everything_about(database, gallery, "ada")["audit"]][-2:]
    assert exported == ["templates_enrolled", "subject_exported"]  # by the export before


def test_a_stranger_is_exported(database: Database, rng: np.random.Generator) -> None:
    gallery, _ = filled(database, rng)
    (one,) = Store(database).strangers.list_page(gallery, None, 9)
    document = json.loads(json.dumps(everything_about_stranger(database, gallery, one.id)))
    about = document["subject"]
    (template,) = about["templates"]
    assert len(template["vectors"][0]["vector"]) == DIMENSION and template["crops"][0]["image"]
    assert (document["id"], about["seen_count"]) == (one.id, 1)
    assert [each["type"] for each in about["events"]] == ["stranger_first_seen"]
    assert [line["event"] for line in document["audit"]] == ["stranger_remembered"]
    assert listed_lines(database, AuditFilter(gallery.pk), None, 1)[0].event == "stranger_exported"


@ON_BOTH
def test_an_export_holds_no_write_lock(database_url: DatabaseUrl, rng: np.random.Generator) -> None:
    """However long it searches the audit, the gallery and others can be written."""
    database, other = (open_database(url := database_url()), open_database(url))
    gallery, _ = filled(database, rng)
    written = list[str]()

    def write(_connection: object, _cursor: object, statement: str, *_others: object) -> None:
        if "FROM audit" in statement and "details" in statement and not written:
            with other.write(StorageError("conflict")) as connection:
                if other.file is None:
                    connection.exec_driver_sql("SET LOCAL lock_timeout = '1s'")
                connection.execute(metadata.tables["galleries"].update().values(version=1))
            written.append(statement)

    sa.event.listen(database.engine, "before_cursor_execute", write)
    everything_about(database, gallery, "ada")
    assert written
    database.close()
    other.close()


@ON_BOTH
def test_nothing_is_left_of_an_erased_subject(database: Database, rng: np.random.Generator) -> None:
    gallery, ada = filled(database, rng)
    store, names = Store(database), names_of(database, gallery, ada)
    bobs = everything_about(database, gallery, "bob")

    receipt = store.subjects.delete(gallery, "ada")
    assert receipt.removed == {"subjects": 1, "templates": 5}
    # Allowed: keyed hashes that record the erasure and make indexes remove the keys.
    assert concerning(database, gallery, *names).keys() == {"audit", "erasures", "changes"}
    everything = every_value(database, gallery)
    for word in (*WORDS, ada[0].vector.tobytes()):
        assert word not in everything
    assert b"bob Somebody" in everything

    left = everything_about(database, gallery, "ada")
    assert (left["subject"], left["job_items"]) == (None, [])
    assert [each["kind"] for each in left["receipts"]] == ["subject", "template"]
    assert "subject_deleted" in [line["event"] for line in left["audit"]]
    after = everything_about(database, gallery, "bob")
    assert {**after, "at": 0, "audit": 0} == {**bobs, "at": 0, "audit": 0}
    with pytest.raises(SubjectNotFoundError):
        everything_about(database, gallery, "nobody")


def names_of(database: Database, gallery: Gallery, own: list[NewTemplate]) -> tuple[dict[str, set[int]], list[str]]:
    """Return keys of ada's rows by the column that has them, and the words that name ada."""
    ada, templates = Store(database).subjects.get(gallery, "ada").pk, metadata.tables["templates"]
    with database.read() as connection:
        query = sa.select(templates.c.pk).where(templates.c.id.in_([t.id for t in own]))
        photos = set(connection.execute(query).scalars())
    words = [subject_lookup(gallery.seal, "ada"), *(t.id for t in own)]
    return {"subject_pk": {ada}, "owner_pk": {ada}, "template_pk": photos}, words


def concerning(
    database: Database, gallery: Gallery, keys: dict[str, set[int]], words: list[str]
) -> dict[str, list[dict[str, Any]]]:
    """Return rows, by table, with one of the keys in a column of this name, or one of the words anywhere."""
    found = dict[str, list[dict[str, Any]]]()
    with database.read() as connection:
        for table in metadata.sorted_tables:
            for row in connection.execute(sa.select(table)):
                values = dict(row._mapping)
                named = any(values.get(column) in known for column, known in keys.items())
                own = table.name == "subjects" and row.pk in keys["subject_pk"]
                if named or own or any(word in repr(values) for word in words):
                    found.setdefault(table.name, []).append(values)
    return found


def every_value(database: Database, gallery: Gallery | None = None) -> bytes:
    """Return all values of the database, decrypted if a gallery is given."""
    values = list[bytes]()
    with database.read() as connection:
        for table in metadata.sorted_tables:
            for value in (value for row in connection.execute(sa.select(table)) for value in row):
                whole = value if isinstance(value, bytes) else repr(value).encode()
                values.append(whole if gallery is None else opened(gallery, whole))
    return b"\n".join(values)


@ON_BOTH
def test_nothing_lies_in_clear(database: Database, rng: np.random.Generator) -> None:
    gallery, ada = filled(database, rng)
    found, stored = every_value(database, gallery), every_value(database)
    assert b"no_face" in stored  # what is searched for would be found
    assert [word for word in WORDS if word not in found] == [b"key of ada"]  # kept as a hash
    (stranger,) = Store(database).strangers.list_page(gallery, None, 9)
    (crop,) = Store(database).crops.read(gallery, [CropIn(stranger=stranger.id)])
    assert crop is not None and crop in found
    faces = [crop, *(form for new in ada if new.crop for form in (new.vector.tobytes(), new.crop.image))]
    assert [word for word in (*WORDS, *faces, b"receiver.example") if word in stored] == []


def opened(gallery: Gallery, sealed: bytes) -> bytes:
    for purpose in ("subject", "crop", "answer", "job item", "job problem", "vector 0", "vector 1", "album face"):
        with suppress(SealBrokenError):  # sealed for another purpose
            return gallery.seal.open(sealed, purpose)
    return sealed


def test_the_command_writes_a_file_for_its_owner(kith: Kith, gallery: str, server: str, tmp_path: Path) -> None:
    axis, file = np.eye(kith.gallery(gallery).dimension)[0], tmp_path / "ada.json"
    kith.enroll(gallery, "ada", embeddings=[axis], allow_duplicate=True)

    def run(*command: str) -> str:
        done = CliRunner().invoke(app, [*command, "-g", gallery, "--url", server], env={"COLUMNS": "60"})
        assert done.exit_code == 0, done.output
        return done.output

    run("subject", "export", "ada", str(file))
    document = json.loads(file.read_text())
    assert np.allclose(document["subject"]["templates"][0]["vectors"][0]["vector"], axis, atol=1e-5)
    assert file.stat().st_mode & 0o077 == 0
