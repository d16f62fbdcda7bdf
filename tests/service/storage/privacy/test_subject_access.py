"""Subject access exports contain all data about a subject, and erasure removes all of it. Checked for every table."""

from __future__ import annotations

import base64
import json
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import sqlalchemy as sa
from typer.testing import CliRunner

from kith import Kith
from models.runtime.network import Float
from service.cli.main import app
from service.core.errors import StorageError, SubjectNotFoundError
from service.domain.albums import FaceRecord, NewAlbumFace
from service.domain.events import EventFilter
from service.domain.gallery import Crop, Gallery, IdempotentResponse, NewTemplate
from service.security.sealing import SealBrokenError
from service.storage.db.engine import Database
from service.storage.db.row_sealing import subject_lookup
from service.storage.db.tables import metadata
from service.storage.privacy.retention import Retention
from service.storage.privacy.subject_access import everything_about
from service.storage.repositories.generations import GenerationStore
from service.storage.repositories.jobs import ItemOutcome, JobStore
from service.storage.repositories.store import Store
from service.storage.repositories.webhooks import WebhookStore
from tests.databases import ON_BOTH, claimed, open_database
from tests.postgres import DatabaseUrl
from tests.service.storage.privacy.test_erasure import DIMENSION, LANDMARKS, OF_NOBODY, made, some


def below(place: str, *columns: str, **renamed: str) -> dict[str, str]:
    """Return the path in the export for each column: its own name below a place, unless renamed."""
    return {name: f"{place}.{name}" for name in columns} | {name: f"{place}.{to}" for name, to in renamed.items()}


PLACES: Final[dict[str, dict[str, str]]] = {
    "subjects": {"lookup": "pseudonym"} | below("subject", "created_at", "updated_at", "seen_count", sealed="id"),
    "labels": below("subject.labels", "label"),
    "templates": below("subject.templates", "id", "kind", "quality", "detection_score", "created_at", "moved"),
    "vectors": below("subject.templates.vectors", "generation", "vector"),
    "crops": below("subject.templates.crops", sealed="image"),
    "idempotency": below("subject.idempotency", "lookup", "digest", "created_at", sealed="response"),
    "generations": below("recognizers", "generation", "fingerprint", "model", "dimension"),
    "jobs": below("job_items.jobs", "id", "kind"),
    "events": below("subject.events", "id", "xid", "type", "at", sealed="data"),
    "albums": below("subject.album_faces.albums", "id", "generation", "created_at", "expires_at"),
    "album_faces": below(
        "subject.album_faces", "id", "photo", "vector", "crop", "certainty", "group_number", sealed="box"
    ),
    "job_items": below("job_items", "lookup", "failed", "subject", "at", sealed="item"),
    "erasures": below("receipts", "id", "kind", "gallery", "subject", "template", "removed", "at", "moved_to"),
    "audit": {"subject": "pseudonym"}
    | below("audit", "number", "at", "event", "outcome", "actor", "request_id", "details", "hash"),
}
"""Path in the export for each column with personal data."""
OTHERS: Final[dict[str, set[str]]] = {
    "changes": {"sequence"},
    "generations": {"state", "created_at"},
    "erasures": {"key"},
    "audit": {"gallery"},
    "jobs": {
        "state",
        "parameters",
        "progress",
        "problem",
        "actor",
        "cancel",
        "owner",
        "lease_until",
        "attempts",
        "erased",
        "created_at",
        "updated_at",
    },
    "albums": {"risk", "threshold", "photo_count", "next_group", "grouped_at"},
    "evidence": {"generation", "sequence", "templates", "document", "derived_at"},
    "index_states": {"generation", "engine", "sequence", "scanned", "updated_at"},
    "data_keys": {"wrapped", "master_key", "created_at"},
}
"""Columns without personal data, beside keys of rows: counts, settings, anonymous scores."""


