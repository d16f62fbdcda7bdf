"""Albums through the API: groups of people, what people decide, deletion."""

from __future__ import annotations

import sqlite3
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime, timedelta
from itertools import product
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
import sqlalchemy as sa
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from kith import Kith
from kith.wire.albums import AlbumGroupOut
from kith.wire.jobs import JobOut
from service.cli.tools.demo import alter
from service.core.errors import LimitReachedError, SubjectErasedError
from service.domain.gallery import GallerySettings, NewTemplate
from service.settings import Settings
from service.storage.db.row_sealing import ALBUM_FACE, ITEM
from service.storage.db.tables import album_faces, albums, job_items, jobs
from service.storage.repositories import albums as repository
from service.storage.repositories.jobs import JobStore
from service.storage.repositories.store import Store
from service.usecases import albums as usecase
from tests.conftest import is_eventually, jpeg
from tests.databases import ON_BOTH, open_database
from tests.postgres import DatabaseUrl
from tests.refusals import refusal
from tests.service.usecases.test_bulk_enrollment import Bytes, as_zip, has_done

Photo = NDArray[np.uint8]


@pytest.fixture(scope="module")
def people(astronaut: Photo, actor: Photo) -> dict[str, bytes]:
    """Four photos of each of two people."""
    both = (("astronaut", astronaut[:300, 90:360]), ("actor", actor))
    return {
        f"2024/{name}-{number}.jpg": alter(Image.fromarray(image), number % 2 == 1, turn, 0.9, light, jpeg=85)
        for name, image in both
        for number, (turn, light) in enumerate(product((0, 6), (0.8, 1.2)))
    }


@pytest.fixture(scope="module")
def blurred(astronaut: Photo) -> bytes:
    return jpeg(Image.fromarray(astronaut).filter(ImageFilter.GaussianBlur(7)))


@pytest.fixture
def album(kith: Kith, gallery: str, people: dict[str, bytes]) -> str:
    return made(kith, gallery, people).id


def made(kith: Kith, gallery: str, photos: dict[str, bytes]) -> JobOut:
    return kith.wait_for(kith.create_album(gallery, Bytes(as_zip(photos))).id, 120)


def groups(kith: Kith, gallery: str, album: str, single: bool | None = False) -> dict[str, AlbumGroupOut]:
    return {group.id: group for group in kith.album_groups(gallery, album, single)}


def shown(group: AlbumGroupOut) -> tuple[str, ...]:
    return tuple(sorted(face.photo for face in group.faces))


def of(kith: Kith, gallery: str, album: str, name: str) -> AlbumGroupOut:
    """Return the group of several photos whose names begin so."""
    return next(one for one in groups(kith, gallery, album).values() if all(name in photo for photo in shown(one)))


