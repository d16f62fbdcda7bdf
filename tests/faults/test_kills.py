"""Kills at any instant: acknowledged writes persist, other writes are absent or complete, and the index agrees with
SQL.
"""

from __future__ import annotations

import itertools
import json
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import sqlalchemy as sa
from numpy.typing import NDArray

from kith import FileStream, Kith, KithClientError
from kith.wire.jobs import JobOut
from kith.wire.transfer import GalleryFileHeader, GalleryFileItem
from models.runtime.network import Float
from models.vision.recognition import l2_normalize
from service.core.atomic_files import atomic_write
from service.core.errors import GalleryExistsError
from service.domain.gallery import Crop, Gallery, GallerySettings, IdempotentResponse, NewTemplate, SubjectFilter
from service.domain.gallery_items import FileRow, vector_bytes
from service.security.master_keys import KeyFile, MasterKeys
from service.storage.damage import damage
from service.storage.db import engine
from service.storage.db.row_sealing import subject_lookup
from service.storage.db.tables import crops, erasures, idempotency, labels, leases, subjects, templates, vectors
from service.storage.privacy.backup import back_up, read_manifest, restore
from service.storage.privacy.master_key_rotation import rewrap, uses
from service.storage.repositories.bulk_templates import BulkStore
from service.storage.repositories.erasures import ErasureStore
from service.storage.repositories.generations import FILL, GenerationStore, SealedCrops
from service.storage.repositories.jobs import ItemOutcome, JobStore
from service.storage.repositories.store import Store
from service.storage.transfer.importing import Import
from tests.conftest import jpeg
from tests.databases import open_database
from tests.faults.history import contradictions
from tests.faults.killing import Case, Process, Scene, pause
from tests.faults.servers import Server, serving
from tests.faults.test_model import after_all, fresh
from tests.faults.workers import Node, Task, template_id, vector_of, write
from tests.forks import CONTEXT
from tests.postgres import DatabaseUrl
from tests.receivers import Message, Receiver, receiving
from tests.service.usecases.test_bulk_enrollment import as_tar, has_done
from tests.soundness import problems

DIMENSION: Final = 32
TEMPLATES: Final = [template_id(3, number) for number in range(500)]
FACE: Final = Crop(b"a face" * 100, ((1.0, 1.0), (3.0, 1.0), (2.0, 2.0), (1.0, 3.0), (3.0, 3.0)))
MAX_DELAY_S: Final = 0.25
"""Maximum delay between a message of a writer or a server's client, and the kill."""
ON_EACH = pytest.mark.parametrize(
    "database_url", ["sqlite", pytest.param("postgresql", marks=pytest.mark.long)], indirect=True
)


def create(node: Node, enrolled: list[str], name: str = "g", **settings: Any) -> Gallery:
    gallery = node.store.galleries.create(name, "f" * 32, DIMENSION, GallerySettings(**settings))
    if enrolled:
        node.enroll(name, "a", [new_template(template) for template in enrolled])
    return gallery


def new_template(template: str, crop: Crop | None = None) -> NewTemplate:
    return NewTemplate(template, vector_of(template, DIMENSION), "photo", crop=crop)


# Restore and backup: the database is unchanged, or restored; the file is the one before, or complete

OF_BEFORE: Final = template_id(4, 0)


def a_backup_of_another(scene: Scene) -> None:
    with Node(scene.another_url()) as source, Node(scene.url) as node:
        create(source, TEMPLATES)
        rows = back_up(source.database, scene.path).rows
        create(node, [OF_BEFORE], "before")
    scene.known = "before", rows


def restore_and_back_up(url: str, path: Path, pipe: Pipe) -> None:
    database = open_database(url)
    pipe.send("begun")
    restore(database, path, replace=True)
    pipe.send("done")
    back_up(database, path)