def filled(database: Database, rng: np.random.Generator) -> tuple[Gallery, list[NewTemplate]]:
    """Store data about ada in every place that can hold it; about bob, too."""
    store, jobs, generations = Store(database), JobStore(database), GenerationStore(database)
    gallery = made(database)
    WebhookStore(database).create("https://receiver.example", None, EventFilter())
    generations.start(gallery, "e" * 32, DIMENSION, "other")
    gallery = store.galleries.get("g")
    enrolled = dict[str, list[NewTemplate]]()
    for name in ("ada", "bob"):
        enrolled[name] = some(rng, 3)
        store.templates.enroll(
            gallery, name, enrolled[name], IdempotentResponse(f"key of {name}", name, f"an answer to {name}")
        )
        store.subjects.put(gallery, name, f"{name} Somebody", {"born": name}, [f"tag {name}"])
        store.decoys.add(gallery, name, some(rng)[0])
    job, stored = jobs.claim("here", 60), store.changes.snapshot(gallery)
    assert job is not None
    embedded = dict(zip(stored.template_pks.tolist(), stored.vectors, strict=True))
    generations.add(store.galleries.get("g").at_generation(1), embedded, job, [], 0)
    job = claimed(database, gallery, "enrollment")
    for name in ("ada", "bob"):
        refused = [ItemOutcome(f"{name}/2.jpg", "no_face", {"detail": f"of {name}"}, name)]
        (one,) = some(rng)
        jobs.enroll(job, store.galleries.get("g"), name, [(f"{name}/1.jpg", one)], refused, 1)
        enrolled[name].append(one)
        store.templates.delete(gallery, name, enrolled[name].pop(0).id)
        store.templates.enroll(
            gallery, name, more := some(rng), IdempotentResponse(f"2nd key of {name}", name, f"another to {name}")
        )
        enrolled[name] += more
    enroll_faces(store, jobs, enrolled, rng)
    return store.galleries.get("g"), enrolled["ada"]


def enroll_faces(store: Store, jobs: JobStore, people: dict[str, list[NewTemplate]], rng: np.random.Generator) -> None:
    """Make an album with a group of two faces of each person, and enroll one of them."""
    gallery = store.galleries.get("g")
    album = make_album(store, jobs, gallery, {name: [new.vector for new in some(rng, 2)] for name in people})
    for number, (name, own) in enumerate(people.items(), start=1):
        _, waiting = store.albums.to_enroll(gallery, album, number, 1)
        (one,) = some(rng)
        store.albums.enroll(gallery, album, number, name, None, {next(iter(waiting)): one}, as_read=False)
        own.append(one)


def make_album(store: Store, jobs: JobStore, gallery: Gallery, people: dict[str, list[Float]]) -> str:
    """Make an album with a group of each person's faces; return its id."""
    later = datetime.now(UTC) + timedelta(days=7)
    jobs.create(gallery, "album", {}, beginning=store.albums.beginning(gallery, 0.01, later))
    job = jobs.claim("here", 60, lambda job: job.kind == "album")
    assert job is not None
    album = store.albums.get(gallery, job.id)
    for name, vectors in people.items():
        for face, vector in enumerate(vectors, start=1):
            about = FaceRecord(f"{name}.jpg", name, face, [1, 2, 3, 4], 0.9, {}, [], None)
            store.albums.add(job, album, [], [NewAlbumFace(about, vector, Crop(b"face", LANDMARKS))], 1)
    stored, _ = store.albums.faces_to_group(album, gallery)
    groups = [[(pk, 0.5) for pk, face in stored if face.hash == name] for name in people]
    store.albums.set_groups(job, album, groups, 0.4)
    jobs.finish(job, "succeeded")
    return album.id


def test_every_column_is_exported_or_not_personal() -> None:
    """A new column must be listed here: either the export contains it, or it holds no personal data."""
    for table in metadata.sorted_tables:
        if table.name not in OF_NOBODY or table.name in PLACES:
            columns = {column.name for column in table.columns if not column.name.endswith("pk")}
            exported, others = set(PLACES.get(table.name, {})), OTHERS.get(table.name, set())
            assert columns == exported | others and not exported & others, table.name


def test_the_export_contains_all_data_of_one_subject_only(database: Database, rng: np.random.Generator) -> None:
    gallery, ada = filled(database, rng)
    document = everything_about(database, gallery, "ada")
    for table, places in PLACES.items():
        for column, place in places.items():
            assert told(document, place.split(".")), f"{table}.{column} is not told at {place}"
    about = document["subject"]
    assert (about["id"], about["name"], about["metadata"]) == ("ada", "ada Somebody", {"born": "ada"})
    assert about["tags"] == ["tag ada"]
    assert {t["id"] for t in about["templates"]} == {t.id for t in ada}
    for template in about["templates"]:
        (original,) = [t for t in ada if t.id == template["id"]]
        assert np.allclose(template["vectors"][0]["vector"], original.vector, atol=1e-6)
        assert original.crop is not None
        assert base64.b64decode(template["crops"][0]["image"]) == original.crop.image
    assert {i["item"] for i in document["job_items"]} == {"ada/1.jpg", "ada/2.jpg"}
    assert [a["response"] for a in about["idempotency"]] == ["another to ada"]
    assert "bob" not in json.dumps(document)
    exported = [line["event"] for line in everything_about(database, gallery, "ada")["audit"]][-2:]
    assert exported == ["templates_enrolled", "subject_exported"]  # by the export before


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


