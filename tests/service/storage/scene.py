"""A database with rows in every table: what backups, exports, erasures and the doctor have to find."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

import numpy as np

from models.runtime.network import Float
from models.vision.recognition import l2_normalize
from service.domain.albums import FaceRecord, NewAlbumFace
from service.domain.events import EventFilter
from service.domain.gallery import Crop, Gallery, GallerySettings, IdempotentResponse, NewTemplate, StoredEvidence
from service.index.follower import Followers, in_process
from service.risk.evidence import impostor_evidence
from service.security.api_keys import Rights
from service.storage.db.engine import Database
from service.storage.repositories.jobs import ItemOutcome
from service.storage.repositories.store import Store
from service.storage.repositories.strangers import Sighting
from tests.databases import claimed

DIMENSION: Final = 8
LANDMARKS: Final = ((1.0, 1.0), (3.0, 1.0), (2.0, 2.0), (1.0, 3.0), (3.0, 3.0))


def some(rng: np.random.Generator, count: int = 1, dimension: int = DIMENSION) -> list[NewTemplate]:
    drawn: Float = l2_normalize(rng.normal(size=(count, dimension)).astype(np.float32))
    crops = [Crop(rng.bytes(500), LANDMARKS) for _ in drawn]
    kinds = ("photo", {"score": 0.5}, 0.9)
    return [NewTemplate(rng.bytes(16).hex(), v, *kinds, crop) for v, crop in zip(drawn, crops, strict=True)]  # type: ignore[arg-type]


def made(database: Database, name: str = "g") -> Gallery:
    return Store(database).galleries.create(name, "f" * 32, DIMENSION, GallerySettings(keep_crops=True))


def filled(database: Database, rng: np.random.Generator) -> tuple[Gallery, list[NewTemplate]]:
    """Store data about ada in every place that can hold it, and about bob, too. Return ada's templates.

    The key of the last template is used no more.
    """
    store, gallery, other = Store(database), made(database), made(database, "other")
    store.webhooks.create("https://receiver.example", None, EventFilter())
    store.keys.create("n", Rights(frozenset({"read"}), frozenset({"g"})))
    store.generations.start(gallery, "e" * 32, DIMENSION, "other")
    gallery = store.galleries.get("g")
    enrolled = dict[str, list[NewTemplate]]()
    for name in ("ada", "bob"):
        enrolled[name] = some(rng, 3)
        store.templates.enroll(
            gallery, name, enrolled[name], IdempotentResponse(f"key of {name}", name, f"an answer to {name}")
        )
        store.subjects.put(gallery, name, f"{name} Somebody", {"born": name, "odd": [None, 1.5]}, [f"tag {name}"])
        store.decoys.add(gallery, name, some(rng)[0])
    job, stored = store.jobs.claim("here", 60), store.changes.snapshot(gallery)
    assert job is not None
    embedded = dict(zip(stored.template_pks.tolist(), stored.vectors, strict=True))
    store.generations.add(store.galleries.get("g").at_generation(1), embedded, job, [], 0)
    store.jobs.finish(job, "succeeded")
    job = claimed(database, gallery, "enrollment")
    for name in ("ada", "bob"):
        refused = [ItemOutcome(f"{name}/2.jpg", "no_face", {"detail": f"of {name}"}, name)]
        (one,) = some(rng)
        store.jobs.enroll(job, store.galleries.get("g"), name, [(f"{name}/1.jpg", one)], refused, 1)
        enrolled[name].append(one)
        store.templates.delete(gallery, name, enrolled[name].pop(0).id)
        store.templates.enroll(
            gallery, name, more := some(rng), IdempotentResponse(f"2nd key of {name}", name, f"another to {name}")
        )
        enrolled[name] += more
    store.jobs.finish(job, "failed", {"code": "image_format"})
    _enroll_faces(store, enrolled, rng)
    gallery = store.galleries.get("g")
    sighting = Sighting("5" * 32, *list(vars(some(rng)[0]).values())[1:6])
    search = Followers(in_process(store)).nearest
    store.strangers.remember(gallery, [sighting], search, lambda *_: "new", datetime.now(UTC))
    stored = store.changes.snapshot(gallery)
    evidence = StoredEvidence(stored.sequence, 8, impostor_evidence(stored), gallery.created_at)
    store.evidence.put(gallery, evidence)
    store.templates.enroll(other, "last", last := some(rng, 2), None)
    store.templates.delete(other, "last", last[-1].id)
    return store.galleries.get("g"), enrolled["ada"]


def _enroll_faces(store: Store, people: dict[str, list[NewTemplate]], rng: np.random.Generator) -> None:
    """Make an album with a group of two faces of each person, and enroll one of them."""
    gallery, later = store.galleries.get("g"), datetime.now(UTC) + timedelta(days=7)
    store.jobs.create(gallery, "album", {}, beginning=store.albums.beginning(gallery, 0.01, later))
    job = store.jobs.claim("here", 60, lambda job: job.kind == "album")
    assert job is not None
    album = store.albums.get(gallery, job.id)
    for name in people:
        for face, new in enumerate(some(rng, 2), start=1):
            about = FaceRecord(f"{name}.jpg", name, face, [1, 2, 3, 4], 0.9, {}, [], None)
            store.albums.add(job, album, [], [NewAlbumFace(about, new.vector, Crop(b"face", LANDMARKS))], 1)
    stored, _ = store.albums.faces_to_group(album, gallery)
    groups = [[(pk, 0.5) for pk, face in stored if face.hash == name] for name in people]
    store.albums.set_groups(job, album, groups, 0.4)
    store.jobs.finish(job, "succeeded")
    for number, (name, own) in enumerate(people.items(), start=1):
        _, waiting = store.albums.to_enroll(gallery, album.id, number, 1)
        (one,) = some(rng)
        store.albums.enroll(gallery, album.id, number, name, None, {next(iter(waiting)): one}, as_read=False)
        own.append(one)