def test_each_person_is_one_group(
    kith: Kith, gallery: str, server: str, people: dict[str, bytes], blurred: bytes, group: Photo, nobody: Photo
) -> None:
    several = {
        f"group-{number}.jpg": alter(Image.fromarray(group), False, 0, scale, 1.0, 90)
        for number, scale in enumerate((0.9, 0.7))
    }
    others = {"coffee.jpg": jpeg(nobody), "blurred.jpg": blurred, "zz-copy.jpg": people["2024/actor-0.jpg"]}
    unread = {"notes.txt": b"no photo", "2024/broken.jpg": b"no photo either"}
    job = made(kith, gallery, people | several | others | unread)
    assert (job.state, job.kind) == ("succeeded", "album")
    assert job.counts == {"faces_found": 11, "no_face": 1, "copy": 1, "ignored": 1, "image_format": 1}
    found = kith.album(gallery, job.id)
    assert (found.state, found.photo_count, found.face_count, found.risk) == ("ready", 12, 21, 0.01)
    assert (found.expires_at - found.created_at).total_seconds() == pytest.approx(7 * 86_400, abs=5)
    found_groups, single = (groups(kith, gallery, job.id, single) for single in (False, True))
    assert (found.group_count, found.single_count) == (len(found_groups), len(single))
    counts = Counter(map(shown, found_groups.values()))
    # The sixth face of the group is turned away, and found by some engines.
    assert counts.pop(("group-0.jpg", "group-1.jpg")) in (5, 6)
    assert counts == {tuple(f"2024/{name}-{n}.jpg" for n in range(4)): 1 for name in ("actor", "astronaut")}
    for one in found_groups.values():
        certainties = [face.certainty or 0 for face in one.faces]
        assert certainties == sorted(certainties, reverse=True)
        assert certainties[-1] > 0.9
    reasons = {one.faces[0].photo: one.faces[0].reasons for one in single.values()}
    assert reasons["blurred.jpg"] == ["sharpness"]
    every = len(list(kith.album_groups(gallery, job.id)))
    assert every == found.group_count + found.single_count
    for path, count in (("groups", every), ("groups/g1/faces", 4)):
        seen, cursor = list[str](), None
        while not seen or cursor is not None:
            query = {"limit": "3"} | ({"cursor": cursor} if cursor else {})
            page = httpx.get(f"{server}/v1/galleries/{gallery}/albums/{job.id}/{path}", params=query).json()
            seen, cursor = seen + [one["id"] for one in page["data"]], page["next"]
        assert len(seen) == len(set(seen)) == count

    faces = [face.id for face in kith.album_faces(gallery, job.id, "g1")]
    wanted = [{"album": job.id, "face": face} for face in [*faces, "0" * 32]]
    crops = kith.crops(gallery, wanted)
    assert crops[-1] is None and all(crops[:-1]) and len(set(crops)) == len(crops)
    (line,) = kith.audit(gallery, event="crop_read")
    assert line.details == {"count": len(faces), "albums": [job.id], "faces": faces}
    kith.create_gallery("elsewhere")
    assert kith.crops("elsewhere", wanted) == [None] * len(wanted)
    assert refusal(kith.album, "elsewhere", job.id) == (404, "album_not_found")
    kith.delete_gallery("elsewhere")

    one, two = list(found_groups.values())[:2]
    everyone = [face.id for face in kith.album_faces(gallery, job.id, one.id)]
    refusals: list[tuple[Callable[..., Any], tuple[Any, ...], tuple[int, str]]] = [
        (kith.enroll_album_group, (job.id, "g999", "ada"), (404, "album_group_not_found")),
        (kith.merge_album_group, (job.id, one.id, one.id), (422, "invalid_request")),
        (kith.merge_album_group, (job.id, one.id, "g999"), (404, "album_group_not_found")),
        (kith.split_album_group, (job.id, one.id, everyone), (422, "invalid_request")),
        (kith.split_album_group, (job.id, one.id, [two.faces[0].id]), (404, "album_group_not_found")),
    ]
    for call, arguments, expected in refusals:
        assert refusal(call, gallery, *arguments) == expected


def test_people_merge_split_and_enroll_groups(
    kith: Kith, gallery: str, album: str, people: dict[str, bytes], settings: Settings
) -> None:
    first, second = of(kith, gallery, album, "astronaut"), of(kith, gallery, album, "actor")
    # Erased people are not enrolled by a request that began before, and nothing is half done.
    with closing(open_database(settings.sql_url)) as database:
        store, number = Store(database), int(second.id[1:])
        before = store.galleries.get(gallery)
        _, faces = store.albums.to_enroll(before, album, number, 1)
        kith.put_subject(gallery, "tom")
        kith.delete_subject(gallery, "tom")
        template = {name: NewTemplate("1" * 32, face.vector, "photo") for name, face in faces.items()}
        with pytest.raises(SubjectErasedError):
            store.albums.enroll(before, album, number, "tom", None, template, as_read=False)

    mixed = kith.merge_album_group(gallery, album, second.id, first.id)
    assert (mixed.id, mixed.face_count) == (first.id, 8)
    assert {face.certainty for face in mixed.faces if "actor" in face.photo} == {None}
    actors = [face.id for face in kith.album_faces(gallery, album, first.id) if "actor" in face.photo]
    apart = kith.split_album_group(gallery, album, first.id, actors)
    assert (apart.face_count, apart.subject) == (4, None) and apart.id not in (first.id, second.id)
    done = kith.enroll_album_group(gallery, album, apart.id, "tom", "Tom Hanks")
    assert (done.subject, done.enrolled_count, done.refused, done.remaining_count) == ("tom", 4, [], 0)
    assert (kith.subject(gallery, "tom").name, kith.subject(gallery, "tom").template_count) == ("Tom Hanks", 4)
    assert apart.id not in groups(kith, gallery, album)
    assert refusal(kith.enroll_album_group, gallery, album, apart.id, "tom") == (404, "album_group_not_found")
    assert kith.crops(gallery, [{"album": album, "face": actors[0]}]) == [None]
    (result,) = kith.identify(gallery, people["2024/actor-2.jpg"], risk={"threshold": 0.5}).results
    assert (result.outcome, result.subject) == ("identified", "tom")

    # The same faces of the same photos are no new templates, also of one that was moved to another subject.
    moved, *_ = kith.templates(gallery, "tom")
    kith.put_subject(gallery, "thomas")
    kith.move_template(gallery, "tom", moved.id, "thomas")
    other = made(kith, gallery, people).id
    again, skipped = of(kith, gallery, other, "actor").id, {"allow_duplicate": True, "allow_inconsistent": True}
    done = kith.enroll_album_group(gallery, other, again, "tom", "Thomas", **skipped)
    assert (done.refused, done.remaining_count) == ([], 0)
    assert [kith.subject(gallery, name).template_count for name in ("tom", "thomas")] == [3, 1]
    assert kith.subject(gallery, "tom").name == "Tom Hanks"