def told(document: Any, place: list[str]) -> bool:
    """Return whether the document has a value at a path, in any element of its lists."""
    if isinstance(document, list):
        return any(told(each, place) for each in document)
    if not place:
        return document not in ({}, "")
    return isinstance(document, dict) and place[0] in document and told(document[place[0]], place[1:])


@ON_BOTH
def test_nothing_is_left_of_an_erased_subject(database: Database, rng: np.random.Generator) -> None:
    gallery, ada = filled(database, rng)
    store = Store(database)
    own = {store.subjects.get(gallery, "ada").pk}
    keys = {"subject_pk": own, "owner_pk": own, "template_pk": template_keys(database, ada)}
    words = [subject_lookup(gallery.seal, "ada"), *(t.id for t in ada)]
    not_of_ada = {"jobs", "albums", "generations"}
    assert set(concerning(database, gallery, keys, words)) == {*PLACES, "changes"} - not_of_ada
    bobs = everything_about(database, gallery, "bob")

    receipt = store.subjects.delete(gallery, "ada")
    assert receipt.removed == {"subjects": 1, "templates": 5}
    # Allowed: keyed hashes that record the erasure and make indexes remove the keys.
    assert set(concerning(database, gallery, keys, words)) == {"audit", "erasures", "changes"}
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
    # Retention leaves no receipt, and the audit.
    gallery = store.galleries.update("g", lambda settings: replace(settings, retention_days=1))
    Retention(database).sweep(datetime.now(UTC) + timedelta(days=2))
    expired = everything_about(database, gallery, "bob")
    assert (expired["subject"], [each["kind"] for each in expired["receipts"]]) == (None, ["template"])
    assert "templates_enrolled" in [line["event"] for line in expired["audit"]]


def template_keys(database: Database, of: list[NewTemplate]) -> set[int]:
    templates = metadata.tables["templates"]
    with database.read() as connection:
        query = sa.select(templates.c.pk).where(templates.c.id.in_([t.id for t in of]))
        return set(connection.execute(query).scalars())


def concerning(database: Database, gallery: Gallery, keys: dict[str, set[int]], words: list[str]) -> list[str]:
    """Return tables with a row that has one of the keys in a column of this name, or one of the words anywhere."""
    found = list[str]()
    with database.read() as connection:
        for table in metadata.sorted_tables:
            for row in connection.execute(sa.select(table)):
                values = dict(row._mapping)
                named = any(values.get(column) in known for column, known in keys.items())
                own = table.name == "subjects" and row.pk in keys["subject_pk"]
                if named or own or any(word in repr(values) for word in words):
                    found.append(table.name)
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


WORDS: Final = (b"ada Somebody", b"tag ada", b"ada/1.jpg", b"ada.jpg", b"another to ada", b"key of ada", b"of ada")


@ON_BOTH
def test_nothing_lies_in_clear(database: Database, rng: np.random.Generator) -> None:
    gallery, ada = filled(database, rng)
    found, stored = every_value(database, gallery), every_value(database)
    assert b"no_face" in stored  # what is searched for would be found
    assert [word for word in WORDS if word not in found] == [b"key of ada"]  # kept as a hash
    faces = [form for new in ada if new.crop for form in (new.vector.tobytes(), new.crop.image)]
    assert [word for word in (*WORDS, *faces) if word in stored] == []


def opened(gallery: Gallery, sealed: bytes) -> bytes:
    for purpose in ("subject", "crop", "answer", "job item", "job problem", "vector 0", "vector 1", "album face"):
        with suppress(SealBrokenError):  # sealed for another purpose
            return gallery.seal.open(sealed, purpose)
    return sealed


def test_over_http_and_from_the_terminal(kith: Kith, gallery: str, server: str, tmp_path: Path) -> None:
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
    receipt = json.loads(run("subject", "erase", "ada", "--yes", "--json"))
    assert receipt["removed"] == {"subjects": 1, "templates": 1}
    assert [each.id for each in kith.erasures(gallery, "ada")] == [receipt["id"]]
    assert list(kith.erasures(gallery, "bob")) == []
    assert kith.delete_subject(gallery, "ada").receipt.id == receipt["id"]
    for options in (["--json"], []):
        assert receipt["id"] in run("erasures", "list", *options)
