"""Archives of photos, some of them malicious, and the jobs that enroll them."""

from __future__ import annotations

import gzip
import http.client
import io
import json
import os
import shutil
import tarfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kith import Kith, KithClientError
from kith.wire.jobs import JobOut
from models.vision.photo_files import list_photos
from service import wiring
from service.cli.tools.photo_folders import TarStream, photos_of, split
from service.core.errors import ArchiveInvalidError, ImageError, KithError, StorageFullError
from service.core.unpacking import ZstdFile
from service.domain.gallery import GallerySettings
from service.inference import archives
from service.inference.archives import ArchiveContents, ArchiveLimits, iterate_members, read_contents
from service.jobs import spool as spool_module
from service.jobs.spool import ABANDONED_AFTER_S, RESERVED_BYTES, Spool
from service.security.sealing import Seal, new_key
from service.server import embedded
from service.settings import Settings, load_settings
from service.storage.repositories.jobs import JobStore
from service.storage.repositories.store import Store
from tests.conftest import jpeg
from tests.databases import open_database
from tests.refusals import raises_code

LIMITS = ArchiveLimits(1000, 100_000, 1_000_000)
SEAL = Seal(new_key())
FILES = {"ada/1.jpg": b"first", "ada/old/2.JPEG": b"second", "bob/1.png": b"third", "bob/notes.txt": b"no photo"}


