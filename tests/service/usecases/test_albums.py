# ruff: noqa: S608 - statements of the tests' own
"""Albums through the API: groups of people, what people decide, deletion, a kill."""

from __future__ import annotations

import io
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime, timedelta
from itertools import product
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
import sqlalchemy as sa
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from kith import Kith, KithClientError
from kith.wire.albums import AlbumGroupOut
from kith.wire.jobs import JobOut
from service.cli.tools.demo import alter
from service.core.errors import LimitReachedError, SubjectErasedError
from service.domain import albums as domain
from service.domain.gallery import GallerySettings, NewTemplate
from service.server import embedded
from service.settings import Settings, load_settings
from service.storage.db.row_sealing import ALBUM_FACE, ITEM
from service.storage.db.tables import album_faces, albums, job_items, jobs
from service.storage.privacy.subject_access import everything_about
from service.storage.repositories import albums as repository
from service.storage.repositories.jobs import JobStore
from service.storage.repositories.store import Store
from service.usecases import albums as usecase
from tests.conftest import jpeg
from tests.databases import ON_BOTH, open_database
from tests.postgres import DatabaseUrl
from tests.service.usecases.test_bulk_enrollment import Bytes, as_zip, has_done, is_eventually

Photo = NDArray[np.uint8]
OPERATOR = "an operator key of sufficient length"
SHARED = "shared"
G = "(SELECT pk FROM galleries WHERE name = 'g')"


@pytest.fixture(scope="module")
def photos(astronaut: Photo, actor: Photo, group: Photo, nobody: Photo) -> dict[str, bytes]:
    """Four photos of each of two people, two of a group of six, one without a face, a blurred one, a copy."""
    found = {}
    for (name, image), (number, (turn, light)) in product(
        (("astronaut", astronaut), ("actor", actor)), enumerate(product((0, 6), (0.8, 1.2)))
    ):
        content = alter(Image.fromarray(image), mirror=number % 2 == 1, turn_deg=turn, scale=0.8, light=light, jpeg=85)
        found[f"2024/{name}-{number}.jpg"] = content
    for number, scale in enumerate((0.9, 0.7)):
        found[f"group-{number}.jpg"] = alter(Image.fromarray(group), False, 0, scale, 1.0, 90)
    found["coffee.jpg"] = alter(Image.fromarray(nobody), False, 0, 0.5, 1.0, 85)
    found["blurred.jpg"] = jpeg(Image.fromarray(astronaut).filter(ImageFilter.GaussianBlur(7)))
    found["zz-copy.jpg"] = found["2024/actor-0.jpg"]
    return found


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return load_settings(data_dir=tmp_path_factory.mktemp("albums"), api_key=OPERATOR, log_level="ERROR")


@pytest.fixture(scope="module")
def server(settings: Settings) -> Iterator[str]:
    with embedded(settings) as url:
        yield url


@pytest.fixture
def kith(server: str) -> Iterator[Kith]:
    with Kith(server, OPERATOR) as kith:
        yield kith
        for gallery in list(kith.galleries()):
            if gallery.name != SHARED:
                kith.delete_gallery(gallery.name)


@pytest.fixture
def album(kith: Kith, photos: dict[str, bytes]) -> str:
    kith.create_gallery("g")
    return made(kith, photos).id


@pytest.fixture(scope="module")
def shared(server: str, settings: Settings, photos: dict[str, bytes]) -> str:
    """An album of the gallery SHARED that no test changes, and that does not expire."""
    with Kith(server, OPERATOR) as kith, closing(sqlite3.connect(settings.data_dir / "kith.db")) as database, database:
        kith.create_gallery(SHARED)
        job = made(kith, photos, SHARED)
        database.execute("UPDATE albums SET expires_at = '2100-01-01 00:00:00.000000' WHERE id = ?", [job.id])
        return job.id


def made(kith: Kith, photos: dict[str, bytes], gallery: str = "g") -> JobOut:
    return kith.wait_for(kith.create_album(gallery, Bytes(as_zip(photos))).id, 120)


