"""A server is killed while it runs a job. Each photo is processed once; the result is an uninterrupted server's."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kith import FileStream
from service.storage.repositories.jobs import JobStore
from service.storage.repositories.store import Store
from tests.conftest import jpeg
from tests.databases import open_database
from tests.faults import LONG
from tests.faults.servers import serving
from tests.service.usecases.test_bulk_enrollment import as_tar, has_done
from tests.soundness import problems

pytestmark = pytest.mark.long

PHOTOS = 200 if LONG else 40
KILLS = [8, 20, 70, 120, 160] if LONG else [8, 20]


def enrolled(store: Store) -> list[Any]:
    """Return the subjects of the templates by vector, and the outcome of each item."""
    (gallery,), jobs = store.galleries.list_page(None, 2), JobStore(store.database)
    taken, (job,) = store.changes.snapshot(gallery), jobs.list_jobs(None, (), None, 2)
    listed = store.templates.by_pk(gallery, taken.template_pks.tolist())
    vectors = dict(zip(taken.template_pks.tolist(), (vector.tobytes() for vector in taken.vectors), strict=True))
    people = sorted((template.subject, vectors[pk]) for pk, template in listed.items())
    return [people, sorted((item.item, item.problem) for item in jobs.items(job, None, 10_000))]


def grouped(store: Store) -> list[Any]:
    """Return the groups of the album, with certainties, by the photos."""
    albums, gallery = store.albums, store.galleries.get("g")
    (album,) = albums.list_all(gallery)
    found = []
    for group in albums.groups(gallery, album.id, None, None, 1000):
        faces = [face for _, face in albums.faces(gallery, album.id, group.number, None, 1000)]
        found.append([(face.photo, face.box, face.certainty) for face in faces])
    return [album.photo_count, album.threshold, found]


@pytest.mark.parametrize(("method", "read"), [("enroll_archive", enrolled), ("create_album", grouped)])
def test_a_killed_job_ends_like_an_uninterrupted_one(
    tmp_path: Path,
    astronaut: NDArray[np.uint8],
    actor: NDArray[np.uint8],
    nobody: NDArray[np.uint8],
    method: str,
    read: Callable[[Store], list[Any]],
) -> None:
    rng, files = np.random.default_rng(1), {"nobody/1.jpg": jpeg(nobody), "nobody/2.jpg": b"no photo"}
    for number in range(PHOTOS):
        name, face = (("eileen", astronaut), ("tom", actor))[number // 5 % 2]
        files[f"{name}/{number:03}.jpg"] = jpeg((face * rng.uniform(0.6, 1, 3)).astype(np.uint8))
    archive = tmp_path / "archive.tar"
    archive.write_bytes(as_tar(files))
    ends = []
    for kills in ([], KILLS):
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
        with closing(Store(open_database(f"sqlite:///{folder / 'kith.db'}"))) as store:
            ends.append(read(store))
            assert list((folder / "spool").iterdir()) == []
            assert problems(f"sqlite:///{folder / 'kith.db'}") == []
    assert ends[0] == ends[1]