def is_unchanged_or_restored(scene: Scene, said: list[Any], _ended: bool) -> None:
    before, rows = scene.known
    kept = read_manifest(scene.path).rows
    assert {**kept, "audit": 0} == {**rows, "audit": 0}
    with Node(scene.url) as node:
        (gallery,) = node.store.galleries.list_page(None, 5)
        assert gallery.name == "g" or (before == "before" and "done" not in said)
        scene.known = gallery.name, rows
        assert set(node.templates(gallery.name)) == (set(TEMPLATES) if gallery.name == "g" else {OF_BEFORE})


# Erasure: a person, or the gallery, is stored completely or not at all, and is gone once acknowledged

PEOPLE: Final = [f"s{person}" for person in range(24)]
EACH: Final = 3


def people_of_every_table(scene: Scene) -> None:
    scene.known = {}  # receipts by person
    with Node(scene.url) as node:
        gallery = create(node, [], keep_crops=True)
        for person, name in enumerate(PEOPLE):
            new = [new_template(template_id(person, number), FACE) for number in range(EACH)]
            node.store.templates.enroll(gallery, name, new, IdempotentResponse(f"key {name}", "d", "an answer"))
            node.store.subjects.put(gallery, name, "Name", {}, ["tag"])


def erase_left(url: str, _path: Path, pipe: Pipe) -> None:
    with Node(url) as node:
        for gallery in node.store.galleries.list_page(None, 1):
            people = node.store.subjects.list_page(gallery, None, 1000, SubjectFilter())
            for subject in people[: len(people) // 2]:
                pipe.send((subject.id, node.delete_subject("g", subject.id)))
            node.store.galleries.delete("g")


def people_are_whole_or_erased(scene: Scene, said: list[Any], ended: bool) -> None:
    scene.known |= dict(said)
    with Node(scene.url) as node:
        with node.database.read() as connection:
            tables = (templates, vectors, crops, subjects, labels, idempotency)
            counts = [connection.execute(sa.select(sa.func.count()).select_from(t)).scalar_one() for t in tables]
        if not (found := node.store.galleries.list_page(None, 1)):
            assert not any(counts)
            return
        (gallery,), left = found, set(node.templates("g").values())
        assert not left & scene.known.keys() and not ended
        with node.database.read() as connection:
            erased = set(connection.execute(sa.select(erasures.c.subject)).scalars())
        assert counts == [len(left) * EACH] * 3 + [len(left)] * 3
        assert erased == {subject_lookup(gallery.seal, gone) for gone in {*PEOPLE} - left}
        receipts = ErasureStore(node.database).list_page(gallery, limit=1000)
        assert {receipt.id for _, receipt in receipts} >= set(scene.known.values())


# Import: complete blocks are stored, and importing the same file again adds the rest

IN_BLOCK: Final = 100
BLOCKS: Final = 12


def an_empty_gallery(scene: Scene) -> None:
    with Node(scene.url) as node:
        create(node, [])


def _block(number: int) -> list[str]:
    return [template_id(7, number * IN_BLOCK + i) for i in range(IN_BLOCK)]


def import_blocks(url: str, _path: Path, pipe: Pipe) -> None:
    database = open_database(url)
    taking = Import(BulkStore(database), Store(database).galleries.get("g"), GalleryFileHeader("f" * 32, DIMENSION))
    for number in range(BLOCKS):
        rows = []
        for place, template in enumerate(_block(number), start=1):
            about = GalleryFileItem(subject=f"s{int(template, 16) % 500}", template=template)
            vector = vector_bytes(vector_of(template, DIMENSION))
            rows.append(FileRow(number * IN_BLOCK + place, about, about.subject, vector))
        taking.take(rows)
        pipe.send(number)


def blocks_are_whole(scene: Scene, said: list[Any], ended: bool) -> None:
    with Node(scene.url) as node:
        stored = node.templates("g")
    whole = len(stored) // IN_BLOCK
    assert set(stored) == {template for number in range(whole) for template in _block(number)}
    assert whole >= len(said) and (whole == BLOCKS or not ended)


# Rotation: one master key wraps all keys, and opens them


def keys_in_a_file(scene: Scene) -> None:
    master = MasterKeys(KeyFile(scene.path, may_make=True))
    with closing(Store(engine.open_database(scene.url, master))) as store:
        for number in range(20):
            store.galleries.create(f"g{number}", "f" * 32, 8, GallerySettings())
    scene.known = master.first().id


def rotate(url: str, path: Path, pipe: Pipe) -> None:
    """The two previous keys stay: a killed rotation may have left one of them in use."""
    file = KeyFile(path)
    with closing(engine.open_database(url, MasterKeys(file))) as database:
        pipe.send("begun")
        while True:
            rewrap(database, file.add())
            with atomic_write(path) as kept:
                kept.write("\n".join(path.read_text().split()[:3]).encode())
            pipe.send("rotated")


def one_key_wraps_all(scene: Scene, said: list[Any], _ended: bool) -> None:
    assert "rotated" in said
    with closing(engine.open_database(scene.url, MasterKeys(KeyFile(scene.path)))) as database:
        before = scene.known
        with database.read() as connection:
            (scene.known,) = uses(connection)  # a killed rotation was complete or had no effect
        assert scene.known != before
        assert [*damage(database)] == []


# Migration: before or after each step, and the next process continues

RECOGNIZERS: Final = {"f" * 32: "e" * 32, "e" * 32: "f" * 32}
FOLLOWED_BY: Final = {"none": {"next", "previous"}, "next": {"previous"}, "previous": {"next", "none"}}
"""States of the other generation."""


def a_gallery_with_crops(scene: Scene) -> None:
    with Node(scene.url) as node:
        create(node, [], keep_crops=True)
        node.enroll("g", "a", [new_template(template, FACE) for template in TEMPLATES[:60]])
    scene.known = set(TEMPLATES[:60]), "none"  # acknowledged templates, and the state


def _vector(template: str, generation: int) -> Float:
    return np.roll(vector_of(template, DIMENSION), generation)


def _state(gallery: Gallery) -> str:
    return "none" if gallery.other is None else gallery.other.state


def migrate(url: str, _path: Path, pipe: Pipe) -> None:
    """Enroll, and fill and switch, roll back or finish, again and again."""
    rng = np.random.default_rng()
    with Node(url) as node:
        generations, jobs, store = GenerationStore(node.database), JobStore(node.database), node.store
        while True:
            now = store.galleries.get("g")
            template = template_id(5, now.templates)
            own = NewTemplate(template, _vector(template, now.generation), "photo", crop=FACE)
            node.enroll("g", f"s{now.templates % 20}", [own])
            pipe.send(("enrolled", template))
            state = _state(now)
            if state != "previous":
                generations.start(now, RECOGNIZERS[now.fingerprint], DIMENSION, "another")
            while job := jobs.claim("here", -1, lambda job: job.kind == FILL and not job.cancel):
                view = store.galleries.get("g").at_generation(job.parameters["generation"])

                def embed(waiting: SealedCrops, number: int = view.generation) -> tuple[dict[int, Float], list[Any]]:
                    return {one.pk: _vector(one.id, number) for one in waiting}, []

                missing = generations.missing_keys(view)
                for first in range(0, len(missing), 16):
                    waiting = generations.crops(view, missing[first : first + 16])
                    done = [ItemOutcome(one.id, "embedded") for one in waiting]
                    generations.add(view, embed(waiting)[0], job, done, 0)
                assert generations.switch(view, job, embed, (), 0)
                jobs.finish(job, "succeeded")
            now = store.galleries.get("g")
            if state == "previous" and rng.random() < 0.5:
                generations.roll_back(now)
            elif state == "previous":
                generations.finish(now, force=False)
            pipe.send(("state", _state(store.galleries.get("g"))))


def is_before_or_after_a_step(scene: Scene, said: list[Any], _ended: bool) -> None:
    enrolled, state = scene.known
    enrolled |= {what for kind, what in said if kind == "enrolled"}
    state = next((what for kind, what in reversed(said) if kind == "state"), state)
    with Node(scene.url) as node:
        gallery = node.store.galleries.get("g")
        found = _state(gallery)
        assert found == state or found in FOLLOWED_BY[state]
        scene.known = enrolled, found
        for generation in GenerationStore(node.database).list_live(gallery):
            view = gallery.at_generation(generation.number)
            taken = node.store.changes.snapshot(view)
            listed = node.store.templates.by_pk(gallery, taken.template_pks.tolist())
            for pk, vector in zip(taken.template_pks.tolist(), taken.vectors, strict=True):
                np.testing.assert_allclose(vector, _vector(listed[pk].id, view.generation), atol=1e-6)
            if view.generation == gallery.generation:
                waiting = JobStore(node.database).list_jobs(gallery, ("queued", "running"), None, 10)
                assert enrolled <= {one.id for one in listed.values()} or waiting


# The table

CASES: Final = {
    "import": Case(an_empty_gallery, import_blocks, blocks_are_whole, kills=2, words=(0, BLOCKS // 2)),
    "restore and backup": Case(
        a_backup_of_another, restore_and_back_up, is_unchanged_or_restored, kills=2, words=(1, 3), delay_s=0.3
    ),
    "erasure": Case(people_of_every_table, erase_left, people_are_whole_or_erased, kills=2, words=(1, 16)),
    "rotation of the master key": Case(
        keys_in_a_file, rotate, one_key_wraps_all, kills=4, words=(2, 3), delay_s=0.1, ends=False
    ),
    "migration": Case(
        a_gallery_with_crops, migrate, is_before_or_after_a_step, kills=3, words=(1, 6), delay_s=0.1, ends=False
    ),
}
SHORT: Final = ["erasure", "import"]


@ON_EACH
@pytest.mark.parametrize("name", [*SHORT, *(pytest.param(n, marks=pytest.mark.long) for n in CASES if n not in SHORT)])
def test_killed_at_any_instant(database_url: DatabaseUrl, tmp_path: Path, name: str) -> None:
    rng, case, scene = np.random.default_rng(), CASES[name], Scene(database_url, tmp_path / "file")
    case.prepare(scene)
    for kill in range(case.kills + case.ends):
        process, ended = Process(case.step, scene.url, scene.path), kill == case.kills
        if not ended:
            process.wait_for(int(rng.integers(*case.words)))
            pause(rng.uniform(0, case.delay_s))
            process.kill()
        case.holds(scene, process.ended(), ended)
        assert case.step is rotate or problems(scene.url) == []  # its keys are not those of other tests


WORK: Final = {"enroll": 2.0, "move": 1.0, "delete": 0.5, "delete subject": 0.2, "trim": 0.5, "read": 0.5}
WRITERS: Final = 3


def test_writers_killed_at_work(database_url: DatabaseUrl) -> None:
    """Kill all writers at once, like a power failure, or some while the others continue."""
    url, rng, counters = fresh(database_url(), "g"), np.random.default_rng(), CONTEXT.Array("q", WRITERS, lock=False)
    writers = [Process(write, Task(url, "g", number, WRITERS, 60, WORK), counters) for number in range(WRITERS)]
    for writer in writers:
        writer.wait_for(1)
    pause(rng.uniform(0, MAX_DELAY_S))
    for writer in writers[: rng.integers(1, WRITERS + 1)]:
        writer.kill()
    histories = [writer.ended() for writer in writers]
    assert [*contradictions(after_all(url, "g", histories))] == []
    assert problems(url) == []


def test_several_first_starts_at_once(database_url: DatabaseUrl) -> None:
    """Concurrent writers on an empty database create the same gallery and the same subject."""
    url = database_url()
    processes = [Process(_first_start, url, number) for number in range(8)]
    assert sorted(said for process in processes for said in process.ended()) == ["created"] + ["there"] * 7
    with Node(url) as node:
        assert len(node.templates("g")) == 8
        gallery = node.store.galleries.get("g")
        assert [s.id for s in node.store.subjects.list_page(gallery, None, 9, SubjectFilter())] == ["a"]
    assert problems(url) == []


def _first_start(url: str, number: int, pipe: Pipe) -> None:
    with Node(url) as node:
        try:
            create(node, [])
            pipe.send("created")
        except GalleryExistsError:
            pipe.send("there")
        node.enroll("g", "a", [new_template(template_id(number, 0))])


# Servers

GALLERIES: Final = ("door", "gate")
PER_REQUEST: Final = 3
EVENTS_TIMEOUT_S: Final = 120


@ON_EACH
def test_a_server_killed_at_work(tmp_path: Path, database_url: DatabaseUrl) -> None:
    """A restarted server has the templates of acknowledged requests, and sends their events, in order."""
    url, rng, alive = database_url(), np.random.default_rng(), threading.Semaphore(0)
    sent: dict[tuple[str, str], NDArray[np.float32]] = {}
    enrolled: dict[tuple[str, str], list[str | None]] = {}
    acknowledged: dict[str, list[tuple[str, str]]] = {gallery: [] for gallery in GALLERIES}
    with receiving() as receiver, closing(Server(tmp_path, url, KITH_WEBHOOK_HOSTS=receiver.origin)) as server:
        server.wait_until_ready()
        with server.client() as kith:
            dimension = kith.model().dimension
            secret = kith.create_webhook(f"{receiver.origin}/", types=["decision", "enrollment"]).secret
            for gallery in GALLERIES:
                kith.create_gallery(gallery, risk={"threshold": 0.9})

        def work(gallery: str) -> None:
            drawn = np.random.default_rng(GALLERIES.index(gallery))
            with server.client() as kith, suppress(KithClientError):
                for number in itertools.count():
                    subject, vectors = f"s{number}", l2_normalize(drawn.normal(size=(PER_REQUEST, dimension)))
                    sent[gallery, subject] = vectors
                    answer = kith.enroll(gallery, subject, embeddings=list(vectors), **UNCHECKED)
                    enrolled[gallery, subject] = [result.template for result in answer.results]
                    acknowledged[gallery].append(("enrollment", subject))
                    assert _identify(kith, gallery, vectors) == subject
                    acknowledged[gallery].append(("decision", subject))
                    alive.release()

        # Some answers of the receiver come too late for the server that dies.
        receiver.answers += [503, 204, 500]
        clients = [threading.Thread(daemon=True, target=work, args=(gallery,)) for gallery in GALLERIES]
        for client in clients:
            client.start()
        for _ in range(5):
            assert alive.acquire(timeout=60)
        pause(rng.uniform(0, MAX_DELAY_S))
        server.kill()
        for client in clients:
            client.join(60)
        with Node(url) as node, node.database.engine.begin() as connection:
            connection.execute(leases.delete())  # as if their time had passed
        server.launch()
        server.wait_until_ready()
        with server.client() as kith:
            for gallery in GALLERIES:
                stored = {s.id: s.template_count for s in kith.subjects(gallery)}
                assert set(stored.values()) == {PER_REQUEST}
                known, asked = ({subject for name, subject in each if name == gallery} for each in (enrolled, sent))
                assert known <= set(stored) <= asked
                assert kith.gallery(gallery).template_count == sum(stored.values())
        with receiver.changed:
            assert receiver.changed.wait_for(lambda: _have_arrived(receiver, acknowledged), EVENTS_TIMEOUT_S)
        for gallery, events in acknowledged.items():
            told = _told(receiver.messages, gallery)
            # Unacknowledged requests may be reported, too, but nothing out of order.
            assert [event for event in told if event in set(events)] == events
            assert len(told) == len(set(told))
            assert len(told) - len(events) <= 1
        assert len({(m.id, m.body) for m in receiver.messages}) == len({m.id for m in receiver.messages})
        assert all(m.is_signed_by(secret) for m in receiver.messages[-20:])
        with server.client() as kith:
            for (gallery, subject), ids in enrolled.items():
                assert [template.id for template in kith.templates(gallery, subject)] == ids
                assert _identify(kith, gallery, sent[gallery, subject]) == subject
    assert problems(url) == []


UNCHECKED: Final[dict[str, Any]] = {"allow_inconsistent": True, "allow_duplicate": True}


def _identify(kith: Kith, gallery: str, vectors: Float) -> str | None:
    (found,) = kith.identify(gallery, embeddings=list(l2_normalize(vectors.mean(0, keepdims=True)))).results
    return found.subject


def _told(messages: list[Message], gallery: str) -> list[tuple[str, str]]:
    """Return type and subject of a gallery's events in the order of their first arrival."""
    documents = {m.id: m.document for m in messages}  # a repeated message keeps its first place
    return [(d["type"], d["data"]["subject"]) for d in documents.values() if d["data"]["gallery"] == gallery]


def _have_arrived(receiver: Receiver, acknowledged: dict[str, list[tuple[str, str]]]) -> bool:
    return all(set(events) <= set(_told(receiver.messages, gallery)) for gallery, events in acknowledged.items())


PHOTOS: Final = 24
JOB_KILLS: Final = [5, 14]


def people_and_problems(kith: Kith, job: JobOut) -> list[Any]:
    """Return the subjects and vectors of the templates, and the outcome of each item."""
    _, *exported = map(json.loads, b"".join(kith.export_gallery("g")).splitlines())
    people = sorted((line["subject"], line["embedding"]) for line in exported)
    return [people, sorted((item.item, str(item.problem)) for item in kith.job_items(job.id))]


def groups_of_faces(kith: Kith, job: JobOut) -> list[Any]:
    """Return the groups of the album, with certainties, by the photos."""
    album, found = kith.album("g", job.id), list[Any]()
    for group in kith.album_groups("g", album.id):
        faces = kith.album_faces("g", album.id, group.id)
        found.append([(face.photo, face.box, face.certainty) for face in faces])
    return [album.photo_count, album.threshold, found]


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "read"), [("enroll_archive", people_and_problems), ("create_album", groups_of_faces)]
)
def test_a_killed_job_ends_like_an_uninterrupted_one(
    tmp_path: Path,
    astronaut: NDArray[np.uint8],
    actor: NDArray[np.uint8],
    nobody: NDArray[np.uint8],
    method: str,
    read: Callable[[Kith, JobOut], list[Any]],
) -> None:
    """Each photo is processed once."""
    rng, files = np.random.default_rng(1), {"nobody/1.jpg": jpeg(nobody), "nobody/2.jpg": b"no photo"}
    for number in range(PHOTOS):
        name, face = (("eileen", astronaut), ("tom", actor))[number // 5 % 2]
        files[f"{name}/{number:03}.jpg"] = jpeg((face * rng.uniform(0.6, 1, 3)).astype(np.uint8))
    archive = tmp_path / "archive.tar"
    archive.write_bytes(as_tar(files))
    ends = []
    for kills in ([], JOB_KILLS):
        folder = tmp_path / f"{len(kills)}-kills"
        with serving(folder, None) as (server,), server.client(attempts=4) as kith:
            kith.create_gallery("g")
            job = getattr(kith, method)("g", FileStream(archive))
            for kill in kills:
                has_done(kith, job, kill)
                server.kill()
                with closing(sqlite3.connect(folder / "kith.db")) as database:
                    assert database.execute("SELECT state FROM jobs").fetchone() == ("running",)
                server.launch()
                server.wait_until_ready()
            ended = kith.wait_for(job.id, 300)
            assert (ended.state, ended.done_count) == ("succeeded", ended.total_count)
            ends.append(read(kith, job))
        assert list((folder / "spool").iterdir()) == []
        assert problems(f"sqlite:///{folder / 'kith.db'}") == []
    assert ends[0] == ends[1]