def groups(kith: Kith, album: str, single: bool | None = False, gallery: str = "g") -> dict[str, AlbumGroupOut]:
    return {group.id: group for group in kith.album_groups(gallery, album, single)}


def shown(group: AlbumGroupOut) -> tuple[str, ...]:
    return tuple(sorted(face.photo for face in group.faces))


def of(kith: Kith, album: str, name: str) -> AlbumGroupOut:
    """Return the group of several photos whose names begin so."""
    return next(one for one in groups(kith, album).values() if all(name in photo for photo in shown(one)))


def problem(call: Any, *arguments: Any, **options: Any) -> tuple[int, str]:
    with pytest.raises(KithClientError) as refused:
        call(*arguments, **options)
    return refused.value.status, refused.value.code


def test_each_person_is_one_group(kith: Kith, photos: dict[str, bytes]) -> None:
    kith.create_gallery("g")
    job = made(kith, photos | {"notes.txt": b"no photo", "2024/broken.jpg": b"no photo either"})
    assert (job.state, job.kind) == ("succeeded", "album")
    assert job.counts == {"faces_found": 11, "no_face": 1, "copy": 1, "ignored": 1, "image_format": 1}
    found = kith.album("g", job.id)
    assert (found.state, found.photo_count, found.face_count, found.risk) == ("ready", 12, 21, 0.01)
    several, single = groups(kith, job.id), groups(kith, job.id, True)
    assert (found.group_count, found.single_count) == (len(several), len(single)) == (7, 3)
    assert Counter(map(shown, several.values())) == {
        tuple(f"2024/astronaut-{number}.jpg" for number in range(4)): 1,
        tuple(f"2024/actor-{number}.jpg" for number in range(4)): 1,
        ("group-0.jpg", "group-1.jpg"): 5,  # the sixth face is turned away
    }
    for group in several.values():
        certainties = [face.certainty or 0 for face in group.faces]
        assert certainties == sorted(certainties, reverse=True)
        assert certainties[-1] > 0.9
    reasons = {group.faces[0].photo: group.faces[0].reasons for group in single.values()}
    assert reasons["blurred.jpg"] == ["sharpness"]
    again = made(kith, {name: photos[name] for name in reversed(photos) if name != "zz-copy.jpg"})
    assert Counter(map(shown, groups(kith, again.id).values())) == Counter(map(shown, several.values()))


def test_people_merge_split_and_enroll_groups(kith: Kith, album: str, photos: dict[str, bytes]) -> None:
    first, second = of(kith, album, "astronaut"), of(kith, album, "actor")
    (image,) = kith.crops("g", [{"album": album, "face": first.faces[0].id}])
    assert image is not None
    crop = Image.open(io.BytesIO(image))
    assert crop.format == "WEBP" and max(crop.size) > 100
    mixed = kith.merge_album_group("g", album, second.id, first.id)
    assert (mixed.id, mixed.face_count, {face.certainty for face in mixed.faces if "actor" in face.photo}) == (
        first.id,
        8,
        {None},
    )
    actors = [face.id for face in kith.album_faces("g", album, first.id) if "actor" in face.photo]
    apart = kith.split_album_group("g", album, first.id, actors)
    assert (apart.face_count, apart.subject) == (4, None) and apart.id not in (first.id, second.id)
    done = kith.enroll_album_group("g", album, apart.id, "tom", "Tom Hanks")
    assert (done.subject, done.enrolled_count, done.refused, done.remaining_count) == ("tom", 4, [], 0)
    assert (kith.subject("g", "tom").name, kith.subject("g", "tom").template_count) == ("Tom Hanks", 4)
    assert apart.id not in groups(kith, album)
    assert problem(kith.enroll_album_group, "g", album, apart.id, "tom") == (404, "album_group_not_found")
    assert kith.crops("g", [{"album": album, "face": actors[0]}]) == [None]
    (result,) = kith.identify("g", photos["2024/actor-2.jpg"], risk={"threshold": 0.5}).results
    assert (result.outcome, result.subject) == ("identified", "tom")

    other = made(kith, photos).id
    actors_again = of(kith, other, "actor")
    assert kith.enroll_album_group("g", other, actors_again.id, "tom", "Thomas").remaining_count == 0
    tom = kith.subject("g", "tom")
    assert (tom.template_count, tom.name) == (4, "Tom Hanks"), "the same faces of the same photos"