def as_tar(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, payload in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(payload)
            archive.addfile(info, io.BytesIO(payload))
    return buffer.getvalue()


def as_zip(files: dict[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, payload in files.items():
            archive.writestr(name, payload)
    return buffer.getvalue()


def as_zstd(files: dict[str, bytes]) -> bytes:
    return _zstd(as_tar(files))


def _zstd(payload: bytes) -> bytes:
    packed = io.BytesIO()
    with ZstdFile(packed, "w") as stream:
        stream.write(payload)
    return packed.getvalue()


def as_gzip(files: dict[str, bytes]) -> bytes:
    return gzip.compress(as_tar(files))


KINDS: list[Callable[[dict[str, bytes]], bytes]] = [as_zip, as_tar, as_gzip, as_zstd]


@pytest.fixture
def archive(tmp_path: Path) -> Callable[[bytes], Path]:
    def write(payload: bytes) -> Path:
        path = tmp_path / "archive"
        path.write_bytes(payload)
        return path

    return write


Archive = Callable[[bytes], Path]


def nothing() -> None:
    pass


def what_is_in(path: Path, strip: int | None = None, limits: ArchiveLimits = LIMITS) -> ArchiveContents:
    return read_contents(path, limits, strip, nothing)


def payloads(path: Path, limits: ArchiveLimits = LIMITS) -> dict[str, bytes]:
    return {member.name: member.read() for member in iterate_members(path, limits)}


@pytest.mark.parametrize("pack", KINDS)
def test_every_kind_of_archive_is_read_alike(archive: Archive, pack: Callable[[dict[str, bytes]], bytes]) -> None:
    path = archive(pack(FILES))
    assert payloads(path) == FILES
    found = what_is_in(path)
    assert found.subjects == {"ada/1.jpg": "ada", "ada/old/2.JPEG": "ada", "bob/1.png": "bob"}
    assert (found.missing, found.ignored, found.hidden) == ([], {"bob/notes.txt": "bob"}, 0)


def test_a_folder_above_the_people_is_seen(archive: Archive) -> None:
    path = archive(as_zip({f"photos/{name}": payload for name, payload in FILES.items()}))
    assert set(what_is_in(path).subjects.values()) == {"ada", "bob"}
    assert set(what_is_in(path, strip=0).subjects.values()) == {"photos"}
    assert set(what_is_in(path, strip=1).subjects.values()) == {"ada", "bob"}
    # All photos show one person, so the folder names the subject.
    alone = archive(as_zip({"ada/1.jpg": b"", "ada/2.jpg": b""}))
    assert set(what_is_in(alone).subjects.values()) == {"ada"}
    assert what_is_in(archive(as_zip({"1.jpg": b""}))).subjects == {"1.jpg": None}


@pytest.mark.parametrize("root", ["", "photos/"])
def test_a_manifest_says_whose_a_photo_is(archive: Archive, root: str) -> None:
    manifest = 'file,subject\n./x/1.jpg,ada\n2.jpg,"Lovelace, A."\ngone.jpg,bob\n'.encode("utf-8-sig")
    files = {"x/1.jpg": b"1", "manifest.csv": manifest, "2.jpg": b"2", "3.jpg": b"3"}
    found = what_is_in(archive(as_tar({root + name: payload for name, payload in files.items()})))
    assert found.subjects == {f"{root}x/1.jpg": "ada", f"{root}2.jpg": "Lovelace, A."}
    assert (found.missing, found.ignored) == (["gone.jpg"], {f"{root}3.jpg": None})


@pytest.mark.parametrize("manifest", [b"file,person\n1.jpg,ada\n", b"\xff\xfe\x00", b'file,subject\n"1.jpg\n'])
def test_a_manifest_that_cannot_be_read(archive: Archive, manifest: bytes) -> None:
    with pytest.raises(ArchiveInvalidError):
        what_is_in(archive(as_zip({"manifest.csv": manifest, "1.jpg": b"1"})))


def test_hidden_files_are_passed_over_and_paths_are_only_names(archive: Archive, tmp_path: Path) -> None:
    outside = "../" * 20 + "etc/passwd.jpg"
    files = {"__MACOSX/ada/._1.jpg": b"", ".git/a/1.jpg": b"", outside: b"x", "/root/1.jpg": b"y", "a\\b.jpg": b"z"}
    # A backslash separates folders in a zip alone: writers on Windows put it there.
    for pack, folder in ((as_tar, None), (as_zip, "a")):
        path = archive(pack(files))
        found = what_is_in(path)
        assert (set(found.subjects.values()), found.hidden) == ({"etc", "root", folder}, 2)
        assert payloads(path) == {name if folder is None else name.replace("\\", "/"): files[name] for name in files}
    assert [path.name for path in tmp_path.iterdir()] == ["archive"]


def test_links_and_devices_are_no_photos(archive: Archive) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for number, kind in enumerate((tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE)):
            info = tarfile.TarInfo(f"ada/{number}.jpg")
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
    assert payloads(archive(buffer.getvalue())) == {}


def test_unusual_names_are_distinguished_and_can_be_stored(archive: Archive) -> None:
    long = "ada/" + "x" * 3000
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name in ("ada/1.jpg", "ada/1.jpg", f"{long}1.jpg", f"{long}2.jpg", "ada/\udcff.jpg"):
            tar.addfile(tarfile.TarInfo(name))
    names = list(payloads(archive(buffer.getvalue())))
    assert names[:2] == ["ada/1.jpg", "ada/1.jpg#2"]
    assert len(set(names)) == 5
    assert all(len(name) <= 512 and name.encode() for name in names)


# Archives that mean harm


def test_limits_hold_before_anything_is_believed(archive: Archive) -> None:
    many = {f"a/{i}.jpg": b"" for i in range(20)}
    zeros = {f"a/{i}.jpg": bytes(90_000) for i in range(20)}
    for pack in KINDS:
        with raises_code("archive_too_large", match="19 files"):
            what_is_in(archive(pack(many)), limits=ArchiveLimits(19, 100, 1_000_000))
        with raises_code("archive_too_large", match="unpacked"):
            what_is_in(archive(pack(zeros)))
        # A photo that is too large fails alone.
        path = archive(pack({"a/1.jpg": bytes(100_001), "a/2.jpg": b"fine"}))
        first, second = iterate_members(path, LIMITS), []
        for member in first:
            try:
                second.append(member.read())
            except ImageError as error:
                assert error.code == "image_too_large"
                second.append(b"refused")
        assert second == [b"refused", b"fine"]


def test_a_zip_that_lies_about_sizes_unpacks_to_no_more(archive: Archive) -> None:
    payload = bytearray(as_zip({"a/1.jpg": bytes(50_000_000)}))
    for signature, offset in ((b"PK\x03\x04", 22), (b"PK\x01\x02", 24)):
        at = payload.index(signature) + offset
        payload[at : at + 4] = (1000).to_bytes(4, "little")
    (member,) = iterate_members(archive(bytes(payload)), LIMITS)
    with pytest.raises(ArchiveInvalidError):
        member.read()


def test_compressions_whose_readers_do_not_stop_are_refused(archive: Archive) -> None:
    for compression in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        (member,) = iterate_members(archive(as_zip({"a/1.jpg": bytes(1000)}, compression)), LIMITS)
        with pytest.raises(ArchiveInvalidError, match="neither stored nor deflated"):
            member.read()


def test_an_encrypted_file_fails_alone(archive: Archive) -> None:
    payload = bytearray(as_zip({"a/1.jpg": b"x", "a/2.jpg": b"y"}, zipfile.ZIP_STORED))
    for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        payload[payload.index(signature) + offset] |= 1
    first, second = iterate_members(archive(bytes(payload)), LIMITS)
    with pytest.raises(ArchiveInvalidError, match="encrypted"):
        first.read()
    assert second.name == "a/2.jpg"


def test_a_zips_directory_is_not_read_if_it_is_huge(archive: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    path = archive(as_zip({f"a/{i}.jpg": b"" for i in range(2000)}))
    monkeypatch.setattr(archives, "MAX_DIRECTORY_BYTES", 10_000)
    with raises_code("archive_too_large", match="directory"):
        what_is_in(path, limits=ArchiveLimits(10_000, 10_000, 10_000))


def test_a_tar_header_that_would_fill_the_memory_is_refused(archive: Archive) -> None:
    header = tarfile.TarInfo("x")
    for kind in (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK):
        header.type, header.size = kind, 1 << 30
        with raises_code("archive_too_large", match="header"):
            what_is_in(archive(header.tobuf() + bytes(10_240)))
    header.type, header.size = tarfile.GNUTYPE_SPARSE, 512
    with pytest.raises(ArchiveInvalidError, match="sparse"):
        what_is_in(archive(header.tobuf() + bytes(10_240)))
    modern = tarfile.TarInfo("x")
    modern.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "a/1.jpg"}
    modern.size = 512
    with pytest.raises(ArchiveInvalidError, match="sparse"):
        what_is_in(archive(modern.tobuf(tarfile.PAX_FORMAT) + b"9999999\n" + bytes(10_240)))


@settings(max_examples=150)
@given(
    kind=st.integers(0, 3),
    cut=st.floats(0, 1),
    flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=6),
)
def test_a_damaged_archive_is_refused_and_never_crashes(
    archive: Archive, kind: int, cut: float, flips: list[tuple[float, int]]
) -> None:
    payload = bytearray(KINDS[kind](FILES | {"manifest.csv": b"file,subject\nada/1.jpg,ada\n"}))
    for place, value in flips:
        payload[int(place * len(payload))] = value
    path = archive(bytes(payload[: max(1, int(cut * len(payload)))]))
    with suppress(KithError):
        what_is_in(path)
        for member in iterate_members(path, LIMITS):
            with suppress(KithError):
                member.read()


# The spool


def test_a_full_disk_is_reported_and_leaves_no_files(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.path("a" * 32).symlink_to("/dev/full")
    with pytest.raises(StorageFullError), spool.receiving("a" * 32, SEAL) as file:
        file.write(bytes(1_000_000))
        spool.sync(file)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(StorageFullError):
        spool.check_free_space(1 << 60)
    spool.check_free_space(1)


def small_disk(folder: Path, free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a disk with this much free space, independent of the folder's files."""
    usage = shutil.disk_usage(folder)

    def seen(path: Path) -> Any:
        taken = sum(file.stat().st_size for file in path.iterdir())
        return usage._replace(free=RESERVED_BYTES + free - taken)

    monkeypatch.setattr(shutil, "disk_usage", seen)
    monkeypatch.setattr(spool_module, "CHECK_INTERVAL_BYTES", 1_000_000)


def test_archives_that_come_at_once_do_not_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each archive fits when it is announced, but not all together."""
    spool, block = Spool(tmp_path), bytes(500_000)
    small_disk(tmp_path, 10_000_000, monkeypatch)
    for _ in range(2):
        spool.check_free_space(8_000_000)
    with spool.receiving("a" * 32, SEAL) as first:
        for _ in range(16):
            spool.write(first, block)
        with pytest.raises(StorageFullError), spool.receiving("b" * 32, SEAL) as second:
            for _ in range(16):
                spool.write(second, block)
        assert [file.name for file in tmp_path.iterdir()] == ["a" * 32]


def test_an_archive_of_any_size_does_not_fill_the_disk(
    kith: Kith, gallery: str, server: str, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = settings.data_dir / "spool"
    folder.mkdir(exist_ok=True)
    small_disk(folder, 4_000_000, monkeypatch)

    def body() -> Iterator[bytes]:
        yield b"PK\3\4" + bytes(60)
        for _ in range(100):
            yield bytes(200_000)

    path = f"/v1/galleries/{gallery}/enrollments"
    answer = httpx.post(server + path, content=body(), timeout=60)
    assert (answer.status_code, answer.json()["code"]) == (507, "storage_full")
    assert list(folder.iterdir()) == []
    with closing(http.client.HTTPConnection(server.removeprefix("http://"), timeout=60)) as connection:
        connection.putrequest("POST", path)
        connection.putheader("Content-Length", "5000000")
        connection.endheaders()  # refused before it is sent
        full = connection.getresponse()
        assert (full.status, json.loads(full.read())["code"]) == (507, "storage_full")


def test_abandoned_archives_are_removed(tmp_path: Path) -> None:
    spool, database = Spool(tmp_path / "spool"), open_database(f"sqlite:///{tmp_path}/kith.db")
    store = JobStore(database)
    spool.tidy(store)
    gallery = Store(database).galleries.create("g", "f" * 32, 8, GallerySettings())
    waiting, over = (store.create(gallery, "enrollment", {}) for _ in range(2))
    store.cancel(over.id)
    for name in (waiting.id, over.id, "never-a-job", "still-coming"):
        with spool.receiving(name, SEAL) as file:
            file.write(b"x")
        if name != "still-coming":
            os.utime(spool.path(name), (0, time.time() - 2 * ABANDONED_AFTER_S))
    spool.path("removed-meanwhile").symlink_to(tmp_path / "nothing")  # as listed, and gone when it is looked at
    spool.tidy(store)
    spool.path("removed-meanwhile").unlink()
    assert sorted(path.name for path in (tmp_path / "spool").iterdir()) == sorted([waiting.id, "still-coming"])
    assert spool.has(waiting)
    assert not spool.has(over)
    os.utime(spool.path("still-coming"), (0, time.time() + 400 * 86400))  # written while the clock was wrong
    spool.tidy(store)
    assert [path.name for path in (tmp_path / "spool").iterdir()] == [waiting.id]
    database.close()


# Folders


def test_a_folders_photos_are_found_and_sent(tmp_path: Path, archive: Archive) -> None:
    folder = tmp_path / "people"
    for name in ("ada/1.jpg", "ada/deep/er/2.png", "ada/notes.txt", "bob ü/5.JPG"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode() * 100)
    (folder / "bob ü" / "6.jpg").symlink_to(folder / "ada" / "1.jpg")
    photos = photos_of(folder, list_photos(folder))
    names = ["ada/1.jpg", "ada/deep/er/2.png", "bob ü/5.JPG", "bob ü/6.jpg"]
    assert [photo.name for photo in photos] == names
    stream = TarStream(photos)
    sent = b"".join(stream)
    assert len(sent) == stream.size == len(b"".join(stream))
    assert payloads(archive(sent)) == {name: (folder / name).read_bytes() for name in names}
    assert [[p.name for p in part] for part in split(photos, 3000)] == [names[:2], names[2:]]
    photos[0].path.unlink()
    assert len(b"".join(stream)) == stream.size
    assert set(stream.unreadable) == {"ada/1.jpg", "bob ü/6.jpg"}


# Jobs


class Bytes:
    def __init__(self, payload: bytes) -> None:
        self.payload, self.size = payload, len(payload)

    def __iter__(self) -> Iterator[bytes]:
        yield self.payload


def enrolled(kith: Kith, gallery: str, payload: bytes, **options: Any) -> JobOut:
    return kith.wait_for(kith.enroll_archive(gallery, Bytes(payload), **options).id, 60)


def codes(kith: Kith, job: JobOut) -> dict[str, str]:
    return {item.item: item.problem.code if item.problem else "" for item in kith.job_items(job.id)}


@pytest.fixture(scope="module")
def photos(
    astronaut: NDArray[np.uint8], actor: NDArray[np.uint8], group: NDArray[np.uint8], nobody: NDArray[np.uint8]
) -> dict[str, bytes]:
    return {
        "eileen/1.jpg": jpeg(astronaut),
        "eileen/2.jpg": jpeg(astronaut[:, ::-1], 70),
        "eileen/copy.jpg": jpeg(astronaut),
        "eileen/tom.jpg": jpeg(actor),
        "nobody/1.jpg": jpeg(nobody),
        "nobody/2.jpg": b"no photo at all",
        "several/1.jpg": jpeg(group),
        "tom/1.jpg": jpeg(actor),
        "tom/dark.jpg": jpeg((actor * 0.12).astype(np.uint8)),
        "twin/1.jpg": jpeg(astronaut[:, ::-1], 80),
        "lost.jpg": jpeg(actor),
        "tom/readme.txt": b"",
        " spaces /1.jpg": jpeg(actor),
    }


EXPECTED = {
    "eileen/1.jpg": "",
    "eileen/2.jpg": "",
    "eileen/copy.jpg": "",
    "eileen/tom.jpg": "inconsistent_template",
    "nobody/1.jpg": "no_face",
    "nobody/2.jpg": "image_format",
    "several/1.jpg": "several_faces",
    "tom/1.jpg": "",
    "tom/dark.jpg": "low_quality",
    "twin/1.jpg": "duplicate_subject",
    "lost.jpg": "invalid_request",
    "tom/readme.txt": "",
    " spaces /1.jpg": "invalid_request",
}


def test_each_photo_of_an_archive_is_decided_on_alone(
    kith: Kith, gallery: str, photos: dict[str, bytes], settings: Settings
) -> None:
    job = enrolled(kith, gallery, as_zip(photos))
    assert (job.state, job.total_count, job.done_count, job.failed_count) == ("succeeded", 13, 13, 8)
    assert codes(kith, job) == EXPECTED
    items = {item.item: item for item in kith.job_items(job.id)}
    told = {"tom/readme.txt": "ignored", "tom/1.jpg": "enrolled", "nobody/1.jpg": "no_face"}
    assert {name: items[name].outcome for name in told} == told
    assert {item.face_count for item in items.values() if item.outcome == "enrolled"} == {1}
    assert "eileen" not in str(items["twin/1.jpg"].problem)  # an erasure of eileen would not find her name there
    assert (job.counts["enrolled"], job.counts["already_enrolled"], job.details) == (3, 1, {"ignored": 1})
    assert {s.id: s.template_count for s in kith.subjects(gallery)} == {"eileen": 2, "tom": 1}
    assert kith.gallery(gallery).template_count == 3
    # The same once more, otherwise packed and named: nothing is enrolled twice.
    again = enrolled(kith, gallery, as_gzip({f"x/{name}": payload for name, payload in photos.items()}), strip=1)
    assert again.counts["already_enrolled"] == 4
    assert "enrolled" not in again.counts
    assert kith.gallery(gallery).template_count == 3
    # Deleted templates may be enrolled again; moved templates stay.
    tom, *_ = kith.templates(gallery, "tom")
    kith.put_subject(gallery, "thomas")
    kith.move_template(gallery, "tom", tom.id, "thomas")
    kith.delete_subject(gallery, "eileen")
    third = enrolled(kith, gallery, as_zip(photos))
    assert (third.counts["enrolled"], third.counts["already_enrolled"]) == (2, 2)
    assert {s.id: s.template_count for s in kith.subjects(gallery)} == {"eileen": 2, "thomas": 1, "tom": 0}
    assert list((settings.data_dir / "spool").iterdir()) == []


def test_an_archive_and_single_photos_end_the_same(kith: Kith, gallery: str, photos: dict[str, bytes]) -> None:
    kith.create_gallery("one-by-one")
    for name, payload in photos.items():
        folder, _, file = name.rpartition("/")
        if EXPECTED.get(name) == "invalid_request" or file in ("copy.jpg", "readme.txt"):
            continue
        try:
            kith.enroll("one-by-one", folder, payload)
        except KithClientError as error:
            assert error.code == EXPECTED[name]
        else:
            assert EXPECTED[name] == ""
    enrolled(kith, gallery, as_tar(photos))
    both = [{s.id: s.template_count for s in kith.subjects(name)} for name in ("one-by-one", gallery)]
    assert both[0] == both[1]
    kith.delete_gallery("one-by-one")


def test_what_may_be_overridden(kith: Kith, gallery: str, photos: dict[str, bytes]) -> None:
    allowed = {"allow_duplicate": True, "allow_inconsistent": True, "allow_low_quality": True, "face": "largest"}
    job = enrolled(kith, gallery, as_zip(photos), **allowed)
    refused = {item: code for item, code in codes(kith, job).items() if code}
    assert set(refused.values()) == {"no_face", "image_format", "invalid_request"}


def test_by_manifest(kith: Kith, gallery: str, photos: dict[str, bytes]) -> None:
    manifest = b"file,subject\nflat.jpg,eileen\ngone.jpg,tom\n"
    job = enrolled(kith, gallery, _zstd(as_tar({"flat.jpg": photos["eileen/1.jpg"], "manifest.csv": manifest})))
    assert codes(kith, job) == {"flat.jpg": "", "gone.jpg": "invalid_request"}
    assert [s.id for s in kith.subjects(gallery)] == ["eileen"]


def test_a_body_that_is_no_archive_is_rejected_and_not_kept(kith: Kith, gallery: str, settings: Settings) -> None:
    for payload in (b"", b"%PDF-1.7", bytes(5000)):
        with pytest.raises(KithClientError) as raised:
            kith.enroll_archive(gallery, Bytes(payload))
        assert (raised.value.status, raised.value.code) == (422, "archive_invalid")
    with pytest.raises(KithClientError) as raised:
        kith.enroll_archive("no-such-gallery", Bytes(as_zip(FILES)))
    assert raised.value.code == "gallery_not_found"
    # The file begins like an archive, so the job itself fails.
    job = enrolled(kith, gallery, as_gzip(FILES)[:-20])
    assert (job.state, job.done_count) == ("failed", 0)
    assert job.problem is not None
    assert job.problem.code == "archive_invalid"
    assert list((settings.data_dir / "spool").iterdir()) == []


def test_limits_on_what_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wiring, "MAX_ENTRIES", 2)
    small = load_settings(data_dir=tmp_path, log_level="ERROR", max_upload_bytes=20_000)
    with embedded(small) as url, Kith(url) as kith:
        kith.create_gallery("g")
        with pytest.raises(KithClientError) as raised:
            kith.enroll_archive("g", Bytes(as_tar({"a/1.jpg": bytes(30_000)})))
        assert (raised.value.status, raised.value.code) == (413, "request_too_large")
        # Chunked encoding, without an announced length.
        answer = httpx.post(f"{url}/v1/galleries/g/enrollments", content=iter([as_tar({"a/1.jpg": bytes(30_000)})]))
        assert answer.status_code == 413
        assert list((tmp_path / "spool").iterdir()) == []
        job = enrolled(kith, "g", as_zip({f"a/{i}.jpg": b"" for i in range(3)}))
        assert job.problem is not None
        assert job.problem.code == "archive_too_large"


def many(photos: dict[str, bytes], count: int, others: dict[str, bytes] | None = None) -> bytes:
    """So many photos that differ, of two people by turns of five, and then the others."""
    people = [("eileen", photos["eileen/1.jpg"]), ("tom", photos["tom/1.jpg"])]
    files = {}
    for number in range(count):
        name, payload = people[number // 5 % 2]
        files[f"{name}/{number:04}.jpg"] = payload + number.to_bytes(4)
    return as_tar(files | (others or {}))


def test_called_off_or_without_its_gallery_it_ends_and_leaves_nothing(
    kith: Kith, gallery: str, photos: dict[str, bytes], settings: Settings
) -> None:
    job = kith.enroll_archive(gallery, Bytes(many(photos, 120)))
    has_done(kith, job, 5)
    kith.cancel_job(job.id)
    ended = kith.wait_for(job.id, 60)
    assert ended.state == "canceled"
    assert 5 <= ended.done_count < 120
    assert kith.gallery(gallery).template_count == ended.counts["enrolled"]
    kith.create_gallery("short-lived")
    gone = kith.enroll_archive("short-lived", Bytes(many(photos, 120)))
    has_done(kith, gone, 5)
    kith.delete_gallery("short-lived")
    is_eventually(lambda: not list((settings.data_dir / "spool").iterdir()))


def test_other_writes_to_the_gallery_delay_no_photo(kith: Kith, gallery: str, photos: dict[str, bytes]) -> None:
    """The checks of a photo are repeated only after a change of templates."""
    ended, writes = threading.Event(), 0

    def write() -> None:
        nonlocal writes
        while not ended.is_set():
            kith.put_subject(gallery, "another", metadata={"writes": writes})
            writes += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        job = enrolled(kith, gallery, many(photos, 20))
    finally:
        ended.set()
        writer.join()
    assert writes > 4, "several in each transaction of the job"
    assert (job.state, job.counts) == ("succeeded", {"enrolled": 20})


def has_done(kith: Kith, job: JobOut, photos: int) -> None:
    """Wait until a job has done so many photos, and has not ended."""
    while (now := kith.job(job.id)).done_count < photos:
        assert now.state in ("queued", "running")
        threading.Event().wait(0.02)


def is_eventually(check: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not check():
        assert time.monotonic() < deadline
        threading.Event().wait(0.05)


def test_template_ids_do_not_reveal_the_photo(kith: Kith, gallery: str, photos: dict[str, bytes]) -> None:
    """Template ids appear in receipts; they are keyed, so equal photos have different ids in two galleries."""
    one = as_zip({"eileen/1.jpg": photos["eileen/1.jpg"]})
    kith.create_gallery("of-another-key")
    for name in (gallery, "of-another-key"):
        assert enrolled(kith, name, one).counts == {"enrolled": 1}
    (here,), (there,) = (kith.templates(name, "eileen") for name in (gallery, "of-another-key"))
    assert here.id != there.id
    kith.delete_gallery("of-another-key")