def test_refused_faces_stay_and_do_not_stop_those_after_them(
    kith: Kith, gallery: str, people: dict[str, bytes], blurred: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    album = made(kith, gallery, people | {"blurred.jpg": blurred}).id
    (poor,) = groups(kith, gallery, album, True).values()
    astronaut, actor = (of(kith, gallery, album, name) for name in ("astronaut", "actor"))
    kith.merge_album_group(gallery, album, poor.id, astronaut.id)
    done = kith.enroll_album_group(gallery, album, astronaut.id, "eileen")
    assert (done.enrolled_count, done.remaining_count) == (4, 1)
    ((face, told),) = [(one.face, one.problem) for one in done.refused]
    assert (face, told.code) == (poor.faces[0].id, "low_quality")
    assert [one.id for one in kith.album_faces(gallery, album, astronaut.id)] == [face]
    assert groups(kith, gallery, album, True)[astronaut.id].subject == "eileen"
    done = kith.enroll_album_group(gallery, album, actor.id, "eileen")
    assert (done.enrolled_count, {one.problem.code for one in done.refused}) == (0, {"inconsistent_template"})
    assert groups(kith, gallery, album)[actor.id].subject is None, "no one of the group is known to be her"
    events = {line.event for line in kith.audit(gallery) if line.event.startswith("album_")}
    assert events == {"album_grouped", "album_merged"}

    # Refused faces lead a group, and a request takes two faces at once.
    assert kith.enroll_album_group(gallery, album, actor.id, "tom").enrolled_count == 4
    kith.delete_subject(gallery, "eileen")
    other = made(kith, gallery, people).id
    mixed = of(kith, gallery, other, "actor")
    kith.merge_album_group(gallery, other, of(kith, gallery, other, "astronaut").id, mixed.id)
    monkeypatch.setattr(usecase, "MAX_ENROLLED", 2)
    kith.enroll(gallery, "eileen", people["2024/astronaut-0.jpg"])
    for counts in ((2, 6), (2, 4), (0, 4)):
        done = kith.enroll_album_group(gallery, other, mixed.id, "eileen")
        assert (done.enrolled_count, done.remaining_count) == counts
        assert len(done.refused) == 4
        assert {one.problem.code for one in done.refused} <= {"duplicate_subject", "inconsistent_template"}


def test_deletion_leaves_nothing(
    kith: Kith, gallery: str, album: str, settings: Settings, people: dict[str, bytes]
) -> None:
    spool = settings.data_dir / "spool"
    receipt = kith.delete_album(gallery, album).receipt
    assert (receipt.kind, receipt.subject, receipt.removed) == ("album", album, {})
    assert kith.delete_album(gallery, album).receipt.id == receipt.id
    assert refusal(kith.job, album) == (404, "job_not_found")
    # JPEG decoders ignore what follows the image.
    originals = list(people.values())
    many = Bytes(as_zip({f"{n}.jpg": originals[n % 8] + str(n).encode() for n in range(120)}))
    deleted, canceled = (kith.create_album(gallery, many) for _ in range(2))
    for job in (deleted, canceled):
        has_done(kith, job, 16)
    assert kith.album(gallery, deleted.id).state == "grouping"
    assert refusal(lambda: list(kith.album_groups(gallery, deleted.id))) == (409, "album_not_ready")
    kith.delete_album(gallery, deleted.id)
    kith.cancel_job(canceled.id)
    assert kith.wait_for(canceled.id, 60).state == "canceled"
    is_eventually(lambda: not list(spool.iterdir()) and kith.albums(gallery) == [])


def test_an_album_has_bounds(
    kith: Kith, gallery: str, people: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in ((repository, "MAX_FACES"), (usecase, "MAX_PHOTOS")):
        with monkeypatch.context() as patched:
            patched.setattr(module, name, 5)
            job = made(kith, gallery, people)
        assert job.problem is not None
        assert (job.state, job.problem.code) == ("failed", "album_too_large")
        is_eventually(lambda: kith.albums(gallery) == [])
    only = made(kith, gallery, {"1.jpg": people["2024/actor-0.jpg"]})
    found = kith.album(gallery, only.id)
    assert (found.threshold, found.group_count, found.single_count) == (None, 0, 1)


@ON_BOTH
def test_requests_at_the_same_time_do_not_exceed_the_number_of_albums(
    database_url: DatabaseUrl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repository, "MAX_ALBUMS", 2)
    together, later = threading.Barrier(8), datetime.now(UTC) + timedelta(days=7)
    with closing(open_database(database_url())) as database:
        store, jobs = Store(database), JobStore(database)
        gallery = store.galleries.create("g", "f" * 32, 4, GallerySettings())

        def create() -> None:
            together.wait()
            jobs.create(gallery, "album", {}, beginning=store.albums.beginning(gallery, 0.01, later))

        with ThreadPoolExecutor(8) as pool:
            errors = [each.exception() for each in [pool.submit(create) for _ in range(8)]]
        assert errors.count(None) == len(store.albums.list_all(gallery)) == 2
        assert {error.code for error in errors if isinstance(error, LimitReachedError)} == {"too_many_albums"}


def test_the_rest_of_an_enrolled_group_is_erased_with_the_subject(
    kith: Kith, gallery: str, album: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usecase, "MAX_ENROLLED", 1)
    own, other = (of(kith, gallery, album, name) for name in ("astronaut", "actor"))
    assert kith.enroll_album_group(gallery, album, own.id, "eileen").remaining_count == 3
    kith.put_subject(gallery, "collins", name="Eileen Collins")
    kith.merge_subject(gallery, "eileen", "collins")
    known = groups(kith, gallery, album)[own.id]
    assert (known.subject, known.name) == ("collins", "Eileen Collins")
    third = kith.split_album_group(gallery, album, own.id, [face.id for face in known.faces[1:]])
    apart = kith.split_album_group(gallery, album, other.id, [other.faces[-1].id])
    merged = kith.merge_album_group(gallery, album, own.id, other.id)
    assert (third.subject, apart.subject, merged.subject, merged.face_count) == (None, None, "collins", 4)
    # The subject of a group is that of the group it was merged into.
    kith.enroll_album_group(gallery, album, third.id, "tom", allow_duplicate=True)
    assert kith.merge_album_group(gallery, album, other.id, third.id).subject == "tom"
    counts = []
    for name in ("collins", "tom"):
        kith.delete_subject(gallery, name)
        counts.append(kith.album(gallery, album).face_count)
    assert counts == [6, 1]
    assert list(groups(kith, gallery, album, True)) == [apart.id], "someone else, as the caller said"


def test_no_name_of_a_photo_outlives_the_erasure_of_its_person(
    kith: Kith, gallery: str, people: dict[str, bytes], settings: Settings
) -> None:
    """Neither in the album nor in the items of its job, however they are sealed."""
    others = {"astronaut-copy.jpg": people["2024/astronaut-0.jpg"], "astronaut.txt": b"x", "0.jpg": b"x"}
    job = made(kith, gallery, people | others)
    assert job.counts == {"faces_found": 8, "copy": 1, "ignored": 1, "image_format": 1}
    items = list(kith.job_items(job.id))
    assert Counter(item.outcome for item in items) == job.counts
    assert [item.item for item in items if item.item] == ["0.jpg"], "only who reads of a refusal needs the name"
    assert [item.item for item in kith.job_items(job.id, failed=True)] == ["0.jpg"]
    for name in ("astronaut", "actor"):
        group = of(kith, gallery, job.id, name).id
        assert kith.enroll_album_group(gallery, job.id, group, name).remaining_count == 0
    kith.delete_subject(gallery, "astronaut")
    with closing(open_database(settings.sql_url)) as database, database.read() as connection:
        stored = Store(database).galleries.get(gallery)
        for table, owner, purpose in (
            (job_items.join(jobs), jobs, ITEM),
            (album_faces.join(albums), albums, ALBUM_FACE),
        ):
            sealed = sa.select(table.left.c.sealed).select_from(table).where(owner.c.gallery_pk == stored.pk)
            for value in connection.execute(sealed).scalars():
                assert "astronaut" not in str(stored.seal.open_json(value, purpose))


def test_an_album_past_its_time_is_hidden_and_deleted_by_a_checked_clock(
    kith: Kith, gallery: str, album: str, settings: Settings, people: dict[str, bytes]
) -> None:
    face = next(iter(groups(kith, gallery, album).values())).faces[0].id
    with closing(sqlite3.connect(settings.data_dir / "kith.db")) as database, database:
        database.execute("UPDATE albums SET expires_at = created_at WHERE id = ?", [album])
    assert kith.albums(gallery) == []
    assert refusal(kith.album, gallery, album) == (404, "album_not_found")
    assert kith.crops(gallery, [{"album": album, "face": face}]) == [None]
    other = made(kith, gallery, {"1.jpg": people["2024/actor-0.jpg"]})
    with closing(open_database(settings.sql_url)) as opened:
        albums = Store(opened).albums
        assert albums.delete_expired(datetime.now(UTC) + timedelta(days=6.9)) == 1
        assert [one.id for one in kith.albums(gallery)] == [other.id]
        assert albums.delete_expired(datetime.now(UTC) + timedelta(days=7.1)) == 1
    expired = [line.details["album"] for line in kith.audit(gallery) if line.event == "album_expired"]
    assert expired == [other.id, album]
    assert list(kith.jobs(gallery)) == []


def test_people_of_lfw_are_grouped_at_the_risk(kith: Kith, gallery: str, data: Path) -> None:
    """Six people with six photos, two of them side by side, and twenty with one: nearly all pairs are found."""
    folders = [sorted(path.iterdir()) for path in sorted((data / "lfw" / "images").iterdir()) if path.is_dir()]
    several = [photos[:6] for photos in folders if len(photos) >= 8][5:11]
    single = [photos for photos in folders if len(photos) == 1][100:120]
    twice = np.concatenate([np.asarray(Image.open(path)) for path in several[0][:2]], axis=1)
    several[0] = several[0][2:]
    photos = {path.name: path.read_bytes() for some in several + single for path in some}
    photos[f"{several[0][0].parent.name}_twice.jpg"] = jpeg(twice)
    found = [shown(one) for one in groups(kith, gallery, made(kith, gallery, photos).id).values()]
    assert all(len({*one}) == len(one) for one in found), "faces of one photo are different people"
    names = [[name.rpartition("_")[0] for name in one] for one in found]
    largest = sorted(names, key=len, reverse=True)[:6]
    assert {Counter(each).most_common(1)[0][0] for each in largest} == {photos[0].parent.name for photos in several}
    right = sum(n * (n - 1) // 2 for each in largest for n in Counter(each).values())
    pairs = sum(len(each) * (len(each) - 1) // 2 for each in largest)
    assert right >= 0.97 * pairs
    assert right >= 0.85 * (5 * 15 + 10)