def test_pictures_of_an_album_are_read_at_once_with_one_audit_line(kith: Kith, shared: str) -> None:
    kith.create_gallery("elsewhere")
    faces = [face.id for face in kith.album_faces(SHARED, shared, "g1")]
    wanted = [{"album": shared, "face": face} for face in [*faces, "0" * 32]]
    crops = kith.crops(SHARED, wanted)
    assert crops[-1] is None and all(crops[:-1]) and len(set(crops)) == len(crops)
    line, *_ = kith.audit(SHARED, event="crop_read")
    assert line.details == {"count": len(faces), "albums": [shared], "faces": faces}
    assert kith.crops("elsewhere", wanted) == [None] * len(wanted)
    assert kith.crops(SHARED, [{"album": "0" * 32, "face": faces[0]}]) == [None]


def test_faces_that_enrollment_refuses_stay(kith: Kith, album: str) -> None:
    (poor,) = [one for one in groups(kith, album, True).values() if one.faces[0].photo == "blurred.jpg"]
    people = of(kith, album, "astronaut")
    merged = kith.merge_album_group("g", album, poor.id, people.id)
    assert (merged.face_count, merged.subject) == (5, None)
    done = kith.enroll_album_group("g", album, people.id, "eileen")
    assert (done.enrolled_count, done.remaining_count) == (4, 1)
    ((face, told),) = [(one.face, one.problem) for one in done.refused]
    assert (face, told.code) == (poor.faces[0].id, "low_quality")
    assert [one.id for one in kith.album_faces("g", album, people.id)] == [face]
    assert groups(kith, album, True)[people.id].subject == "eileen"
    actor = of(kith, album, "actor")
    done = kith.enroll_album_group("g", album, actor.id, "eileen")
    assert (done.enrolled_count, {one.problem.code for one in done.refused}) == (0, {"inconsistent_template"})
    assert groups(kith, album)[actor.id].subject is None, "nobody of the group is known to be her"
    assert kith.enroll_album_group("g", album, people.id, "eileen", allow_low_quality=True).remaining_count in (0, 1)
    lines = [line for line in kith.audit("g") if line.event.startswith("album_")]
    assert {line.event for line in lines} == {"album_grouped", "album_merged"}


def test_refused_faces_do_not_stop_those_after_them(
    kith: Kith, album: str, photos: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three refused faces lead a group, and a request takes two faces at once."""
    tom = of(kith, album, "actor")
    assert kith.enroll_album_group("g", album, tom.id, "tom").enrolled_count == 4
    other = made(kith, photos).id
    mixed, people = of(kith, other, "actor"), of(kith, other, "astronaut")
    kith.merge_album_group("g", other, people.id, mixed.id)
    monkeypatch.setattr(usecase, "MAX_ENROLLED", 2)
    kith.enroll("g", "eileen", photos["2024/astronaut-0.jpg"])
    done = kith.enroll_album_group("g", other, mixed.id, "eileen")
    assert (done.enrolled_count, done.remaining_count, len(done.refused)) == (2, 6, 4)
    done = kith.enroll_album_group("g", other, mixed.id, "eileen")
    assert (done.enrolled_count, done.remaining_count, len(done.refused)) == (2, 4, 4)
    done = kith.enroll_album_group("g", other, mixed.id, "eileen")
    assert (done.enrolled_count, done.remaining_count, len(done.refused)) == (0, 4, 4)
    assert {one.problem.code for one in done.refused} <= {"duplicate_subject", "inconsistent_template"}


def test_a_face_whose_template_was_moved_to_somebody_else_stays(
    kith: Kith, album: str, photos: dict[str, bytes]
) -> None:
    tom = of(kith, album, "actor")
    kith.enroll_album_group("g", album, tom.id, "tom")
    first, *_ = kith.templates("g", "tom")
    kith.put_subject("g", "thomas")
    kith.move_template("g", "tom", first.id, "thomas")
    other = made(kith, photos).id
    again = of(kith, other, "actor")
    done = kith.enroll_album_group("g", other, again.id, "tom", allow_inconsistent=True)
    assert [one.problem.code for one in done.refused] == ["duplicate_subject"] * done.remaining_count != []
    assert kith.subject("g", "thomas").template_count == 1
    done = kith.enroll_album_group("g", other, again.id, "tom", allow_duplicate=True, allow_inconsistent=True)
    assert (done.refused, done.remaining_count) == ([], 0)
    assert kith.subject("g", "tom").template_count == 4


def test_mistakes_are_refused_with_what_to_do(kith: Kith, shared: str, photos: dict[str, bytes]) -> None:
    one, two = list(groups(kith, shared, gallery=SHARED).values())[:2]
    everyone = [face.id for face in kith.album_faces(SHARED, shared, one.id)]
    refusals: list[tuple[Callable[..., Any], tuple[Any, ...], tuple[int, str]]] = [
        (kith.enroll_album_group, (shared, "g999", "ada"), (404, "album_group_not_found")),
        (kith.enroll_album_group, (shared, one.id, "a/b"), (422, "invalid_request")),
        (kith.merge_album_group, (shared, one.id, one.id), (422, "invalid_request")),
        (kith.merge_album_group, (shared, one.id, "g999"), (404, "album_group_not_found")),
        (kith.split_album_group, (shared, one.id, everyone), (422, "invalid_request")),
        (kith.split_album_group, (shared, one.id, [two.faces[0].id]), (404, "album_group_not_found")),
        (kith.album, ("0" * 32,), (404, "album_not_found")),
        (kith.create_album, (Bytes(b"no archive" * 99),), (422, "archive_invalid")),
        (kith.create_album, (Bytes(as_zip(photos)), 1.5), (422, "invalid_request")),
    ]
    for call, arguments, expected in refusals:
        assert problem(call, SHARED, *arguments) == expected
    kith.create_gallery("elsewhere")
    assert problem(kith.album, "elsewhere", shared) == (404, "album_not_found")


def test_a_key_of_another_gallery_or_without_the_scope_sees_no_album(kith: Kith, shared: str, server: str) -> None:
    reader = kith.create_key("reader", ["read"]).token
    stranger = kith.create_key("stranger", ["read", "enroll"], galleries=["elsewhere"]).token
    with Kith(server, reader) as reading, Kith(server, stranger) as other:
        assert reading.album(SHARED, shared).state == "ready"
        assert problem(reading.enroll_album_group, SHARED, shared, "g1", "ada") == (403, "forbidden")
        assert problem(reading.delete_album, SHARED, shared) == (403, "forbidden")
        assert problem(other.album, SHARED, shared) == (404, "gallery_not_found")


def test_pages_of_groups_and_faces_have_each_once(kith: Kith, shared: str, server: str) -> None:
    for path, field in (("groups", "id"), ("groups/g1/faces", "id")):
        seen, cursor = list[str](), None
        while not seen or cursor is not None:
            query = {"limit": "3"} | ({"cursor": cursor} if cursor else {})
            url, headers = f"{server}/v1/galleries/{SHARED}/albums/{shared}/{path}", {"X-API-Key": OPERATOR}
            page = httpx.get(url, params=query, headers=headers).json()
            seen += [one[field] for one in page["data"]]
            cursor = page["next"]
        assert len(seen) == len(set(seen)) > 3
    found = kith.album(SHARED, shared)
    assert len(list(kith.album_groups(SHARED, shared))) == found.group_count + found.single_count


def test_nothing_readable_is_stored_and_deletion_leaves_nothing(
    kith: Kith, album: str, settings: Settings, photos: dict[str, bytes]
) -> None:
    path = settings.data_dir / "kith.db"
    content = path.read_bytes() + path.with_name("kith.db-wal").read_bytes()
    assert not any(text in content for text in (b"astronaut", b"group-0.jpg", b"WEBP"))
    receipt = kith.delete_album("g", album).receipt
    assert (receipt.kind, receipt.subject, receipt.removed) == ("album", album, {})
    assert kith.delete_album("g", album).receipt.id == receipt.id
    assert problem(kith.job, album) == (404, "job_not_found")
    assert rows(settings) == {"albums": 0, "album_faces": 0, "job_items": 0}
    assert list((settings.data_dir / "spool").iterdir()) == []


def many(photos: dict[str, bytes], count: int) -> dict[str, bytes]:
    """Return different photos of two people: JPEG decoders ignore what follows the image."""
    originals = list(photos.values())[:8]
    return {f"{number}.jpg": originals[number % 8] + str(number).encode() for number in range(count)}


def rows(settings: Settings) -> dict[str, int]:
    """Count the rows of gallery "g"."""
    owned = {
        "albums": f"gallery_pk = {G}",
        "album_faces": f"album_pk NOT IN (SELECT pk FROM albums WHERE gallery_pk != {G})",
        "job_items": f"job_pk NOT IN (SELECT pk FROM jobs WHERE gallery_pk != {G})",
    }
    with closing(sqlite3.connect(settings.data_dir / "kith.db")) as database:
        return {
            table: database.execute(f"SELECT count(*) FROM {table} WHERE {own}").fetchone()[0]
            for table, own in owned.items()
        }


def test_an_album_that_is_deleted_or_canceled_while_it_is_made_leaves_nothing(
    kith: Kith, photos: dict[str, bytes], settings: Settings
) -> None:
    kith.create_gallery("g")
    deleted = kith.create_album("g", Bytes(as_zip(many(photos, 120))))
    has_done(kith, deleted, 16)
    assert kith.album("g", deleted.id).state == "grouping"
    assert problem(lambda: list(kith.album_groups("g", deleted.id))) == (409, "album_not_ready")
    kith.delete_album("g", deleted.id)
    is_eventually(lambda: not list((settings.data_dir / "spool").iterdir()))
    canceled = kith.create_album("g", Bytes(as_zip(many(photos, 120))))
    has_done(kith, canceled, 16)
    kith.cancel_job(canceled.id)
    assert kith.wait_for(canceled.id, 60).state == "canceled"
    is_eventually(lambda: kith.albums("g") == [])
    assert rows(settings)["album_faces"] == 0


def test_an_album_has_bounds(
    kith: Kith, photos: dict[str, bytes], server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kith.create_gallery("g")
    for module, name in ((repository, "MAX_FACES"), (usecase, "MAX_PHOTOS")):
        with monkeypatch.context() as patched:
            patched.setattr(module, name, 5)
            job = made(kith, photos)
        assert job.problem is not None
        assert (job.state, job.problem.code) == ("failed", "album_too_large")
        is_eventually(lambda: kith.albums("g") == [])
    monkeypatch.setattr(repository, "MAX_ALBUMS", 1)
    only = made(kith, {"1.jpg": photos["2024/actor-0.jpg"]})
    found = kith.album("g", only.id)
    assert (found.threshold, found.group_count, found.single_count) == (None, 0, 1)
    assert problem(kith.create_album, "g", Bytes(as_zip(photos))) == (409, "too_many_albums")
    assert problem(kith.create_album, "g", Bytes(b"no archive" * 99)) == (409, "too_many_albums"), "before the upload"
    kith.delete_album("g", only.id)
    started = kith.create_album("g", Bytes(as_zip(photos)))
    assert [album.id for album in kith.albums("g")] == [started.id]
    kith.cancel_job(started.id)
    assert domain.MAX_FACES == 10_000


@ON_BOTH
def test_requests_at_the_same_time_do_not_exceed_the_number_of_albums(
    database_url: DatabaseUrl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repository, "MAX_ALBUMS", 2)
    together, later = threading.Barrier(8), datetime.now(UTC) + timedelta(days=7)
    with closing(open_database(database_url())) as database:
        store = Store(database)
        gallery = store.galleries.create("g", "f" * 32, 4, GallerySettings())

        def create(_: int) -> bool:
            beginning = store.albums.beginning(gallery, 0.01, later)
            together.wait()
            try:
                JobStore(database).create(gallery, "album", {}, beginning=beginning)
            except LimitReachedError as error:
                assert error.code == "too_many_albums"
                return False
            return True

        with ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(create, range(8))) == 2
        assert len(store.albums.list_all(gallery)) == 2


def test_albums_expire(kith: Kith, album: str, settings: Settings) -> None:
    found = kith.album("g", album)
    assert (found.expires_at - found.created_at).total_seconds() == pytest.approx(7 * 86_400, abs=5)
    with closing(open_database(settings.sql_url)) as database:
        albums = Store(database).albums
        assert albums.delete_expired(datetime.now(UTC) + timedelta(days=6.9)) == 0
        assert albums.delete_expired(datetime.now(UTC) + timedelta(days=7.1)) == 1
    assert kith.albums("g") == []
    (line,) = [line for line in kith.audit("g") if line.event == "album_expired"]
    assert line.details["album"] == album
    assert rows(settings) == {"albums": 0, "album_faces": 0, "job_items": 0}


def test_the_rest_of_an_enrolled_group_is_exported_and_erased_with_the_subject(
    kith: Kith, album: str, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usecase, "MAX_ENROLLED", 1)
    own, other = of(kith, album, "astronaut"), of(kith, album, "actor")
    assert kith.enroll_album_group("g", album, own.id, "eileen").remaining_count == 3
    kith.put_subject("g", "nobody")
    with closing(open_database(settings.sql_url)) as database:
        gallery = Store(database).galleries.get("g")
        document = everything_about(database, gallery, "eileen")
        assert everything_about(database, gallery, "nobody")["subject"]["album_faces"] == []
    faces = document["subject"]["album_faces"]
    assert (len(faces), {f"g{face['group_number']}" for face in faces}) == (3, {own.id})
    assert {face["photo"] for face in faces} < set(shown(own))
    assert all(face["albums"]["id"] == album and face["crop"]["image"] and len(face["vector"]) > 100 for face in faces)
    kith.put_subject("g", "collins", name="Eileen Collins")
    kith.merge_subject("g", "eileen", "collins")
    known = groups(kith, album)[own.id]
    assert (known.subject, known.name) == ("collins", "Eileen Collins")
    apart = kith.split_album_group("g", album, own.id, [known.faces[-1].id])
    merged = kith.merge_album_group("g", album, own.id, other.id)
    assert (apart.subject, merged.subject, merged.face_count) == (None, "collins", 6)
    before = kith.album("g", album).face_count
    kith.delete_subject("g", "collins")
    assert kith.album("g", album).face_count == before - 6
    assert not {own.id, other.id} & set(groups(kith, album))
    assert apart.id in groups(kith, album, True), "somebody else, as the caller said"


def test_the_subject_of_a_group_outlives_a_merge_with_another_ones(
    kith: Kith, album: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usecase, "MAX_ENROLLED", 1)
    first, second = of(kith, album, "astronaut"), of(kith, album, "actor")
    kith.enroll_album_group("g", album, first.id, "eileen")
    kith.enroll_album_group("g", album, second.id, "tom")
    assert kith.merge_album_group("g", album, first.id, second.id).subject == "tom"
    counts = [kith.album("g", album).face_count]
    for name in ("eileen", "tom"):
        kith.delete_subject("g", name)
        counts.append(kith.album("g", album).face_count)
    assert counts == [counts[0], counts[0], counts[0] - 6]


def test_no_name_of_a_photo_outlives_the_erasure_of_its_person(
    kith: Kith, photos: dict[str, bytes], settings: Settings
) -> None:
    """Neither in the album nor in the items of its job, however they are sealed."""
    kith.create_gallery("g")
    people = {name: photo for name, photo in photos.items() if name.startswith("2024/")}
    job = made(
        kith, people | {"astronaut-copy.jpg": photos["2024/astronaut-0.jpg"], "astronaut.txt": b"x", "0.jpg": b"x"}
    )
    assert job.counts == {"faces_found": 8, "copy": 1, "ignored": 1, "image_format": 1}
    items = list(kith.job_items(job.id))
    assert Counter(item.outcome for item in items) == job.counts
    assert [item.item for item in items if item.item] == ["0.jpg"], "only who reads of a refusal needs the name"
    assert [item.item for item in kith.job_items(job.id, failed=True)] == ["0.jpg"]
    for name in ("astronaut", "actor"):
        assert kith.enroll_album_group("g", job.id, of(kith, job.id, name).id, name).remaining_count == 0
    kith.delete_subject("g", "astronaut")
    with closing(open_database(settings.sql_url)) as database, database.read() as connection:
        gallery = Store(database).galleries.get("g")
        for table, owner, purpose in (
            (job_items.join(jobs), jobs, ITEM),
            (album_faces.join(albums), albums, ALBUM_FACE),
        ):
            sealed = sa.select(table.left.c.sealed).select_from(table).where(owner.c.gallery_pk == gallery.pk)
            for value in connection.execute(sealed).scalars():
                assert "astronaut" not in str(gallery.seal.open_json(value, purpose))


def test_erased_people_are_not_enrolled_by_a_request_that_began_before(
    kith: Kith, album: str, settings: Settings
) -> None:
    actor = of(kith, album, "actor")
    with closing(open_database(settings.sql_url)) as database:
        store = Store(database)
        before, number = store.galleries.get("g"), int(actor.id[1:])
        _, faces = store.albums.to_enroll(before, album, number, 1)
        kith.put_subject("g", "tom")
        kith.delete_subject("g", "tom")
        template = {name: NewTemplate("1" * 32, face.vector, "photo") for name, face in faces.items()}
        with pytest.raises(SubjectErasedError):
            store.albums.enroll(before, album, number, "tom", None, template, as_read=False)
        assert len(list(kith.album_faces("g", album, actor.id))) == 4, "nothing is half done"


def test_only_a_checked_clock_deletes_albums_by_age(
    kith: Kith, album: str, settings: Settings, photos: dict[str, bytes]
) -> None:
    """An album past its time is hidden, and stays until the periodic deletion, which checks the clock."""
    face = next(iter(groups(kith, album).values())).faces[0].id
    with closing(sqlite3.connect(settings.data_dir / "kith.db")) as database, database:
        database.execute(f"UPDATE albums SET expires_at = created_at WHERE gallery_pk = {G}")
    assert kith.albums("g") == []
    assert problem(kith.album, "g", album) == (404, "album_not_found")
    assert kith.crops("g", [{"album": album, "face": face}]) == [None]
    made(kith, {"1.jpg": photos["2024/actor-0.jpg"]})
    canceled = kith.create_album("g", Bytes(as_zip(many(photos, 100))))
    kith.cancel_job(canceled.id)
    assert kith.wait_for(canceled.id, 60).state == "canceled"
    is_eventually(lambda: rows(settings)["albums"] == 2)
    assert kith.delete_album("g", album).receipt.kind == "album"


def test_operations_on_groups_read_neither_other_albums_nor_vectors(
    kith: Kith, album: str, photos: dict[str, bytes], settings: Settings
) -> None:
    made(kith, photos)
    read: list[str] = []
    with closing(open_database(settings.sql_url)) as database:
        store = Store(database)
        gallery = store.galleries.get("g")
        sa.event.listen(database.engine, "before_cursor_execute", lambda *about: read.append(about[2]))
        store.albums.groups(gallery, album, None, None, 100)
        store.albums.faces(gallery, album, 1, None, 100)
        (moved,) = [face for _, face in store.albums.faces(gallery, album, 1, None, 1)]
        apart = store.albums.split(gallery, album, 1, [moved.id])
        store.albums.merge(gallery, album, apart.number, 1)
    statements = [text for text in read if "album_faces" in text]
    assert len(statements) > 9
    assert not any("album_faces.vector" in text or "album_faces.crop" in text for text in statements)
    assert not any("face_count" in text and "albums.gallery_pk" in text for text in statements), "no counts of albums"
    assert kith.album("g", album).face_count == kith.albums("g")[0].face_count
